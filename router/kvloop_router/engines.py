"""The engines: what is known of each, and the only connections to them.

An engine serves from its first good health check on, the router's own (``probing``) or that of whoever names it; what
its requests show of it is in ``health``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter

from kvloop_connector.settings import Role
from kvloop_router import ranks
from kvloop_router.engine import NO_WORK, Engine, Work
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.errors import (
    EngineDraining,
    EngineFailed,
    EngineRejected,
    EngineUnreachable,
    StreamBroken,
)
from kvloop_router.health import Health, Rules
from kvloop_router.policy import Candidate

_LOOK_SECONDS = 5.0
# vLLM's server closes an idle connection after 5 s; whoever reuses one later may lose a request to the race.
_KEEPALIVE_SECONDS = 4.0
LACKS_LEASES = frozenset({401, 403, 404, 405, 501})
"""Statuses that tell that an engine neither releases nor renews by name, at least not for this router."""
_READ_BYTES = 262_144
_WRITE_BYTES = 262_144


class _Limits(NamedTuple):
    """Seconds, or None: for the whole answer; without anything coming."""

    whole: float | None
    stall: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of an engine."""

    status: int
    content_type: str
    body: bytes


@dataclass(slots=True)
class Upstream:
    """An answer that is still coming."""

    engine: str
    status: int
    content_type: str
    _response: aiohttp.ClientResponse = field(repr=False)

    async def read(self) -> bytes:
        """The next bytes; empty at the end. Raises StreamBroken where the answer ends before its end."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StreamBroken(self.engine, type(error).__name__) from error

    def unread(self) -> bytes:
        """What has arrived and was not read. Raises StreamBroken where the answer has ended before its end."""
        try:
            return self._response.content.read_nowait()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StreamBroken(self.engine, type(error).__name__) from error


class Engines:
    """All engines that discovery names, with one connection pool.

    default_model: of engines for which discovery names none. most_turns: at one decode engine; None: any number.
    tls: gives arguments for each request.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        connect_seconds: float,
        rules: Rules | None = None,
        default_model: str = "",
        most_turns: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        tls: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._session = session
        self._tls = tls
        self._connect_seconds = connect_seconds
        self._rules = rules or Rules()
        self._default_model = default_model
        self._most_turns = most_turns
        self._clock = clock
        self._engines: dict[str, Engine] = {}
        self._updated = asyncio.Event()

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def get(self, name: str) -> Engine | None:
        """The engine of that name, where there is one."""
        return self._engines.get(name)

    def snapshot(self, model: str | None = None) -> tuple[Candidate, ...]:
        """The engines as the policy sees them: those that serve ``model``, or all."""
        now = self._clock()
        return tuple(
            engine.candidate(now, self._most_turns)
            for engine in self._engines.values()
            if model is None or engine.serves(model, self._default_model)
        )

    def present(self, process: str) -> bool:
        """Whether the engine process is still there and healthy, so that what it retains can be pulled or released."""
        return any(engine.spec.process == process and engine.healthy for engine in self._engines.values())

    def models(self) -> frozenset[str]:
        """Every model name that an engine says it serves, or that discovery gives one."""
        named = frozenset(engine.spec.model for engine in self._engines.values() if engine.spec.model)
        return named.union(*(engine.models for engine in self._engines.values()))

    def decodes(self, model: str) -> int:
        """How many decode engines with this model take turns."""
        return sum(
            engine.spec.role is Role.DECODE and engine.serving and engine.serves(model, self._default_model)
            for engine in self
        )

    def longest(self, model: str) -> int | None:
        """The longest prompt that every engine with this model takes."""
        able = (engine for engine in self if engine.serves(model, self._default_model))
        return min((engine.max_model_len for engine in able if engine.max_model_len), default=None)

    def model_of(self, name: str) -> str:
        """The model that a request of the router's own to this engine names."""
        engine = self._engines.get(name)
        return (engine.spec.model if engine is not None else "") or self._default_model

    def update(self, specs: tuple[EngineSpec, ...]) -> tuple[str, ...]:
        """Take over what discovery says; gives the processes that are gone."""
        before = {engine.spec.process for engine in self._engines.values()}
        kept: dict[str, Engine] = {}
        for spec in specs:
            known = self._engines.get(spec.name)
            if known is None or not known.spec.is_same(spec):
                known = Engine(replace(spec, checked=False), Health(self._rules))
            if spec.checked and not known.spec.checked:
                known.health.vouched_for()
            known.spec = spec
            kept[spec.name] = known
        self._engines = kept
        self._updated.set()
        return tuple(before - {spec.process for spec in specs})

    async def changed(self, seconds: float) -> None:
        """Wait until discovery says something new, but no longer than so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._updated.wait()
        self._updated.clear()

    def failed(self, error: Exception) -> None:
        """A leg failed by what its answer said, which only its reader sees."""
        engine = self._engines.get(error.engine) if isinstance(error, EngineDraining) else None
        if engine is not None:
            engine.health.drains(self._clock())

    async def complete(
        self,
        name: str,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        seconds: float | None = None,
        work: Work = NO_WORK,
    ) -> Answer:
        """A whole answer below 400 to a JSON request. Raises EngineUnreachable, EngineFailed or EngineRejected.

        seconds: for everything; None: no bound but that on connecting.
        """
        limits = _Limits(seconds, None)
        async with self._request(name, "POST", path, orjson.dumps(body), headers, limits, work) as response:
            return await self._whole(name, response)

    @asynccontextmanager
    async def stream(
        self,
        name: str,
        path: str,
        data: bytes,
        headers: Mapping[str, str],
        *,
        method: str = "POST",
        stall_seconds: float | None = None,
        work: Work = NO_WORK,
    ) -> AsyncIterator[Upstream]:
        """An answer below 400, as it comes. Leaving the context before its end ends the request at the engine.

        stall_seconds: for how long nothing may come, from the request on; None: no bound.
        Raises EngineUnreachable, EngineFailed or EngineRejected before anything of the answer is given.
        """
        async with self._request(name, method, path, data, headers, _Limits(None, stall_seconds), work) as response:
            if response.status >= 400:
                await self._whole(name, response)
            content_type = response.headers.get("Content-Type", "application/octet-stream")
            yield Upstream(name, response.status, content_type, response)

    async def text(self, name: str, path: str) -> str:
        """The text at ``path``, such as ``/metrics``. Raises EngineError."""
        limits = _Limits(_LOOK_SECONDS, None)
        async with self._request(name, "GET", path, None, {}, limits, NO_WORK) as response:
            return (await self._whole(name, response)).body.decode("utf-8", "replace")

    async def look(self, engine: Engine, path: str, *, seconds: float) -> bytes:
        """What is at ``path``, for a health check. Raises EngineError."""
        async with self._send(engine, "GET", path, None, {}, _Limits(seconds, None)) as response:
            return (await self._whole(engine.spec.name, response)).body

    async def status(self, engine: Engine, path: str, data: bytes, *, seconds: float) -> int:
        """The status of the answer to a JSON request. Raises EngineError where there is none."""
        headers = {"Content-Type": "application/json"}
        async with self._send(engine, "POST", path, data, headers, _Limits(seconds, None)) as response:
            try:
                await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise EngineFailed(engine.spec.name, type(error).__name__) from error
            return response.status

    @asynccontextmanager
    async def _request(
        self,
        name: str,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        limits: _Limits,
        work: Work,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        engine = self._engines.get(name)
        if engine is None:
            raise EngineUnreachable(name, "no longer there")
        if work.rank is not None:
            headers = {**headers, ranks.HEADER: str(work.rank)}
        engine.begins(work)
        try:
            async with self._send(engine, method, path, data, headers, limits) as response:
                yield response
        except EngineUnreachable:
            engine.health.refused()
            raise
        except EngineDraining:
            engine.health.drains(self._clock())
            raise
        except (EngineFailed, StreamBroken):
            if work.tells:
                engine.health.leg_failed(self._clock())
            raise
        else:
            if work.tells:
                engine.health.leg_succeeded()
        finally:
            engine.ends(work)

    @asynccontextmanager
    async def _send(
        self,
        engine: Engine,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        limits: _Limits,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        name = engine.spec.name
        try:
            response = await self._session.request(
                method,
                engine.spec.url + path,
                data=None if data is None else _Body(data),
                headers=headers,
                timeout=aiohttp.ClientTimeout(
                    total=limits.whole, sock_connect=self._connect_seconds, sock_read=limits.stall
                ),
                allow_redirects=False,
                read_bufsize=_READ_BYTES,
                **self._tls(),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineUnreachable(name, type(error).__name__) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(name, type(error).__name__) from error
        try:
            yield response
        finally:
            # An answer that was read to its end has given its connection back already; one that was not must not.
            response.close()

    async def _whole(self, name: str, response: aiohttp.ClientResponse) -> Answer:
        try:
            body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(name, type(error).__name__) from error
        content_type = response.headers.get("Content-Type", "application/json")
        if response.status >= 500:
            raise EngineFailed(name, f"status {response.status}", status=response.status)
        if response.status >= 400:
            raise EngineRejected(name, response.status, body, content_type, response.headers.get("Retry-After"))
        return Answer(response.status, content_type, body)


class _Body(aiohttp.payload.BytesPayload):
    """A request body that goes out piece by piece, so that a large one leaves others their turn."""

    def __init__(self, data: bytes) -> None:
        # BytesPayload's own constructor warns of large bodies, which is what the pieces are for.
        aiohttp.payload.Payload.__init__(self, data)
        self._size = len(data)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        size = len(self._value)
        end = size if content_length is None else min(content_length, size)
        for start in range(0, end, _WRITE_BYTES):
            await writer.write(self._value[start : min(start + _WRITE_BYTES, end)])


def open_session() -> aiohttp.ClientSession:
    """The session that ``Engines`` uses: no bound on connections, no decompression, no cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
        auto_decompress=False,
    )


def roles(engines: Engines, role: Role) -> list[Engine]:
    """The engines of ``role``."""
    return [engine for engine in engines if engine.spec.role is role]
