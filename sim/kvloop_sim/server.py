"""The HTTP server: vLLM's endpoints, and ``/sim/…`` for tests."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, replace
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from kvloop_sim import tokenizer
from kvloop_sim.answers import AnswerWriter, Choice, Delta, Detokenizer
from kvloop_sim.driver import Aborted, EngineDriver, LoadFailed
from kvloop_sim.faults import StreamFault
from kvloop_sim.leases import LeaseEndpoint
from kvloop_sim.metrics import Metrics
from kvloop_sim.options import Options, version_of
from kvloop_sim.other_apis import OtherApis, json_body
from kvloop_sim.protocol import (
    ApiError,
    Fields,
    chat_ids,
    check_model,
    internal_error,
    invalid,
    parse_generation,
)
from kvloop_sim.records import Sampling
from kvloop_sim.transfer import EngineFatal

_MAX_BODY: Final = 256 * 2**20
DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_GUARDED: Final = ("/v1", "/v2", "/inference")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The handlers of one engine's HTTP API."""

    def __init__(self, options: Options, driver: EngineDriver, metrics: Metrics) -> None:
        self._options = options
        self._driver = driver
        self._metrics = metrics
        self._started = int(time.time())

    def application(self) -> web.Application:
        """The routes."""
        application = web.Application(client_max_size=_MAX_BODY, middlewares=[self._errors])
        router = application.router
        router.add_get("/health", self._health)
        router.add_get("/ping", self._health)
        router.add_post("/ping", self._health)
        router.add_get("/metrics", self._scrape)
        router.add_get("/version", self._version)
        router.add_get("/load", self._load)
        router.add_get("/v1/models", self._models)
        router.add_post("/tokenize", self._tokenize)
        router.add_post("/detokenize", self._detokenize)
        router.add_post("/v1/chat/completions", self._chat)
        router.add_post("/v1/completions", self._completion)
        OtherApis(self._options, self).attach(router)
        if self._options.leases is not None:
            LeaseEndpoint(self._options.leases, self._driver).attach(router)
        router.add_get("/sim/state", self._state)
        router.add_get("/sim/pairs", self._pairs)
        router.add_post("/sim/faults", self._faults)
        router.add_post("/sim/clock", self._clock)
        router.add_post("/sim/crash", self._crash)
        application.on_response_prepare.append(_mark)
        return application

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._authenticate(request)
            return await handler(request)
        except ApiError as error:
            return web.json_response(error.as_json(), status=error.status)
        except EngineFatal:
            return web.json_response(internal_error(DEAD).as_json(), status=500)
        except web.HTTPException as error:
            phrase = HTTPStatus(error.status).phrase
            return web.json_response(ApiError(error.status, phrase, kind=phrase).as_json(), status=error.status)

    def _authenticate(self, request: web.Request) -> None:
        if not self._options.api_key or not request.path.startswith(_GUARDED):
            return
        given = request.headers.get("Authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {self._options.api_key}".encode()):
            raise web.HTTPUnauthorized

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self._driver.engine.dead else 200)

    async def _scrape(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self._options.version, "simulated": True})

    async def _load(self, _request: web.Request) -> web.Response:
        engine = self._driver.engine
        return web.json_response({"server_load": len(engine.running) + len(engine.waiting) + len(engine.loading)})

    async def _models(self, _request: web.Request) -> web.Response:
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": self._started,
                "owned_by": "vllm",
                "root": self._options.model,
                "parent": self._options.served_names[0] if name in self._options.adapters else None,
                "max_model_len": self._options.max_model_len,
                "permission": [],
            }
            for name in (*self._options.served_names, *self._options.adapters)
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        check_model(body, self._options)
        if "messages" in body:
            ids = chat_ids(body, self._options)
        elif isinstance(body.get("prompt"), str):
            ids = tokenizer.encode(body["prompt"])
        else:
            raise invalid("Field required", "body.prompt")
        ids = tokenizer.plain(ids)
        strings = [tokenizer.token_text(token) for token in ids] if Fields(body).flag("return_token_strs") else None
        return web.json_response(
            {"count": len(ids), "max_model_len": self._options.max_model_len, "tokens": ids, "token_strs": strings}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        check_model(body, self._options)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise invalid("Field required", "body.tokens")
        try:
            return web.json_response({"prompt": tokenizer.decode(tokens)})
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _generate(self, http: web.Request, *, chat: bool) -> web.StreamResponse:
        writer = await self.prepare(http, await json_body(http), prefix="chatcmpl" if chat else "cmpl", chat=chat)
        if writer.request.stream:
            return await self._stream(http, writer)
        choices = await self.collect(writer)
        return web.json_response(writer.whole(choices))

    async def prepare(self, http: web.Request, body: dict[str, Any], *, prefix: str, chat: bool = True) -> AnswerWriter:
        """What writes the answer to a request, once it is admitted. Raises ApiError and EngineFatal."""
        if self._driver.engine.dead:
            raise EngineFatal(self._driver.engine.dead)
        faults = self._driver.faults
        await asyncio.sleep(faults.faults.slow_headers_seconds)
        if faults.fails():
            raise internal_error()
        try:
            request = parse_generation(body, self._options, chat=chat)
        except ApiError as error:
            params = body.get("kv_transfer_params")
            if isinstance(params, dict) and not error.before_the_engine:
                self._driver.rejected(params)
            raise
        base = http.headers.get("X-Request-Id") or body.get("request_id") or secrets.token_hex(16)
        release = version_of(self._options.version) or (0, 0)
        return AnswerWriter(
            request=request,
            answer_id=f"{prefix}-{base}",
            created=int(time.time()),
            handles_in_streams=self._options.stream_handles,
            null_handles=release >= (0, 33),
        )

    async def collect(self, writer: AnswerWriter) -> list[Choice]:
        """The whole answer. Raises ApiError."""
        request = writer.request
        choices = [Choice(prompt) for prompt in request.prompts for _ in range(request.n)]

        async def fill(index: int) -> None:
            async with aclosing(self.deltas(writer, index)) as deltas:
                async for delta in deltas:
                    choices[index].add(delta)

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(choices)):
                    tasks.create_task(fill(index))
        except* LoadFailed:
            raise internal_error() from None
        except* EngineFatal:
            raise internal_error(DEAD) from None
        return choices

    async def _stream(self, http: web.Request, writer: AnswerWriter) -> web.StreamResponse:
        request, fault = writer.request, self._driver.faults.on_stream()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        events = _Events(response, http, fault)
        total = len(request.prompts) * request.n
        lock, open_choices = asyncio.Lock(), total
        generated = [0] * total

        async def relay(index: int) -> None:
            nonlocal open_choices
            prompt = request.prompts[index // request.n]
            async with aclosing(self.deltas(writer, index)) as deltas:
                started = False
                async for delta in deltas:
                    async with lock:
                        if request.chat and not started:
                            await events.send(writer.role_chunk(index, prompt))
                        started = True
                        generated[index] += len(delta.token_ids)
                        if not generated[index]:
                            # vLLM takes an abort before the first token for an empty prefill chunk, and drops it.
                            continue
                        if delta.finish:
                            open_choices -= 1
                            if open_choices and total > 1:
                                # vLLM gives one handle a request: the others wait for their time to pass.
                                delta = Delta(delta.text, delta.token_ids, delta.finish, delta.stop_reason)
                        await events.send(writer.delta_chunk(index, delta, prompt, generated[index]))

        last, gone = None, False
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(total):
                    tasks.create_task(relay(index))
            if request.include_usage:
                last = writer.usage_chunk(sum(map(len, request.prompts)), sum(generated))
        except* LoadFailed:
            last = internal_error().as_json()
        except* EngineFatal:
            last = internal_error(DEAD).as_json()
        except* ConnectionError:
            gone = True
        if gone:
            return response
        if last is not None:
            await events.send(last)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def deltas(self, writer: AnswerWriter, index: int) -> AsyncGenerator[Delta]:
        """What each step adds to one choice."""
        request = writer.request
        prompt_index, child = divmod(index, request.n)
        prompt = request.prompts[prompt_index]
        name = writer.answer_id if request.chat else f"{writer.answer_id}-{prompt_index}"
        # The engine's own id: unique, whatever id the client chose.
        request_id = f"{f'{child}_' if request.n > 1 else ''}{name}-{secrets.token_hex(4)}"
        sampling = Sampling(
            max_tokens=request.max_tokens[prompt_index],
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            skip_cache=request.skip_cache,
            child=child,
            logprobs=request.logprobs is not None,
        )
        detokenizer = Detokenizer(request)
        steps = self._driver.generate(
            request_id, prompt, sampling, params=request.params, salt=request.salt, adapter=request.adapter
        )
        try:
            async with aclosing(steps):
                async for step in steps:
                    delta = detokenizer.feed(step)
                    if request.shape is not None and delta.finish:
                        # What the form holds, and that it is whole, are told one after the other.
                        yield replace(delta, finish=None, handle=None)
                        delta = replace(delta, text="", token_ids=(), likely=())
                    yield delta
                    if delta.finish:
                        return
        except Aborted:
            yield Delta("", (), "abort")

    async def _state(self, _request: web.Request) -> web.Response:
        engine, now = self._driver.engine, self._driver.clock()
        pool, connector = engine.pool, engine.settings.connector
        retained = [
            {
                "request_id": record.request_id,
                "kind": record.kind,
                "blocks": record.blocks,
                "tokens": record.tokens,
                "state": record.lease.state if record.lease else "leaked",
                "seconds_left": record.lease.deadline - now if record.lease else None,
            }
            for record in engine.retained.values()
        ]
        return web.json_response(
            {
                "engine_id": connector.engine_id if connector else None,
                "blocks": {
                    "capacity": pool.capacity,
                    "free": pool.free,
                    "held": pool.held,
                    "cached_free": pool.cached_free,
                    "leaked": engine.leaked_blocks,
                },
                "retained": retained,
                "running": len(engine.running),
                "waiting": len(engine.waiting),
                "loading": len(engine.loading),
                "hung": len(engine.hung),
                "draining": engine.draining,
                "dead": engine.dead,
                "counters": asdict(engine.counters),
                "faults": asdict(self._driver.faults.faults),
            }
        )

    async def _pairs(self, _request: web.Request) -> web.Response:
        return web.json_response(self._driver.pairs.as_json())

    async def _faults(self, request: web.Request) -> web.Response:
        try:
            self._driver.faults.order(await json_body(request))
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return web.json_response(asdict(self._driver.faults.faults))

    async def _clock(self, request: web.Request) -> web.Response:
        seconds = (await json_body(request)).get("advance_seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0:
            raise ApiError(400, "advance_seconds: not a number of 0 or more")
        self._driver.advance_clock(seconds)
        return web.json_response({"now": self._driver.clock()})

    async def _crash(self, _request: web.Request) -> web.Response:
        # As SIGKILL: nothing is told to anybody.
        os._exit(137)


class _Events:
    """Server-sent events on one response, with the fault that was ordered for it."""

    def __init__(self, response: web.StreamResponse, http: web.Request, fault: StreamFault | None) -> None:
        self._response = response
        self._http = http
        self._fault = fault
        self._sent = 0

    async def send(self, body: dict[str, Any]) -> None:
        if self._fault is not None and self._sent >= self._fault.chunks:
            await self._fail(self._fault)
        self._sent += 1
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        await self._response.write(f"data: {text}\n\n".encode("utf-8", "replace"))

    async def _fail(self, fault: StreamFault) -> None:
        if not fault.reset:
            await asyncio.Event().wait()
        transport = self._http.transport
        if transport is not None:
            # Closing a socket that does not linger sends a reset.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            transport.abort()
        raise ConnectionResetError("a fault was ordered")


async def _mark(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Kvloop-Simulated"] = "1"
