"""The engines: what is known of each, and the only connections to them.

An engine serves from its first good health check on, the router's own (``probing``) or that of whoever names it; what
its requests show of it is in ``health``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

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
from kvloop_router.http_client import Client, Limits, NotConnected, Trust
from kvloop_router.http_connection import AnswerBroken, Response
from kvloop_router.policy import Candidate

_LOOK_SECONDS = 5.0
# vLLM's server closes an idle connection after 5 s; whoever reuses one later may lose a request to the race.
_KEEPALIVE_SECONDS = 4.0
LACKS_LEASES = frozenset({401, 403, 404, 405, 501})
"""Statuses that tell that an engine neither releases nor renews by name, at least not for this router."""


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
    _response: Response = field(repr=False)

    async def read(self) -> bytes:
        """The next bytes; empty at the end. Raises StreamBroken where the answer ends before its end."""
        try:
            return await self._response.read()
        except AnswerBroken as error:
            raise StreamBroken(self.engine, str(error)) from error

    @property
    def over(self) -> bool:
        """Whether it has come to its end, and all of it was read."""
        return self._response.over

    def unread(self) -> bytes:
        """What has arrived and was not read."""
        return self._response.unread()

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """Hand all that arrives to ``take``, until it refuses some, which is then to be read, or until the end."""
        await self._response.pass_on(take)


class Engines:
    """All engines that discovery names, with one connection pool.

    default_model: of engines for which discovery names none. most_turns: at one decode engine; None: any number.
    """

    def __init__(
        self,
        client: Client,
        *,
        connect_seconds: float,
        rules: Rules | None = None,
        default_model: str = "",
        most_turns: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
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
            [
                engine.candidate(now, self._most_turns)
                for engine in self._engines.values()
                if model is None or engine.serves(model, self._default_model)
            ]
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
        limits = Limits(seconds, None)
        async with self._request(name, "POST", path, orjson.dumps(body), headers, limits, work) as response:
            return await _whole(name, response)

    def stream(
        self,
        name: str,
        path: str,
        data: bytes,
        headers: Mapping[str, str],
        *,
        method: str = "POST",
        stall_seconds: float | None = None,
        work: Work = NO_WORK,
    ) -> AbstractAsyncContextManager[Upstream]:
        """An answer below 400, as it comes. Leaving the context before its end ends the request at the engine.

        stall_seconds: for how long nothing may come, from the request on; None: no bound.
        Raises EngineUnreachable, EngineFailed or EngineRejected before anything of the answer is given.
        """
        return _Streaming(self._request(name, method, path, data, headers, Limits(None, stall_seconds), work))

    async def text(self, name: str, path: str) -> str:
        """The text at ``path``, such as ``/metrics``. Raises EngineError."""
        limits = Limits(_LOOK_SECONDS, None)
        async with self._request(name, "GET", path, None, {}, limits, NO_WORK) as response:
            return (await _whole(name, response)).body.decode("utf-8", "replace")

    async def look(self, engine: Engine, path: str, *, seconds: float) -> bytes:
        """What is at ``path``, for a health check. Raises EngineError."""
        with closing(await self._send(engine, "GET", path, None, {}, Limits(seconds, None))) as response:
            return (await _whole(engine.spec.name, response)).body

    async def status(self, engine: Engine, path: str, data: bytes, *, seconds: float) -> int:
        """The status of the answer to a JSON request. Raises EngineError where there is none."""
        headers = {"Content-Type": "application/json"}
        with closing(await self._send(engine, "POST", path, data, headers, Limits(seconds, None))) as response:
            try:
                await response.read_all()
            except AnswerBroken as error:
                raise EngineFailed(engine.spec.name, str(error)) from error
            return response.status

    def _request(
        self,
        name: str,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        limits: Limits,
        work: Work,
    ) -> _Request:
        engine = self._engines.get(name)
        if engine is None:
            raise EngineUnreachable(name, "no longer there")
        if work.rank is not None:
            headers = {**headers, ranks.HEADER: str(work.rank)}
        return _Request(engine, work, self._clock, lambda: self._send(engine, method, path, data, headers, limits))

    async def _send(
        self,
        engine: Engine,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        limits: Limits,
    ) -> Response:
        """An answer that has begun, and is to be closed. Raises EngineUnreachable or EngineFailed."""
        name = engine.spec.name
        try:
            return await self._client.request(
                method, engine.spec.url, path, data, headers, connect_seconds=self._connect_seconds, limits=limits
            )
        except NotConnected as error:
            raise EngineUnreachable(name, str(error)) from error
        except AnswerBroken as error:
            raise EngineFailed(name, str(error)) from error


class _Request:
    """A request at an engine for as long as the context lasts, which marks what became of it.

    A class, as is the next: contexts within contexts that are generators cost several times as much.
    """

    __slots__ = ("_clock", "_response", "_send", "_work", "engine")

    def __init__(
        self, engine: Engine, work: Work, clock: Callable[[], float], send: Callable[[], Awaitable[Response]]
    ) -> None:
        self.engine = engine
        self._work = work
        self._clock = clock
        self._send = send

    async def __aenter__(self) -> Response:
        self.engine.begins(self._work)
        try:
            self._response = await self._send()
        except BaseException as error:
            self._over(error)
            raise
        return self._response

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._response.close()
        self._over(error)

    def _over(self, error: BaseException | None) -> None:
        engine = self.engine
        engine.ends(self._work)
        match error:
            case EngineUnreachable():
                engine.health.refused()
            case EngineDraining():
                engine.health.drains(self._clock())
            case EngineFailed() | StreamBroken():
                if self._work.tells:
                    engine.health.leg_failed(self._clock())
            case None:
                if self._work.tells:
                    engine.health.leg_succeeded()


class _Streaming:
    """A request whose answer, below 400, is given as it comes."""

    __slots__ = ("_request",)

    def __init__(self, request: _Request) -> None:
        self._request = request

    async def __aenter__(self) -> Upstream:
        request, name = self._request, self._request.engine.spec.name
        response = await request.__aenter__()
        try:
            if response.status >= 400:
                await _whole(name, response)
        except BaseException as error:
            await request.__aexit__(type(error), error, None)
            raise
        content_type = response.headers.get("content-type", "application/octet-stream")
        return Upstream(name, response.status, content_type, response)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._request.__aexit__(kind, error, trace)


async def _whole(name: str, response: Response) -> Answer:
    try:
        body = await response.read_all()
    except AnswerBroken as error:
        raise EngineFailed(name, str(error)) from error
    content_type = response.headers.get("content-type", "application/json")
    if response.status >= 500:
        raise EngineFailed(name, f"status {response.status}", status=response.status)
    if response.status >= 400:
        raise EngineRejected(name, response.status, body, content_type, response.headers.get("retry-after"))
    return Answer(response.status, content_type, body)


@asynccontextmanager
async def open_client(trust: Callable[[], Trust] | None = None) -> AsyncIterator[Client]:
    """The client that ``Engines`` uses."""
    client = Client(keep_seconds=_KEEPALIVE_SECONDS, trust=trust)
    try:
        yield client
    finally:
        client.close()


def roles(engines: Engines, role: Role) -> list[Engine]:
    """The engines of ``role``."""
    return [engine for engine in engines if engine.spec.role is role]
