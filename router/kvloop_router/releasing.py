"""Releases what waits for it: by telling its issuer, or by a request of its own where no leg has taken it along."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from random import Random

from kvloop_router import legs
from kvloop_router.config import Config
from kvloop_router.engines import Engines
from kvloop_router.errors import EngineError, EngineUnreachable, Unavailable
from kvloop_router.headers import upstream
from kvloop_router.lease_calls import LeaseCalls
from kvloop_router.pairs import Pairs
from kvloop_router.policy import choose_releaser
from kvloop_router.release import Pending, Releases
from kvloop_router.request import Api

_log = logging.getLogger(__name__)

_FILLER_SECONDS = 30.0
_ALL_SECONDS = 5.0
_AT_ONCE = 8


class Releaser:
    """Sends what ``Releases`` holds."""

    def __init__(
        self, *, config: Config, releases: Releases, engines: Engines, pairs: Pairs, calls: LeaseCalls, random: Random
    ) -> None:
        self._config = config
        self._releases = releases
        self._engines = engines
        self._pairs = pairs
        self._calls = calls
        self._random = random

    async def tell(self) -> None:
        """Tell issuers of their handles, as they come, until cancelled."""
        while True:
            await self._releases.wait(direct=True)
            await self._tell(self._releases.take_direct())

    async def fill(self) -> None:
        """Send a filler request for each handle that found no leg to ride on, until cancelled."""
        while True:
            await self._releases.wait(direct=False)
            item = self._releases.next_due()
            if item is not None:
                await self._fill(item)

    async def all(self) -> None:
        """Release all that waits. What does not get its turn within seconds stays retained until its time is over."""
        waiting = self._releases.take_all()
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(item: Pending) -> None:
            async with places:
                await self._fill(item)

        try:
            async with asyncio.timeout(_ALL_SECONDS):
                await self._tell([item for item in waiting if item.direct])
                async with asyncio.TaskGroup() as group:
                    for item in (*(item for item in waiting if not item.direct), *self._releases.take_all()):
                        group.create_task(one(item))
        except TimeoutError:
            _log.warning("some handles were not released", extra={"handles": len(waiting)})

    async def _tell(self, items: Iterable[Pending]) -> None:
        by_issuer: dict[str, list[Pending]] = {}
        for item in items:
            if self._calls.offered(item.decode, item.process):
                by_issuer.setdefault(item.decode, []).append(item)
            else:
                self._releases.failed(item)
        async with asyncio.TaskGroup() as group:
            for decode, of_issuer in by_issuer.items():
                group.create_task(self._tell_issuer(decode, of_issuer))

    async def _tell_issuer(self, decode: str, items: Sequence[Pending]) -> None:
        try:
            released = await self._calls.release(decode, [item.handle.request_id for item in items])
        except EngineError as error:
            _log.info("an engine did not release its handles", extra={"error": str(error), "handles": len(items)})
            for item in items:
                self._releases.failed(item)
            return
        for item in items:
            self._releases.sent(item, held=item.handle.request_id in released)

    async def _fill(self, item: Pending) -> None:
        try:
            if not self._engines.present(item.process):
                raise EngineUnreachable(item.decode, "no longer there")
            prefill = choose_releaser(
                self._engines.snapshot(),
                self._random,
                item.kv_revision,
                usable=lambda prefill: self._pairs.usable(prefill, item.decode),
            )
            await self._engines.complete(
                prefill,
                Api.COMPLETIONS,
                legs.filler(self._engines.model_of(prefill), item.handle),
                upstream({}, f"release-{item.handle.request_id}"),
                seconds=min(_FILLER_SECONDS, self._config.timeouts.prefill_seconds),
            )
        except (EngineError, Unavailable) as error:
            _log.info("a handle was not released", extra={"error": str(error)})
            self._releases.failed(item)
        else:
            self._releases.sent(item)
