"""The engines: what is known of each, and the only connections to them.

An engine serves from its first good health check on, the router's own or that of whoever names it, and stops at a
refused connection or a failed check. A 4xx says nothing about an engine's health.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from kvloop_connector.lease_requests import RELEASE_PATH
from kvloop_connector.settings import Role
from kvloop_router import exposition
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.errors import EngineError, EngineFailed, EngineRejected, EngineUnreachable, StreamBroken
from kvloop_router.http_client import Client, NotConnected
from kvloop_router.http_connection import AnswerBroken, Response
from kvloop_router.policy import Candidate

_log = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
# vLLM's server closes an idle connection after 5 s; whoever reuses one later may lose a request to the race.
_KEEPALIVE_SECONDS = 4.0
_FAILED_PROBES = 2
LACKS_LEASES = frozenset({401, 403, 404, 405, 501})
"""Statuses that tell that an engine neither releases nor renews by name, at least not for this router."""


@dataclass(slots=True)
class Engine:
    """What is known of one engine process.

    load: requests of this router there now. needed: turns of this router that need it although no request of theirs is
        there: their decode leg is still to come, or reads what their prefill leg left.
    probed: whether a check of its health is on its way.
    engine_id: as in its last handle, without the rank.
    version, block_size, kv_blocks, max_model_len, models: None or empty until the engine has told.
    leases: whether it releases and renews by name what it retains; None until it was asked.
    """

    spec: EngineSpec
    healthy: bool = False
    load: int = 0
    needed: int = 0
    failed_probes: int = 0
    probed: bool = False
    engine_id: str | None = None
    version: str | None = None
    block_size: int | None = None
    kv_blocks: int | None = None
    max_model_len: int | None = None
    models: tuple[str, ...] = ()
    leases: bool | None = None

    @property
    def turns(self) -> int:
        """What of this router's would suffer if the engine ended now."""
        return self.load + self.needed

    @property
    def serving(self) -> bool:
        """Whether it gets new turns."""
        return self.healthy and self.spec.ready and not self.spec.draining

    def candidate(self) -> Candidate:
        """This engine as the policy sees it."""
        spec = self.spec
        return Candidate(
            name=spec.name,
            role=spec.role,
            process=spec.process,
            kv_revision=spec.kv_revision,
            load=self.load,
            serving=self.serving,
            healthy=self.healthy,
        )


class Needs:
    """The engines that a turn needs while no request of it is there, counted so that nobody takes them for idle."""

    def __init__(self) -> None:
        self._held: list[Engine] = []
        self._closed = False

    def hold(self, engine: Engine | None) -> None:
        """Count the turn at ``engine``, unless the turn has ended."""
        if engine is not None and not self._closed:
            engine.needed += 1
            self._held.append(engine)

    def only(self, engine: Engine | None) -> None:
        """Count it at ``engine`` and nowhere else."""
        self.let_go()
        self.hold(engine)

    def let_go(self) -> None:
        """Count it nowhere."""
        for engine in self._held:
            engine.needed -= 1
        self._held.clear()

    def close(self) -> None:
        """The turn has ended; what of it still runs holds nothing any more."""
        self.let_go()
        self._closed = True


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

    def unread(self) -> bytes:
        """What has arrived and was not read."""
        return self._response.unread()

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """Hand all that arrives to ``take``, until it refuses some, which is then to be read, or until the end."""
        await self._response.pass_on(take)


