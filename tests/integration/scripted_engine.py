"""An engine that does what a test says, over real HTTP: what it was asked is recorded, what it answers is scripted.

Its tokens are the bytes of what its template renders, and its template is append-only, so that turn follows turn as
with a real model. Without a script it is a good engine: prefill returns parameters for decode, decode returns a handle.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvloop_connector.lease_requests import RELEASE_PATH, RENEW_PATH
from kvloop_connector.settings import Role

BLOCK_SIZE = 4
ANSWER = "fine"
END = "\n"
_GENERATES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")

Step = Callable[["ScriptedEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that reached the engine."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def params(self) -> Any:
        return self.body.get("kv_transfer_params")


@dataclass(slots=True)
class ScriptedEngine:
    """One engine. ``script``: what the next generation requests get, in order; after that, good answers.

    cached_tokens: what prefill says it did not compute; None: all that it was given to pull.
    verdict: with KvloopConnector, what prefill says of a handle that it is given; "" without.
    prefix_caching: what it says of its prefix cache; None: nothing.
    counts: whether its counter of bytes moves.
    likely: the log-probabilities of the first token that it tells where it is asked, to each leg those of the next,
        the last ones for ever; where there are none it tells nothing.
    leases: the status with which it answers to releases and renewals by name; 200: it does what it is asked.
    renewed_by: by how much it then moves deadlines. not_held: the request ids of which it retains nothing.
    leases_wait: answers to them wait for it. leased: what of the kind it was asked; first, whether it knows it at all.
    left: set when a client closed its connection before the answer's end.
    """

    name: str
    role: Role
    url: str = ""
    pod_uid: str = ""
    engine_id: str = ""
    revision: str = "a"
    max_model_len: int = 4096
    healthy: bool = True
    cached_tokens: int | None = None
    verdict: str = ""
    renders_otherwise: bool = False
    prefix_caching: bool | None = None
    counts: bool = True
    likely: list[Mapping[str, float]] = field(default_factory=list)
    leases: int = 404
    renewed_by: float = 100.0
    not_held: set[str] = field(default_factory=set)
    leases_wait: asyncio.Event | None = None
    script: list[Step] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    leased: list[Asked] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def entry(self) -> dict[str, str]:
        """This engine in the engines file."""
        return {
            "name": self.name,
            "role": self.role.value,
            "url": self.url,
            "podUID": self.pod_uid,
            "kvRevision": self.revision,
            "zone": "",
        }

    @property
    def legs(self) -> list[Asked]:
        """The generation requests, in order, but for those that only release a handle."""
        return [asked for asked in self.asked if asked.path.startswith("/v1/") and not _fills(asked)]

    @property
    def fillers(self) -> list[Asked]:
        """The requests that only release a handle."""
        return [asked for asked in self.asked if _fills(asked)]

    @property
    def carried(self) -> list[Any]:
        """The ``kv_transfer_params`` of each leg."""
        return [asked.params for asked in self.legs]

    def restart(self) -> None:
        """From now on it is another process."""
        self.pod_uid = f"uid-{uuid.uuid4().hex}"
        self.engine_id = uuid.uuid4().hex


def rendered(body: Mapping[str, Any]) -> list[int]:
    """The token ids of a request's prompt."""
    if "messages" in body:
        texts = [f"<{message['role']}>{_text(message.get('content'))}{END}" for message in body["messages"]]
        return list(("".join(texts) + "<assistant>").encode())
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        (prompt,) = prompt
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


