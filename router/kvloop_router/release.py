"""Handles that will not be used, waiting for their release, so that their decode engine frees its memory at once.

Where the engine has kvloop's plug-in it is told by name. Elsewhere the handle goes on any prefill leg of the same KV
revision with ``remote_num_tokens: 0``; that engine pulls nothing and tells the issuer. It rides on the next cold
prefill leg, or else on a one-token request of its own. Only handles that nobody took, or of which it is proven that
nobody reads them, come here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, isfinite

from kvloop_connector.handle import KVHandle
from kvloop_router.kept import Kept, Why

_ATTEMPTS = 2
_WAIT_SECONDS = 1.0
"""How long a handle waits for a leg to ride on."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A handle to be released.

    handle: as its issuer gave it. decode, process: the issuer.
    deadline: on the router's clock; past it there is nothing left to release.
    direct: whether the issuer itself is told.
    """

    handle: KVHandle
    process: str
    decode: str
    kv_revision: str
    deadline: float
    due: float
    attempts: int = 0
    direct: bool = False

    @property
    def rider(self) -> KVHandle:
        """What a prefill leg carries for it."""
        return self.handle.released()


class Releases:
    """The handles that wait for their release, oldest first."""

    def __init__(
        self,
        clock: Callable[[], float],
        done: Callable[[str], None] = lambda outcome: None,
        *,
        given_up: Callable[[Why], None] = lambda why: None,
        direct: Callable[[str, str], bool] = lambda decode, process: False,
    ) -> None:
        """``done``: told of each outcome. ``direct``: whether this engine, of this process, can be told itself."""
        self._clock = clock
        self._done = done
        self._given_up = given_up
        self._direct = direct
        self._pending: list[Pending] = []
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, kept: Kept, why: Why) -> None:
        """Have a kept handle released."""
        self.add_handle(
            kept.handle,
            why,
            process=kept.process,
            decode=kept.decode,
            kv_revision=kept.kv_revision,
            deadline=kept.deadline,
        )

    def add_refused(self, kept: Kept) -> None:
        """Have a handle released that a prefill engine would not touch: it would not on a second leg either, so that
        only the issuer can be told.
        """
        if self._direct(kept.decode, kept.process):
            self.add(kept, Why.REFUSED)

    def add_failed(self, kept: Kept) -> bool:
        """Have a handle released whose leg has failed and has ended, so that nobody reads it any more, though somebody
        may have: of this only the issuer can be told. Whether it can."""
        told = self._direct(kept.decode, kept.process)
        if told:
            self.add(kept, Why.LEG_FAILED)
        return told

    def add_handle(
        self, handle: KVHandle, why: Why, *, process: str, decode: str, kv_revision: str, deadline: float
    ) -> None:
        """Have a handle released that was never kept."""
        now = self._clock()
        if deadline <= now:
            return
        self._given_up(why)
        direct = self._direct(decode, process)
        due = now if direct else now + _WAIT_SECONDS
        self._push(Pending(handle, process, decode, kv_revision, deadline, due, direct=direct))

    def rider(self, kv_revision: str, reachable: Callable[[Pending], bool]) -> Pending | None:
        """A handle for a cold prefill leg of that revision to carry; it is the caller's from now on.

        reachable: whether that prefill engine can reach the handle's issuer; a leg must not fail for what it carries.
        """
        self._forget_expired()
        for item in self._pending:
            rides = not item.direct and item.attempts == 0 and item.kv_revision == kv_revision
            if rides and reachable(item):
                self._pending.remove(item)
                return item
        return None

    def sent(self, item: Pending, *, held: bool = True) -> None:
        """The leg that carried it has succeeded, or its issuer has answered: it is released, or was not ``held``."""
        self._done("released" if held else "not_held")

    def failed(self, item: Pending) -> None:
        """The leg that carried it has failed: try once more, by itself. An issuer that did not take it: try a leg."""
        now = self._clock()
        if item.direct:
            self._push(replace(item, direct=False, due=now + _WAIT_SECONDS))
        elif item.attempts + 1 < _ATTEMPTS:
            self._push(replace(item, due=now, attempts=item.attempts + 1))
        else:
            self._done("lost")

    def orphan(self, process: str) -> None:
        """The process is gone, and with it what it retained."""
        self._pending = [item for item in self._pending if item.process != process]

    def take_direct(self) -> tuple[Pending, ...]:
        """All of which the issuers are to be told; they are the caller's from now on."""
        self._forget_expired()
        direct = tuple([item for item in self._pending if item.direct])
        self._pending = [item for item in self._pending if not item.direct]
        return direct

    def next_due(self) -> Pending | None:
        """A handle that has waited long enough for a leg; it is the caller's from now on."""
        self._forget_expired()
        now = self._clock()
        for item in self._pending:
            if not item.direct and item.due <= now:
                self._pending.remove(item)
                return item
        return None

    def take_all(self) -> tuple[Pending, ...]:
        """All that wait; they are the caller's from now on."""
        self._forget_expired()
        waiting, self._pending = tuple(self._pending), []
        return waiting

    async def wait(self, *, direct: bool) -> None:
        """Wait until a handle may be due: of those whose issuers are told, or of the others."""
        while (wait := self._until_due(direct)) > 0:
            self._added.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._added.wait(), wait if isfinite(wait) else None)

    def _until_due(self, direct: bool) -> float:
        due = (item.due for item in self._pending if item.direct is direct)
        return min(due, default=inf) - self._clock()

    def _push(self, item: Pending) -> None:
        self._pending.append(item)
        self._added.set()

    def _forget_expired(self) -> None:
        now = self._clock()
        self._pending = [item for item in self._pending if item.deadline > now]
