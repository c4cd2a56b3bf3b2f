"""The HTTP handlers of ``/v1/responses`` and ``/v1/messages``."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

from kvloop_sim import messages_api, responses_api
from kvloop_sim.answers import AnswerWriter, Choice, Delta
from kvloop_sim.driver import LoadFailed
from kvloop_sim.options import Options
from kvloop_sim.protocol import ApiError, chat_ids, check_model, invalid
from kvloop_sim.transfer import EngineFatal


class Generating(Protocol):
    """The server's part in it; see ``server.Server``."""

    async def prepare(self, http: web.Request, body: dict[str, Any], *, prefix: str, chat: bool = True) -> AnswerWriter:
        """What writes the answer to a request."""
        ...

    async def collect(self, writer: AnswerWriter) -> list[Choice]:
        """The whole answer."""
        ...

    def deltas(self, writer: AnswerWriter, index: int) -> AsyncGenerator[Delta]:
        """What each step adds to it."""
        ...


class Stream(Protocol):
    """The events of an answer, in either API."""

    def begin(self) -> Any: ...
    def feed(self, delta: Delta) -> Any: ...
    def end(self) -> Any: ...


class OtherApis:
    """Handlers."""

    def __init__(self, options: Options, server: Generating) -> None:
        self._options = options
        self._server = server

    def attach(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_post("/v1/responses", self._responses)
        router.add_get("/v1/responses/{id}", self._no_response)
        router.add_post("/v1/responses/{id}/cancel", self._no_response)
        router.add_post("/v1/messages", self._messages)
        router.add_post("/v1/messages/count_tokens", self._count_tokens)

    async def _responses(self, http: web.Request) -> web.StreamResponse:
        body = await json_body(http)
        check_model(body, self._options)
        writer = await self._server.prepare(http, responses_api.as_chat(body), prefix="resp")
        if writer.request.stream:
            return await self._stream(http, writer, responses_api.ResponseStream(body, writer))
        (choice,) = await self._server.collect(writer)
        return web.json_response(responses_api.whole(body, writer, choice))

    async def _no_response(self, http: web.Request) -> web.StreamResponse:
        told = f"Response with id '{http.match_info['id']}' not found."
        raise ApiError(404, told, kind="invalid_request_error", parameter="response_id")

    async def _messages(self, http: web.Request) -> web.StreamResponse:
        try:
            writer = await self._server.prepare(http, messages_api.as_chat(await json_body(http)), prefix="chatcmpl")
            if writer.request.stream:
                return await self._stream(http, writer, messages_api.MessageStream(writer))
            (choice,) = await self._server.collect(writer)
        except ApiError as error:
            return web.json_response(messages_api.error_body(error), status=error.status)
        return web.json_response(messages_api.whole(writer, choice))

    async def _count_tokens(self, http: web.Request) -> web.StreamResponse:
        body = await json_body(http)
        try:
            check_model(body, self._options)
            count = len(chat_ids(messages_api.as_chat(body, counting=True), self._options))
        except ApiError as error:
            return web.json_response(messages_api.error_body(error), status=error.status)
        return web.json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def _stream(self, http: web.Request, writer: AnswerWriter, stream: Stream) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        try:
            await _send(response, stream.begin())
            async with aclosing(self._server.deltas(writer, 0)) as deltas:
                async for delta in deltas:
                    await _send(response, stream.feed(delta))
            await _send(response, stream.end())
        except (LoadFailed, EngineFatal) as error:
            told = {"type": "error", "error": {"type": "internal_error", "message": str(error)}}
            await _send(response, [("error", told)])
        except ConnectionError:
            return response
        await response.write_eof()
        return response


async def json_body(request: web.Request) -> dict[str, Any]:
    """The JSON object in a request's body. Raises ApiError."""
    if request.content_type != "application/json":
        raise ApiError(415, "Unsupported Media Type: Only 'application/json' is allowed", kind="Unsupported Media Type")
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        raise invalid(f"JSON decode error: {error}", "body") from error
    if not isinstance(body, dict):
        raise invalid("Input should be a valid dictionary", "body")
    return body


async def _send(response: web.StreamResponse, events: Any) -> None:
    for name, data in events:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        await response.write(f"event: {name}\ndata: {text}\n\n".encode("utf-8", "replace"))
