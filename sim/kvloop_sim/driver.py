"""Runs the engine core in real time: waits, reads from peers, tells peers, expires what is due."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from kvloop_sim import transfer
from kvloop_sim.engine import Engine
from kvloop_sim.faults import FaultPlan
from kvloop_sim.metrics import Metrics
from kvloop_sim.records import Admission, EngineRequest, Phase, Sampling, Step
from kvloop_sim.side_channel import EngineClock, Pairs, SideChannelClient, TransferError
from kvloop_sim.transfer import EngineFatal, Location

log = logging.getLogger(__name__)


class LoadFailed(Exception):
    """The KV of a request could not be loaded; vLLM answers 500."""


class Aborted(Exception):
    """The engine ended the request: it is draining, or shutting down."""


class EngineDriver:
    """Owns the engine core and every task around it. An asynchronous context manager."""

    def __init__(
        self,
        engine: Engine,
        *,
        peers: SideChannelClient | None,
        pairs: Pairs,
        clock: EngineClock,
        faults: FaultPlan,
        metrics: Metrics,
    ) -> None:
        self.engine = engine
        self.pairs = pairs
        self.clock = clock
        self.faults = faults
        self._peers = peers
        self._metrics = metrics
        self._tasks = asyncio.TaskGroup()
        self._waiters: dict[EngineRequest, asyncio.Future[Admission]] = {}
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._stop = asyncio.Event()
        self.died = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.create_task(self._keep_time())
        if self._peers is not None:
            self._tasks.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort_all()
        await self._tasks.__aexit__(kind, error, trace)

    def abort_all(self) -> None:
        """End every request with the finish reason ``abort``."""
        self._stop.set()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(Aborted())
        self._changed.set()

    async def drain(self, timeout_seconds: float) -> None:
        """Take no new request, and return when nothing is left or the time is over."""
        self.engine.draining = True
        self._pump()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        params: Mapping[str, Any] | None,
        salt: str,
        adapter: str = "",
    ) -> AsyncGenerator[Step]:
        """The tokens of one answer, in time. Raises LoadFailed, Aborted or EngineFatal."""
        if self.engine.draining or self._stop.is_set():
            raise Aborted
        arrived = self.clock()
        request = self.engine.submit(request_id, prompt, sampling, params=params, salt=salt, adapter=adapter)
        last = 0.0
        try:
            while True:
                await self._start(request)
                await self._sleep_until(self.engine.begin_prefill(request, self.clock()))
                while (step := self._step(request)) is not None:
                    now = self.clock()
                    self._metrics.on_token(now - (last or arrived), first=not last)
                    last = now
                    if step.finish is not None:
                        self._pump()
                    yield step
                    if step.finish is not None:
                        return
                    context = len(request.tokens)
                    await self._sleep(self.engine.settings.timing.decode_seconds(len(self.engine.running), context))
        finally:
            self._waiters.pop(request, None)
            self._abort(request)
            self._metrics.on_finished(self.clock() - arrived)

    def rejected(self, params: Mapping[str, Any] | None) -> None:
        """A request was refused before it reached the engine; a prefill engine may still hold blocks for it."""
        if self._peers is None:
            return
        try:
            self._notify_later(transfer.on_rejected(params))
        except EngineFatal as error:
            self.die(str(error))

    def die(self, reason: str) -> None:
        """The engine core ends. Every request fails; the process follows."""
        if self.engine.dead is None:
            log.error("EngineCore encountered a fatal error: %s", reason)
        self.engine.die(reason)
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(EngineFatal(reason))
        self.died.set()

    def read(self, request_id: str, blocks: Sequence[int]) -> list[Any]:
        """A peer reads blocks. Raises ValueError where there are none to read."""
        if self.engine.dead is not None:
            raise ValueError("the engine is dead")
        contents = self.engine.serve_read(request_id, blocks, self.clock())
        if not self.faults.corrupts_read():
            return contents
        # As of blocks that were given to somebody else too early.
        return [array("Q", [value ^ 1 for value in block]) for block in contents]

    def notified(self, request_id: str) -> None:
        """A peer has what it needs."""
        self.engine.notified(request_id, self.clock())
        self._pump()

    def heartbeat(self, request_ids: Sequence[str]) -> None:
        """A peer still waits."""
        self.engine.heartbeat(request_ids, self.clock())

    def advance_clock(self, seconds: float) -> None:
        """Put the engine's clock forward, and do what is due then."""
        self.clock.advance(seconds)
        self._pump()

    def deadlines_moved(self) -> None:
        """Deadlines of what is retained were moved: do what is due now."""
        self._pump()

    def _pump(self) -> None:
        """Schedule, after anything that may have freed blocks."""
        try:
            admissions = [] if self.engine.dead else self.engine.schedule(self.clock())
        except EngineFatal as error:
            self.die(str(error))
            return
        for admission in admissions:
            waiter = self._waiters.pop(admission.request, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(admission)
            self._notify_later(admission.notify)
        if self.engine.draining and not self.engine.busy:
            self._idle.set()
        self._changed.set()

    async def _start(self, request: EngineRequest) -> None:
        waiter = self._waiters[request] = asyncio.get_running_loop().create_future()
        self._pump()
        admission = await waiter
        if request.phase is Phase.LOADING:
            goes_on = await asyncio.shield(self._tasks.create_task(self._load(admission)))
            if not goes_on:
                raise LoadFailed
        if request.phase is Phase.HUNG:
            await self._stop.wait()
            raise Aborted

    async def _load(self, admission: Admission) -> bool:
        request, location, timing = admission.request, admission.read_from, self.engine.settings.timing
        connector, peers = self.engine.settings.connector, self._peers
        if location is None or connector is None or peers is None:
            raise RuntimeError("a read was planned without a connector")
        tokens = len(admission.read) * self.engine.settings.block_size
        try:
            peer = await self._connect(peers, location)
            if transfer.is_declined(location, peer_clock_ahead=peer.clock_ahead, now=self.clock(), settings=connector):
                log.warning("Declining expired remote read for %s from engine %s.", request.request_id, peer.engine_id)
                self.engine.counters.kv_expired += 1
                return self._load_failed(request)
            started = self.clock()
            await asyncio.sleep(timing.transfer_seconds(tokens))
            contents = await peers.read(peer, location.request_id, admission.read, self.engine.settings.block_size)
            size = timing.transfer_bytes(tokens)
            self._metrics.on_transfer(self.clock() - started, size, len(admission.read))
            self.pairs.count_read(peer.engine_id, size)
            await self._notify(location)
        except TransferError as error:
            log.warning("KV transfer for %s failed: %s", request.request_id, error)
            self.engine.counters.failed_transfers += 1
            return self._load_failed(request)
        self.engine.loaded(request, contents)
        self._pump()
        return request.phase is not Phase.FINISHED

    def _load_failed(self, request: EngineRequest) -> bool:
        goes_on = self.engine.load_failed(request)
        self._pump()
        return goes_on

    async def _connect(self, peers: SideChannelClient, location: Location) -> Any:
        timing = self.engine.settings.timing
        try:
            return await peers.connect(location, seconds=timing.handshake * timing.scale)
        except TransferError:
            await asyncio.sleep(timing.handshake_timeout * timing.scale)
            raise

    def _notify_later(self, location: Location | None) -> None:
        if location is not None and not self._stop.is_set():
            self._tasks.create_task(self._notify(location))

    async def _notify(self, location: Location) -> None:
        if self._peers is None or self.faults.loses_notification():
            return
        try:
            peer = await self._connect(self._peers, location)
            await self._peers.notify(peer, location.request_id)
        except TransferError as error:
            log.warning("notification for %s failed: %s", location.request_id, error)
            self.engine.counters.failed_notifications += 1
            self.engine.counters.failed_transfers += 1

    def _step(self, request: EngineRequest) -> Step | None:
        try:
            return self.engine.step(request, self.clock())
        except EngineFatal as error:
            self.die(str(error))
            raise

    def _abort(self, request: EngineRequest) -> None:
        try:
            self._notify_later(self.engine.abort(request))
        except EngineFatal as error:
            self.die(str(error))
        self._pump()

    async def _sleep_until(self, deadline: float) -> None:
        await self._sleep(deadline - self.clock())

    async def _sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), seconds)
        if self._stop.is_set():
            raise Aborted

    async def _keep_time(self) -> None:
        while not self._stop.is_set():
            self._changed.clear()
            deadline = self.engine.next_deadline()
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait(), None if deadline is None else max(0.0, deadline - self.clock())
                )
            if deadline is not None and self.clock() >= deadline and not self.engine.dead:
                self._pump()
            if self.engine.dead:
                return

    async def _beat(self) -> None:
        connector = self.engine.settings.connector
        while connector is not None and self._peers is not None and not self._stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), max(0.01, connector.heartbeat_interval))
            waiting: dict[str, list[str]] = {}
            for request in (*self.engine.waiting, *self.engine.loading):
                params = {} if request.aborted else request.params or {}
                if params.get("do_remote_prefill") and "remote_request_id" in params:
                    waiting.setdefault(str(params.get("remote_engine_id")), []).append(str(params["remote_request_id"]))
            for engine_id, request_ids in waiting.items():
                peer = self._peers.known(engine_id)
                if peer is not None:
                    with suppress(TransferError):
                        await self._peers.heartbeat(peer, request_ids)
