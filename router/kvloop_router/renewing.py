"""Renews what is retained for conversations that are likely to go on; ``leases`` says which."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from kvloop_connector.errors import InvalidHandle
from kvloop_connector.handle import KVHandle
from kvloop_router import leases
from kvloop_router.engines import Engines
from kvloop_router.errors import EngineError
from kvloop_router.kept import HandleStore, Kept
from kvloop_router.lease_calls import LeaseCalls
from kvloop_router.leases import Held, Terms

_log = logging.getLogger(__name__)

_STEP_SECONDS = 10.0
"""Handles that are renewed for nearly as long are renewed by one request."""


class Renewer:
    """Looks at all kept handles again and again. ``count``: told of each outcome and how many handles had it."""

    def __init__(
        self,
        *,
        terms: Terms,
        store: HandleStore,
        engines: Engines,
        calls: LeaseCalls,
        count: Callable[[str, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._terms = terms
        self._store = store
        self._engines = engines
        self._calls = calls
        self._count = count
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.renew_due()
            # Often enough that one that fails is tried again before it is too late.
            await asyncio.sleep(self._terms.lead / 8)

    async def renew_due(self) -> None:
        """Renew what is due, at all engines side by side."""
        now = self._clock()
        due: dict[tuple[str, float], list[Kept]] = {}
        for kept in await self._store.due(now + self._terms.lead):
            seconds = leases.renewal(kept.held, now, self._terms)
            if seconds is not None and self._renews(kept):
                due.setdefault((kept.decode, ceil(seconds / _STEP_SECONDS) * _STEP_SECONDS), []).append(kept)
        async with asyncio.TaskGroup() as group:
            for (decode, seconds), handles in due.items():
                group.create_task(self._renew(decode, handles, seconds))

    def _renews(self, kept: Kept) -> bool:
        """Whether its engine can, and will still be there: what drains waits for the handles that are left."""
        engine = self._engines.get(kept.decode)
        lasting = engine is not None and not engine.spec.draining and not engine.spec.ending
        return lasting and self._calls.offered(kept.decode, kept.process)

    async def _renew(self, decode: str, handles: Sequence[Kept], seconds: float) -> None:
        names = [str(kept.params["remote_request_id"]) for kept in handles]
        try:
            entries = await self._calls.renew(decode, names, seconds)
        except EngineError as error:
            _log.info("an engine did not renew its handles", extra={"error": str(error), "handles": len(handles)})
            self._count("failed", len(handles))
            return
        for kept, name in zip(handles, names, strict=True):
            self._count(await self._settle(kept, entries.get(name)), 1)

    async def _settle(self, kept: Kept, entry: Mapping[str, Any] | None) -> str:
        """What became of one handle; in the store its deadline moves only where nobody has taken it meanwhile."""
        if entry is None:
            # Nothing could be read any more; nothing is left to be released.
            await self._store.withdraw(kept.ident)
            return "not_held"
        try:
            moved, held = _moved(kept, entry), leases.renewed(kept.held, float(entry.get("seconds", 0.0)))
        except (InvalidHandle, TypeError, ValueError):
            # Its deadline cannot move: not to be asked again.
            await self._store.renew(
                kept.renewed(kept.params, Held(kept.since, kept.deadline, kept.deadline, kept.pace))
            )
            return "unusable"
        return "renewed" if await self._store.renew(kept.renewed(moved, held)) else "taken"


def _moved(kept: Kept, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The handle's fields, but for its blocks, with the deadline that the engine gave it. Raises InvalidHandle."""
    return KVHandle(kept.params).renewed(entry).params