def handle(engine: ScriptedEngine, tokens: int) -> dict[str, Any]:
    """``kv_transfer_params`` as this engine returns them for ``tokens`` computed tokens."""
    decodes = engine.role is Role.DECODE
    params: dict[str, Any] = {
        "do_remote_prefill": not decodes,
        "do_remote_decode": decodes,
        "remote_block_ids": [list(range(100, 100 + -(-tokens // BLOCK_SIZE)))],
        "remote_engine_id": engine.engine_id,
        "remote_request_id": uuid.uuid4().hex,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 123.5 if decodes else None,
        "a_field_of_the_future": {"kept": True},
    }
    return params


async def good(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The answer of an engine at which nothing is wrong."""
    if body.get("stream"):
        return await stream(engine, request, body)
    return web.json_response(_answer(engine, request.path, body))


async def stream(
    engine: ScriptedEngine, request: web.Request, body: dict[str, Any], events: list[bytes] | None = None
) -> web.StreamResponse:
    """A streamed answer of ``events``."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for event in stream_events(engine, request.path, body) if events is None else events:
        await response.write(event)
    await response.write_eof()
    return response


def stream_events(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> list[bytes]:
    """The events of a good answer: role, text, end with the handle, mark."""
    answer = _answer(engine, path, body)
    chat = "messages" in body
    text, ids = answer["choices"][0]["text"] if not chat else ANSWER, list(ANSWER.encode())
    events: list[dict[str, Any]] = []
    asked = bool(body.get("return_token_ids"))
    prompt_ids = {"prompt_token_ids": rendered(body)} if asked else {}
    if chat:
        events.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], **prompt_ids})
    first = {} if chat else prompt_ids
    piece = {"delta": {"content": text}} if chat else {"text": text}
    events.append({"choices": [{"index": 0, **piece, "finish_reason": None, **_ids(asked, ids), **first}]})
    piece = {"delta": {"content": ""}} if chat else {"text": ""}
    last: dict[str, Any] = {"choices": [{"index": 0, **piece, "finish_reason": "stop", **_ids(asked, END.encode())}]}
    if answer.get("kv_transfer_params"):
        last["kv_transfer_params"] = answer["kv_transfer_params"]
    events.append(last)
    return [*(event(item) for item in events), b"data: [DONE]\n\n"]


def event(item: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(item, separators=(",", ":")).encode() + b"\n\n"


def fails(status: int, message: str = "no") -> Step:
    """An error in vLLM's shape."""

    async def step(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"error": {"message": message, "type": "Error", "param": None, "code": status}}
        return web.json_response(error, status=status)

    return step


async def resets(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection ends before an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def answers(change: Callable[[dict[str, Any]], None]) -> Step:
    """A good answer that is changed before it goes out."""

    async def step(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = _answer(engine, request.path, body)
        change(answer)
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


@asynccontextmanager
async def running(engine: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    """The engine, serving on a loopback port of its own."""
    app = _application(engine)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", int(engine.url.rsplit(":", 1)[1]) if engine.url else 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    engine.url = f"http://{host}:{port}"
    if not engine.pod_uid:
        engine.restart()
    try:
        yield engine
    finally:
        await runner.cleanup()


def _answer(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    params = body.get("kv_transfer_params")
    ids = _prompt_ids(engine, body)
    asked = bool(body.get("return_token_ids"))
    answer_ids = list((ANSWER + END).encode())
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if engine.role is Role.PREFILL else "stop"}
    if "messages" in body:
        choice["message"] = {"role": "assistant", "content": ANSWER}
    else:
        choice["text"] = ANSWER + END
    if body.get("logprobs") and engine.likely:
        choice["logprobs"] = _logprobs(engine.likely.pop(0) if engine.likely[1:] else engine.likely[0], body)
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(answer_ids)}
    answer: dict[str, Any] = {"id": "answer", "choices": [{**choice, **_ids(asked, answer_ids)}], "usage": usage}
    if asked and "messages" in body:
        answer["prompt_token_ids"] = ids
    elif asked:
        answer["choices"][0]["prompt_token_ids"] = ids
    if params and engine.role is Role.PREFILL:
        answer["kv_transfer_params"] = handle(engine, len(ids))
        pulled = params.get("remote_num_tokens") or 0
        cached = pulled if engine.cached_tokens is None else engine.cached_tokens
        answer["kv_transfer_params"]["remote_prefill_cached_tokens"] = cached
        if engine.verdict:
            read = pulled // BLOCK_SIZE * BLOCK_SIZE if engine.verdict == "read" else 0
            said = engine.verdict if params.get("remote_engine_id") else "no_handle"
            answer["kv_transfer_params"]["kvloop_reuse"] = {"outcome": said, "tokens": read}
    elif params:
        answer["kv_transfer_params"] = handle(engine, len(ids) + len(answer_ids) - 1)
    return answer


def _logprobs(likely: Mapping[str, float], body: Mapping[str, Any]) -> dict[str, Any]:
    if "messages" not in body:
        return {"top_logprobs": [dict(likely)]}
    return {"content": [{"top_logprobs": [{"token": word, "logprob": value} for word, value in likely.items()]}]}


def _prompt_ids(engine: ScriptedEngine, body: dict[str, Any]) -> list[int]:
    given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if given is not None:
        return list(given)
    return [*rendered(body), *([1] if engine.renders_otherwise else [])]


def _ids(asked: bool, ids: list[int] | bytes) -> dict[str, Any]:
    return {"token_ids": list(ids)} if asked else {}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def _renewed(engine: ScriptedEngine) -> dict[str, Any]:
    return {"outcome": "renewed", "seconds": engine.renewed_by}


def _fills(asked: Asked) -> bool:
    return asked.headers.get("X-Request-Id", "").startswith("release-")


def _application(engine: ScriptedEngine) -> web.Application:
    async def generate(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        engine.asked.append(Asked(request.path, body, request.headers))
        scripted = engine.script and not _fills(engine.asked[-1])
        return await (engine.script.pop(0) if scripted else good)(engine, request, body)

    async def transcribe(request: web.Request) -> web.StreamResponse:
        fields = await request.post()
        read = {
            name: value.file.read() if isinstance(value, web.FileField) else value for name, value in fields.items()
        }
        engine.asked.append(Asked(request.path, read, request.headers))
        return web.json_response({"text": ANSWER})

    async def tokenize(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        engine.asked.append(Asked(request.path, body, request.headers))
        tokens = rendered(body)
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": engine.max_model_len})

    async def lease(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        engine.leased.append(Asked(request.path, body, request.headers))
        if engine.leases_wait is not None:
            await engine.leases_wait.wait()
        status = 400 if engine.leases == 200 and not body else engine.leases
        if status != 200:
            return await fails(status)(engine, request, body)
        done = {"outcome": "released"} if request.path == RELEASE_PATH else _renewed(engine)
        missing = {"outcome": "not_held"}
        named = body["remote_request_ids"]
        entries = [{"remote_request_id": name, **(missing if name in engine.not_held else done)} for name in named]
        return web.json_response({"handles": entries})

    async def health(request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if engine.healthy else 503)

    async def models(request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": engine.max_model_len}]})

    async def metrics(request: web.Request) -> web.StreamResponse:
        read = sum(1 for leg in engine.asked if (leg.params or {}).get("remote_num_tokens")) if engine.counts else 0
        caching = "" if engine.prefix_caching is None else f'enable_prefix_caching="{engine.prefix_caching}",'
        return web.Response(
            text=f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",{caching}engine="0"}} 1.0\n'
            f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {1000.0 * read}\n'
            f'vllm:nixl_xfer_time_seconds_sum{{engine="0"}} {0.25 * read}\n'
        )

    async def version(request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": "0.33.0"})

    app = web.Application(client_max_size=64 * 1024 * 1024)
    for path, handler in (("/health", health), ("/version", version), ("/metrics", metrics), ("/v1/models", models)):
        app.router.add_get(path, handler)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/v1/audio/transcriptions", transcribe)
    for path in (RELEASE_PATH, RENEW_PATH):
        app.router.add_post(path, lease)
    for path in _GENERATES:
        app.router.add_post(path, generate)
    return app
