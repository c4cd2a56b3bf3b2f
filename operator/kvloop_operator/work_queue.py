"""A queue of keys: one worker at a time works on each, and asking again for one that waits changes nothing."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, Generic, TypeVar

K = TypeVar("K")

FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 120.0


@dataclass(slots=True)
class _Entry:
    """due: when it may be taken; None: it does not wait. again: when, while it is being worked on, it was asked for."""

    due: float | None = None
    working: bool = False
    again: float | None = None
    failures: int = 0


class WorkQueue(Generic[K]):
    """Keys that wait for a worker, the one that has been due longest first."""

    def __init__(self, clock: Callable[[], float], random: Random) -> None:
        self._clock = clock
        self._random = random
        self._entries: dict[K, _Entry] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that are due, and not worked on yet."""
        now = self._clock()
        return sum(entry.due is not None and entry.due <= now for entry in self._entries.values())

    def lag(self) -> float:
        """Seconds for which the longest waiting key has been due."""
        now = self._clock()
        return max((now - entry.due for entry in self._entries.values() if entry.due is not None), default=0.0)

    def add(self, key: K, *, after: float = 0.0) -> None:
        """Ask for ``key`` in ``after`` seconds; the earliest wish counts. While it is worked on, it is for later."""
        entry = self._entries.setdefault(key, _Entry())
        due = self._clock() + after
        if entry.working:
            entry.again = due if entry.again is None else min(entry.again, due)
        elif entry.due is None or due < entry.due:
            self._push(key, entry, due)

    async def take(self) -> K:
        """The next key, as soon as one is due; ``done`` or ``failed`` has to follow."""
        while True:
            key, wait = self._next()
            if key is not None:
                return key
            self._changed.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: K, *, again_after: float | None = None) -> None:
        """The work on ``key`` has succeeded."""
        entry = self._entries[key]
        entry.failures = 0
        self._finish(key, entry, again_after)

    def failed(self, key: K, *, retry_after: float | None = None) -> float:
        """The work on ``key`` has to be tried again; gives in how many seconds: doubling, with chance in it, and not
        earlier than ``retry_after``. A wish that came meanwhile does not shorten it."""
        entry = self._entries[key]
        entry.failures += 1
        entry.again = None
        wait: float = min(FIRST_RETRY_SECONDS * 2.0 ** min(entry.failures - 1, 16), LAST_RETRY_SECONDS)
        wait = max(wait * self._random.uniform(0.5, 1.0), retry_after or 0.0)
        self._finish(key, entry, wait)
        return wait

    def forget(self, key: K) -> None:
        """``key`` is gone for good; call instead of ``done``. A wish that came meanwhile is kept."""
        entry = self._entries[key]
        if entry.again is None:
            del self._entries[key]
        else:
            self.done(key)

    def _finish(self, key: K, entry: _Entry, after: float | None) -> None:
        entry.working = False
        wishes = [] if entry.again is None else [entry.again]
        if after is not None:
            wishes.append(self._clock() + after)
        entry.again = None
        if wishes:
            self._push(key, entry, min(wishes))

    def _push(self, key: K, entry: _Entry, due: float) -> None:
        entry.due = due
        self._count += 1
        heapq.heappush(self._heap, (due, self._count, key))
        self._changed.set()

    def _next(self) -> tuple[K | None, float | None]:
        """The key that is due, or how long to wait for the next one."""
        now = self._clock()
        while self._heap:
            due, _, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is None or entry.working or entry.due != due:
                heapq.heappop(self._heap)
                continue
            if due > now:
                return None, due - now
            heapq.heappop(self._heap)
            entry.due, entry.working = None, True
            return key, None
        return None, None
