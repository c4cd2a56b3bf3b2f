"""Handles in the memory of one process.

The life cycle is ``kvloop_connector.lifecycle``; here are only places and indexes. Methods are coroutines so that a
store outside this process can take the memory's place; in memory none of them waits, so that each is atomic.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from kvloop_connector.lifecycle import Effect, Event, Lease, State, transition
from kvloop_router.history import Kinship, kinship, outgrown
from kvloop_router.kept import Absence, Found, GivenUp, Kept, Match, Query, Why, same_name
from kvloop_router.leases import surplus

SHORTLIST = 4
"""How many handles a search gives at most; each costs a proof."""

THREADS = 4
"""How many handles are kept under one conversation id: of threads that share it, and of what was edited or forked."""

_OTHERS = 2
"""How many of those that a search gives may come from under other conversation ids."""


_AFTER: Mapping[State, Absence] = {
    State.TAKEN: Absence.TAKEN,
    State.SPENT: Absence.TAKEN,
    State.EXPIRED: Absence.EXPIRED,
    State.ORPHANED: Absence.ENGINE_GONE,
    State.RELEASED: Absence.EVICTED,
}


@dataclass(slots=True)
class _Entry:
    kept: Kept
    lease: Lease
    revoked: bool = False


class MemoryStore:
    """Handles in the memory of one process, at most ``max_handles``."""

    def __init__(
        self, *, max_handles: int, clock: Callable[[], float], ended: Callable[[State], None] = lambda state: None
    ) -> None:
        self._max = max_handles
        self._clock = clock
        self._ended = ended
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._index: dict[bytes, dict[str, None]] = {}
        self._uses: dict[str, dict[int, int]] = {}
        # One for each deadline that an entry has or had.
        self._deadlines: list[tuple[float, str]] = []
        self._absences: OrderedDict[bytes, Absence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def retained_blocks(self, process: str) -> int:
        """How many blocks an engine process retains for live handles; those that several share count once."""
        return len(self._uses.get(process, ()))

    def retained(self) -> dict[str, tuple[int, float]]:
        """For each engine process, how many handles are live and when the last one ends."""
        self._expire()
        by_process: dict[str, tuple[int, float]] = {}
        for entry in self._entries.values():
            count, last = by_process.get(entry.kept.process, (0, 0.0))
            by_process[entry.kept.process] = (count + 1, max(last, entry.kept.deadline))
        return by_process

    async def find(self, query: Query) -> Found:
        self._expire()
        matches: dict[str, Match] = {}
        taken, others = False, 0
        for entry, certain in self._candidates(query):
            kept = entry.kept
            if len(matches) == SHORTLIST:
                break
            named = same_name(kept.conversation, query.conversation)
            kin = kinship(kept.trail, query.trail, named=named)
            if kept.ident in matches or kin is Kinship.NONE or (named is False and others == _OTHERS):
                continue
            others += named is False
            certain = certain and kin is Kinship.SAME
            if entry.lease.state is State.ISSUED:
                matches[kept.ident] = Match(kept, certain)
            else:
                taken = taken or certain
        if matches:
            return Found(tuple(matches.values()), Absence.MISS)
        return Found((), Absence.TAKEN if taken else self._why_absent(query))

    async def take(self, ident: str) -> int | None:
        entry = self._entries.get(ident)
        granted = self._apply(ident, Event.TAKE) is Effect.GRANT
        return entry.lease.grants if entry is not None and granted else None

    async def put_back(self, ident: str, grant: int) -> Kept | None:
        entry = self._entries.get(ident)
        self._apply(ident, Event.PUT_BACK, grant)
        if entry is None or not entry.revoked or entry.lease.state is not State.ISSUED:
            return None
        return self._withdraw(ident)

    async def spend(self, ident: str, grant: int) -> None:
        self._apply(ident, Event.READ, grant)

    async def withdraw(self, ident: str) -> bool:
        entry = self._entries.get(ident)
        self._apply(ident, Event.RELEASE)
        return entry is not None and entry.lease.state is State.RELEASED

    async def put(self, kept: Kept, *, max_blocks: int | None = None) -> tuple[GivenUp, ...]:
        self._expire()
        given_up = [GivenUp(old, Why.SUPERSEDED) for old in self._supersede(kept)]
        if len(self._entries) >= self._max:
            given_up += [GivenUp(old, Why.FULL) for old in self._oldest(self._entries, 1)]
        uses = self._uses.setdefault(kept.process, {})
        for block in kept.retained_blocks:
            uses[block] = uses.get(block, 0) + 1
        if max_blocks is not None and len(uses) > max_blocks:
            idle = self._idle(self._index.get(_of_process(kept.process), ()))
            chosen = surplus(((entry.kept.ident, entry.kept.retained_blocks) for entry in idle), uses, max_blocks)
            given_up += [GivenUp(old, Why.BUDGET) for ident in chosen if (old := self._withdraw(ident))]
        self._entries[kept.ident] = _Entry(kept, Lease(kept.deadline))
        self._uses.setdefault(kept.process, uses)
        heapq.heappush(self._deadlines, (kept.deadline, kept.ident))
        for key in _keys(kept):
            self._index.setdefault(key, {})[kept.ident] = None
            self._absences.pop(key, None)
        return tuple(given_up)

    async def due(self, before: float) -> tuple[Kept, ...]:
        self._expire()
        return tuple(entry.kept for entry in self._idle(self._entries) if entry.kept.deadline <= before)

    async def renew(self, kept: Kept) -> bool:
        self._expire()
        entry = self._entries.get(kept.ident)
        if entry is None or entry.lease.state is not State.ISSUED:
            return False
        entry.kept, entry.lease = kept, replace(entry.lease, deadline=kept.deadline)
        heapq.heappush(self._deadlines, (kept.deadline, kept.ident))
        return True

    async def note_absent(self, query: Query, why: Absence) -> None:
        for key in (_named(query.tenant_scope, query.conversation), query.trail.whole):
            self._note(key, why)

    async def end(self, tenant_scope: bytes, conversation: str) -> tuple[Kept, ...]:
        idents = tuple(self._index.get(_named(tenant_scope, conversation), ()))
        return self._revoke(idents)

    async def orphan(self, process: str) -> int:
        idents = tuple(self._index.get(_of_process(process), ()))
        for ident in idents:
            self._apply(ident, Event.ORPHAN)
        return len(idents)

    async def give_up(self, process: str) -> tuple[Kept, ...]:
        return self._revoke(tuple(self._index.get(_of_process(process), ())))

    async def empty(self) -> tuple[Kept, ...]:
        return self._oldest(self._entries, len(self._entries))

    def _candidates(self, query: Query) -> Iterator[tuple[_Entry, bool]]:
        """Entries by the longest whole history, then by conversation id, then by a common start; newest first."""
        for messages in range(len(query.trail), 0, -1):
            yield from self._under(query.trail.prefix(messages), certain=True, whole=messages)
        if query.conversation is not None:
            yield from self._under(_named(query.tenant_scope, query.conversation), certain=True)
        yield from self._under(query.trail.start, certain=False)

    def _under(self, key: bytes, *, certain: bool, whole: int | None = None) -> Iterator[tuple[_Entry, bool]]:
        for ident in reversed(self._index.get(key, {})):
            entry = self._entries[ident]
            if whole is None or len(entry.kept.trail) == whole:
                yield entry, certain

    def _why_absent(self, query: Query) -> Absence:
        keys = [query.trail.prefix(messages) for messages in range(len(query.trail), query.trail.shared, -1)]
        for key in (_named(query.tenant_scope, query.conversation), *keys):
            if key in self._absences:
                return self._absences[key]
        return Absence.MISS

    def _apply(self, ident: str, event: Event, grant: int | None = None) -> Effect:
        entry = self._entries.get(ident)
        if entry is None:
            return Effect.REFUSE
        outcome = transition(entry.lease, event, self._clock(), grant=grant)
        entry.lease = outcome.lease
        if not outcome.lease.live:
            self._drop(entry)
        return outcome.effect

    def _withdraw(self, ident: str) -> Kept | None:
        """Give up a handle; None where it cannot be released, or not yet, since it is taken."""
        entry = self._entries[ident]
        self._apply(ident, Event.RELEASE)
        entry.revoked = entry.lease.state is State.TAKEN
        return entry.kept if entry.lease.state is State.RELEASED else None

    def _revoke(self, idents: Iterable[str]) -> tuple[Kept, ...]:
        return tuple(kept for ident in idents if (kept := self._withdraw(ident)))

    def _supersede(self, kept: Kept) -> tuple[Kept, ...]:
        """Give up the older handles of a conversation that a newer one holds all of."""
        older = [
            entry.kept.ident
            for messages in range(1, len(kept.trail) + 1)
            for entry, _ in self._under(kept.trail.prefix(messages), certain=True, whole=messages)
            if outgrown(entry.kept.trail, kept.trail, named=same_name(entry.kept.conversation, kept.conversation))
        ]
        threads = self._index.get(_named(kept.tenant_scope, kept.conversation), ()) if kept.conversation else ()
        others = [ident for ident in threads if ident not in older]
        return self._revoke(dict.fromkeys((*older, *others[: max(0, len(others) + 1 - THREADS)])))

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, ident = heapq.heappop(self._deadlines)
            # Refused by a handle that was renewed, which has a later place too.
            self._apply(ident, Event.EXPIRE)

    def _idle(self, idents: Iterable[str]) -> Iterator[_Entry]:
        """Those of these that nobody has taken, in their order: the longest idle first."""
        entries = (self._entries[ident] for ident in idents)
        return (entry for entry in entries if entry.lease.state is State.ISSUED)

    def _oldest(self, idents: Iterable[str], count: int) -> tuple[Kept, ...]:
        """Give up the first ``count`` handles of these that nobody has taken."""
        chosen = tuple(islice(self._idle(idents), count))
        return self._revoke(entry.kept.ident for entry in chosen)

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.kept.ident]
        uses = self._uses[entry.kept.process]
        for block in entry.kept.retained_blocks:
            others = uses[block] - 1
            if others:
                uses[block] = others
            else:
                del uses[block]
        if not uses:
            del self._uses[entry.kept.process]
        for key in _keys(entry.kept):
            idents = self._index[key]
            del idents[entry.kept.ident]
            if not idents:
                del self._index[key]
        for key in (_named(entry.kept.tenant_scope, entry.kept.conversation), entry.kept.trail.whole):
            self._note(key, _AFTER[entry.lease.state])
        self._ended(entry.lease.state)

    def _note(self, key: bytes, absence: Absence) -> None:
        if not key:
            return
        self._absences.pop(key, None)
        self._absences[key] = absence
        while len(self._absences) > 2 * self._max:
            self._absences.popitem(last=False)


def _keys(kept: Kept) -> set[bytes]:
    history = {_named(kept.tenant_scope, kept.conversation), kept.trail.whole, kept.trail.start}
    return {_of_process(kept.process), *history} - {b""}


def _of_process(process: str) -> bytes:
    return b"process/" + process.encode()


def _named(tenant_scope: bytes, conversation: str | None) -> bytes:
    return b"" if conversation is None else tenant_scope + b"/" + conversation.encode("utf-8", "surrogatepass")
