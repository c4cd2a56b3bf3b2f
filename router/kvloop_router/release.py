"""Releasing handles that will not be used, so that their decode engine frees its memory at once.

There is no call for it: the handle goes on any prefill leg of the same KV revision with ``remote_num_tokens: 0``; that
engine pulls nothing and tells the issuer. It rides on the next cold prefill leg, or else on a one-token request of its
own. Only handles that nobody took, or of which it is proven that nobody reads them, come here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvloop_connector.handle import KVHandle
from kvloop_router.store import Kept

_ATTEMPTS = 2
_WAIT_SECONDS = 1.0
"""How long a handle waits for a leg to ride on."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A handle to be released.

    handle: as its issuer gave it. decode, process: the issuer.
    deadline: on the router's clock; past it there is nothing left to release.
    """

    handle: KVHandle
    process: str
    decode: str
    kv_revision: str
    deadline: float
    due: float
    attempts: int = 0

    @property
    def rider(self) -> KVHandle:
        """What a prefill leg carries for it."""
        return self.handle.released()


class Releases:
    """The handles that wait for their release, oldest first."""

    def __init__(self, clock: Callable[[], float], done: Callable[[str], None] = lambda outcome: None) -> None:
        self._clock = clock
        self._done = done
        self._pending: list[Pending] = []
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, kept: Kept) -> None:
        """Have a kept handle released."""
        self._push(kept.handle, kept.process, kept.decode, kept.kv_revision, kept.deadline)

    def add_handle(self, handle: KVHandle, *, process: str, decode: str, kv_revision: str, deadline: float) -> None:
        """Have a handle released that was never kept."""
        self._push(handle, process, decode, kv_revision, deadline)

    def rider(self, kv_revision: str, reachable: Callable[[Pending], bool]) -> Pending | None:
        """A handle for a cold prefill leg of that revision to carry; it is the caller's from now on.

        reachable: whether that prefill engine can reach the handle's issuer; a leg must not fail for what it carries.
        """
        self._forget_expired()
        for item in self._pending:
            if item.attempts == 0 and item.kv_revision == kv_revision and reachable(item):
                self._pending.remove(item)
                return item
        return None

    def sent(self, item: Pending) -> None:
        """The leg that carried it has succeeded: it is released."""
        self._done("released")

    def failed(self, item: Pending) -> None:
        """The leg that carried it has failed: try once more, by itself."""
        if item.attempts + 1 >= _ATTEMPTS:
            self._done("lost")
            return
        again = Pending(
            item.handle, item.process, item.decode, item.kv_revision, item.deadline, self._clock(), item.attempts + 1
        )
        self._pending.append(again)
        self._added.set()

    def orphan(self, process: str) -> None:
        """The process is gone, and with it what it retained."""
        self._pending = [item for item in self._pending if item.process != process]

    def next_due(self) -> Pending | None:
        """A handle that has waited long enough; it is the caller's from now on."""
        self._forget_expired()
        now = self._clock()
        for item in self._pending:
            if item.due <= now:
                self._pending.remove(item)
                return item
        return None

    def take_all(self) -> tuple[Pending, ...]:
        """All that wait; they are the caller's from now on."""
        self._forget_expired()
        waiting, self._pending = tuple(self._pending), []
        return waiting

    async def wait(self) -> None:
        """Wait until a handle may be due."""
        if not self._pending:
            self._added.clear()
            await self._added.wait()
        wait = min((item.due for item in self._pending), default=0.0) - self._clock()
        if wait > 0:
            await asyncio.sleep(wait)

    def _push(self, handle: KVHandle, process: str, decode: str, kv_revision: str, deadline: float) -> None:
        now = self._clock()
        if deadline <= now:
            return
        self._pending.append(Pending(handle, process, decode, kv_revision, deadline, now + _WAIT_SECONDS))
        self._added.set()

    def _forget_expired(self) -> None:
        now = self._clock()
        self._pending = [item for item in self._pending if item.deadline > now]