class Engines:
    """All engines that discovery names, with one connection pool. ``leasing``: whether decode engines retain anything
    that could be released or renewed by name."""

    def __init__(self, client: Client, *, connect_seconds: float, leasing: bool = False) -> None:
        self._client = client
        self._leasing = leasing
        self._connect_seconds = connect_seconds
        self._engines: dict[str, Engine] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Any:
        return iter(self._engines.values())

    def get(self, name: str) -> Engine | None:
        """The engine of that name, where there is one."""
        return self._engines.get(name)

    def snapshot(self) -> tuple[Candidate, ...]:
        """All engines as the policy sees them."""
        return tuple(engine.candidate() for engine in self._engines.values())

    def present(self, process: str) -> bool:
        """Whether the engine process is still there and healthy, so that what it retains can be pulled or released."""
        return any(engine.spec.process == process and engine.healthy for engine in self._engines.values())

    def models(self) -> frozenset[str]:
        """Every model name that an engine says it serves."""
        return frozenset(model for engine in self._engines.values() for model in engine.models)

    def update(self, specs: tuple[EngineSpec, ...]) -> tuple[str, ...]:
        """Take over what discovery says; gives the processes that are gone."""
        before = {engine.spec.process for engine in self._engines.values()}
        kept: dict[str, Engine] = {}
        for spec in specs:
            known = self._engines.get(spec.name)
            if known is None or not known.spec.is_same(spec):
                known = Engine(replace(spec, checked=False))
            if spec.checked and not known.spec.checked:
                _recovered(known)
            known.spec = spec
            kept[spec.name] = known
        self._engines = kept
        self._changed.set()
        return tuple(before - {spec.process for spec in specs})

    async def complete(
        self, name: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str], *, seconds: float | None = None
    ) -> Answer:
        """A whole answer below 400 to a JSON request. Raises EngineUnreachable, EngineFailed or EngineRejected.

        seconds: for everything; None: no bound but that on connecting.
        """
        async with self._request(name, "POST", path, orjson.dumps(body), headers, seconds=seconds) as response:
            return await self._whole(name, response)

    @asynccontextmanager
    async def stream(
        self, name: str, path: str, data: bytes, headers: Mapping[str, str], *, method: str = "POST"
    ) -> AsyncIterator[Upstream]:
        """An answer below 400, as it comes. Leaving the context before its end ends the request at the engine.

        Raises EngineUnreachable, EngineFailed or EngineRejected before anything of the answer is given.
        """
        async with self._request(name, method, path, data, headers, seconds=None) as response:
            if response.status >= 400:
                await self._whole(name, response)
            content_type = response.headers.get("content-type", "application/octet-stream")
            yield Upstream(name, response.status, content_type, response)

    async def text(self, name: str, path: str) -> str:
        """The text at ``path``, such as ``/metrics``. Raises EngineError."""
        async with self._request(name, "GET", path, None, {}, seconds=_PROBE_SECONDS) as response:
            return (await self._whole(name, response)).body.decode("utf-8", "replace")

    async def watch(self, *, interval: float) -> None:
        """Check every engine's health each ``interval`` seconds, and a new one's at once."""
        async with asyncio.TaskGroup() as probes:
            while True:
                self._changed.clear()
                # One that does not answer holds up none of the others.
                for engine in self._engines.values():
                    if not engine.probed:
                        engine.probed = True
                        probes.create_task(self._probe(engine))
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval):
                        await self._changed.wait()

    async def _probe(self, engine: Engine) -> None:
        """Check one engine's health, and learn its facts where they are not known yet."""
        try:
            await self._get(engine, "/health")
            if engine.version is None:
                await self._learn(engine)
            if self._leasing and engine.leases is None and engine.spec.role is Role.DECODE:
                with suppress(EngineError):
                    engine.leases = await self._offers_leases(engine)
        except EngineError as error:
            engine.failed_probes += 1
            if engine.healthy and engine.failed_probes >= _FAILED_PROBES:
                engine.healthy = False
                _log.warning("engine is unhealthy", extra={"engine": engine.spec.name, "error": str(error)})
        else:
            _recovered(engine)
        finally:
            engine.probed = False

    async def _learn(self, engine: Engine) -> None:
        metrics = (await self._get(engine, "/metrics")).decode("utf-8", "replace")
        engine.block_size = exposition.block_size(metrics)
        engine.kv_blocks = exposition.blocks(metrics)
        try:
            models = orjson.loads(await self._get(engine, "/v1/models"))["data"]
            engine.models = tuple(str(model["id"]) for model in models)
            lengths = [int(model["max_model_len"]) for model in models if model.get("max_model_len")]
            engine.max_model_len = max(lengths, default=None)
            engine.version = str(orjson.loads(await self._get(engine, "/version"))["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineFailed(
                engine.spec.name, f"answers that are not an engine's ({type(error).__name__})"
            ) from error

    async def _offers_leases(self, engine: Engine) -> bool | None:
        """Ask for a release of nothing, which is refused in one way by whoever knows what that is, else in another."""
        headers = {"Content-Type": "application/json"}
        async with self._send(engine, "POST", RELEASE_PATH, b"{}", headers, seconds=_PROBE_SECONDS) as response:
            await response.read_all()
            failed = response.status >= 500 and response.status not in LACKS_LEASES
            return None if failed else response.status == 400

    async def _get(self, engine: Engine, path: str) -> bytes:
        async with self._send(engine, "GET", path, None, {}, seconds=_PROBE_SECONDS) as response:
            return (await self._whole(engine.spec.name, response)).body

    @asynccontextmanager
    async def _request(
        self,
        name: str,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        *,
        seconds: float | None,
    ) -> AsyncIterator[Response]:
        engine = self._engines.get(name)
        if engine is None:
            raise EngineUnreachable(name, "no longer there")
        engine.load += 1
        try:
            async with self._send(engine, method, path, data, headers, seconds=seconds) as response:
                yield response
        except EngineUnreachable:
            engine.healthy = False
            raise
        finally:
            engine.load -= 1

    @asynccontextmanager
    async def _send(
        self,
        engine: Engine,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        *,
        seconds: float | None,
    ) -> AsyncIterator[Response]:
        name = engine.spec.name
        try:
            response = await self._client.request(
                method,
                engine.spec.url,
                path,
                data,
                headers,
                connect_seconds=self._connect_seconds,
                seconds=seconds,
            )
        except NotConnected as error:
            raise EngineUnreachable(name, str(error)) from error
        except AnswerBroken as error:
            raise EngineFailed(name, str(error)) from error
        try:
            yield response
        finally:
            response.close()

    async def _whole(self, name: str, response: Response) -> Answer:
        try:
            body = await response.read_all()
        except AnswerBroken as error:
            raise EngineFailed(name, str(error)) from error
        content_type = response.headers.get("content-type", "application/json")
        if response.status >= 500:
            raise EngineFailed(name, f"status {response.status}", status=response.status)
        if response.status >= 400:
            raise EngineRejected(name, response.status, body, content_type)
        return Answer(response.status, content_type, body)


def _recovered(engine: Engine) -> None:
    engine.failed_probes = 0
    if not engine.healthy:
        engine.healthy = True
        _log.info("engine is healthy", extra={"engine": engine.spec.name, "engine_process": engine.spec.process})


@asynccontextmanager
async def open_client() -> AsyncIterator[Client]:
    """The client that ``Engines`` uses."""
    client = Client(keep_seconds=_KEEPALIVE_SECONDS)
    try:
        yield client
    finally:
        client.close()


def roles(engines: Engines, role: Role) -> list[Engine]:
    """The engines of ``role``."""
    return [engine for engine in engines if engine.spec.role is role]
