"""What a scripted engine can be told to do instead of answering well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvloop_connector.settings import Role
from tests.integration import hazards
from tests.integration.scripted_answers import BLOCK_SIZE, event, good, prompt_ids, stream, stream_events, whole_answer

if TYPE_CHECKING:
    from tests.integration.scripted_engine import ScriptedEngine

Step = Callable[["ScriptedEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def fails(status: int, message: str = "no", headers: Mapping[str, str] | None = None) -> Step:
    """An error in vLLM's shape."""

    async def step(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"error": {"message": message, "type": "Error", "param": None, "code": status}}
        return web.json_response(error, status=status, headers=headers)

    return step


async def stops(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Nothing, ever."""
    engine.tries_patience = True
    return await waits(asyncio.Event())(engine, request, body)


async def aborts(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """What vLLM answers between SIGTERM and its end."""
    if not body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "abort"}
        return web.json_response({"id": "answer", "choices": [choice], "kv_transfer_params": None})
    first: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    last = {"index": 0, "delta": {}, "finish_reason": "abort"}
    events = [event({"choices": [first]}), event({"choices": [last]}), b"data: [DONE]\n\n"]
    return await stream(engine, request, body, events)


async def resets(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection ends before an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def answers(change: Callable[[dict[str, Any]], None]) -> Step:
    """A good answer that is changed before it goes out."""

    async def step(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = whole_answer(engine, request.path, body)
        change(answer)
        params, choices = answer.get("kv_transfer_params"), answer.get("choices") or [{}]
        if params and engine.role is Role.DECODE and "token_ids" in choices[0]:
            # The text that the test makes up is what the blocks hold.
            held = [*prompt_ids(engine, body), *choices[0]["token_ids"]]
            hazards.witness().gave(engine, params, held, BLOCK_SIZE)
        return web.json_response(answer)

    return step


def streams(select: Callable[[list[bytes]], list[bytes]], *, reset: bool = False) -> Step:
    """Some of a good stream's events; ``reset``: then the connection ends without the stream's end."""

    async def step(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        events = select(stream_events(engine, request.path, body))
        if not reset:
            return await stream(engine, request, body, events)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for item in events:
            await response.write(item)
        assert request.transport is not None
        await asyncio.sleep(0)
        request.transport.close()
        return response

    return step


def waits(until: asyncio.Event, then: Step = good) -> Step:
    """Nothing until the event; then what ``then`` does. A client that leaves is noted."""

    async def step(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        engine.arrived.set()
        try:
            await until.wait()
        except asyncio.CancelledError:
            engine.left.set()
            raise
        response = await then(engine, request, body)
        engine.finished.set()
        return response

    return step


def starts_then_waits(until: asyncio.Event) -> Step:
    """The first text of a stream, and nothing more until the event. A client that leaves is noted."""

    async def step(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        events = stream_events(engine, request.path, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            for item in events[:2]:
                await response.write(item)
            engine.arrived.set()
            await until.wait()
        except asyncio.CancelledError:
            engine.left.set()
            raise
        for item in events[2:]:
            await response.write(item)
        await response.write_eof()
        return response

    return step
