"""An engine that does what a test says, over real HTTP: what it was asked is recorded, what it answers is scripted.

Without a script it is a good engine: prefill returns parameters for decode, decode returns a handle. What would harm a
real engine is noted, and fails the test: see ``hazards``.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvloop_connector.lease_requests import RELEASE_PATH, RENEW_PATH
from kvloop_connector.settings import Role
from tests.integration import hazards
from tests.integration.engine_scripts import Step, answers, fails, resets, starts_then_waits, streams, waits
from tests.integration.scripted_answers import (
    ANSWER,
    BLOCK_SIZE,
    END,
    RANK,
    event,
    good,
    handle,
    prompt_ids,
    rendered,
    stream,
    stream_events,
)

__all__ = [
    "ANSWER",
    "BLOCK_SIZE",
    "END",
    "Asked",
    "ScriptedEngine",
    "Step",
    "answers",
    "event",
    "fails",
    "good",
    "handle",
    "rendered",
    "resets",
    "running",
    "starts_then_waits",
    "stream",
    "stream_events",
    "streams",
    "waits",
]

RANK_HEADER = "X-data-parallel-rank"
_GENERATES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")


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
    ranks: of data parallelism. model: what it serves.
    tries_patience: its legs never end, so that they may be cancelled.
    running: requests to generate that it is at. stop: ends it, so that connections are refused.
    tokenize_waits: answers with token ids wait for it.
    tls: what it serves with; None: without.
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
    ranks: int = 1
    model: str = "tiny"
    tries_patience: bool = False
    running: int = 0
    tokenize_waits: asyncio.Event | None = None
    stop: Callable[[], Awaitable[None]] | None = None
    script: list[Step] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    leased: list[Asked] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    tls: ssl.SSLContext | None = None

    def entry(self) -> dict[str, str]:
        """This engine in the engines file."""
        return {
            "name": self.name,
            "role": self.role.value,
            "url": self.url,
            "podUID": self.pod_uid,
            "kvRevision": self.revision,
            "zone": "",
            **({"model": self.model} if self.model != "tiny" else {}),
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


@asynccontextmanager
async def running(engine: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    """The engine, serving on a loopback port of its own."""
    app = _application(engine)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    port = int(engine.url.rsplit(":", 1)[1]) if engine.url else 0
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=engine.tls)
    await site.start()
    host, port = runner.addresses[0][:2]
    engine.url = f"{'https' if engine.tls else 'http'}://{host}:{port}"
    if not engine.pod_uid:
        engine.restart()
    engine.stop = runner.cleanup
    try:
        yield engine
    finally:
        await runner.cleanup()


def _renewed(engine: ScriptedEngine) -> dict[str, Any]:
    return {"outcome": "renewed", "seconds": engine.renewed_by}


def _fills(asked: Asked) -> bool:
    return asked.headers.get("X-Request-Id", "").startswith("release-")


def _application(engine: ScriptedEngine) -> web.Application:
    async def generate(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        engine.asked.append(Asked(request.path, body, request.headers))
        RANK.set(int(request.headers.get(RANK_HEADER, len(engine.asked) % engine.ranks)))
        witness = hazards.witness()
        witness.asked(engine, request.path, body, prompt_ids(engine, body))
        scripted = engine.script and not _fills(engine.asked[-1])
        engine.running += 1
        try:
            response = await (engine.script.pop(0) if scripted else good)(engine, request, body)
        except asyncio.CancelledError:
            witness.cancelled(engine, request.path)
            raise
        finally:
            engine.running -= 1
        if 400 <= response.status < 500:
            witness.refused(body)
        return response

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
        if engine.tokenize_waits is not None:
            engine.arrived.set()
            await engine.tokenize_waits.wait()
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
        return web.json_response({"data": [{"id": engine.model, "max_model_len": engine.max_model_len}]})

    async def metrics(request: web.Request) -> web.StreamResponse:
        read = sum(1 for leg in engine.asked if (leg.params or {}).get("remote_num_tokens")) if engine.counts else 0
        caching = "" if engine.prefix_caching is None else f'enable_prefix_caching="{engine.prefix_caching}",'
        infos = [
            f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",{caching}engine="{rank}"}} 1.0\n'
            for rank in range(engine.ranks)
        ]
        return web.Response(
            text="".join(infos) + f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {1000.0 * read}\n'
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
