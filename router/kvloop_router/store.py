"""Handles in the memory of one process.

The life cycle is ``kvloop_connector.lifecycle``; here are only places and indexes. A handle is kept as its record, some
kilobytes for a conversation of many thousand tokens, and read again where a search gives it. Methods are coroutines so
that a store outside this process can take the memory's place; in memory none of them waits, so that each is atomic.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from sys import intern

from kvloop_connector.lifecycle import Effect, Event, Lease, State, transition
from kvloop_router import records
from kvloop_router.absences import Absences
from kvloop_router.block_uses import BlockUses
from kvloop_router.history import Kinship, Trail, kinship, outgrown
from kvloop_router.kept import (
    SHORTLIST,
    STRANGERS,
    THREADS,
    Absence,
    Found,
    GivenUp,
    Kept,
    Match,
    Query,
    Retention,
    Why,
    same_name,
)
from kvloop_router.key_index import KeyIndex

_ENTRY_BYTES = 2048
"""What a handle takes beside its record: its places in the indexes, and what is remembered of it afterwards."""

_STEP = 512
"""Records are filled up to a multiple of so many bytes."""

_REMEMBERED = 2
"""For so many keys of each handle that there is room for, it is known why there is none any more."""

AFTER: Mapping[State, Absence] = {
    State.TAKEN: Absence.TAKEN,
    State.SPENT: Absence.TAKEN,
    State.EXPIRED: Absence.EXPIRED,
    State.ORPHANED: Absence.ENGINE_GONE,
    State.RELEASED: Absence.EVICTED,
}
"""Why a handle that ended so is not there."""


@dataclass(slots=True)
class _Entry:
    """A handle.

    keys: what it can be found by: its conversation id, its whole history and the start of that. One can be empty, which
        stands for none, or be there twice.
    """

    ident: str
    process: str
    record: bytes
    trail: Trail
    conversation: str | None
    keys: tuple[bytes, bytes, bytes]
    lease: Lease
    revoked: bool = False

    @property
    def kept(self) -> Kept:
        return records.decode(self.record)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.record) + _ENTRY_BYTES


@dataclass(slots=True)
class _Process:
    """What is known of an engine process: its handles, in the order in which they came, and their blocks."""

    idents: OrderedDict[str, None]
    uses: BlockUses


class MemoryStore:
    """Handles in the memory of one process, at most ``max_handles``, of ``max_bytes`` in all."""

    shared = False

    def __init__(
        self,
        *,
        max_handles: int,
        clock: Callable[[], float],
        max_bytes: int | None = None,
        ended: Callable[[State], None] = lambda state: None,
    ) -> None:
        self._max = max_handles
        self._max_bytes = max_bytes
        self._clock = clock
        self._ended = ended
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._index = KeyIndex()
        self._processes: dict[str, _Process] = {}
        # One for each deadline that an entry has or had.
        self._deadlines: list[tuple[float, str]] = []
        most = max_handles if max_bytes is None else min(max_handles, max_bytes // _ENTRY_BYTES)
        self._absences = Absences(_REMEMBERED * max(1, most))
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes that all handles take, about."""
        return self._bytes

    def retained_blocks(self, process: str) -> int:
        """How many blocks an engine process retains for live handles; those that several share count once."""
        known = self._processes.get(process)
        return 0 if known is None else known.uses.distinct

    async def retained(self) -> Mapping[str, Retention]:
        self._expire()
        return {process: self._retention(known) for process, known in self._processes.items()}

    def _retention(self, process: _Process) -> Retention:
        deadlines = (self._entries[ident].lease.deadline for ident in process.idents)
        return Retention(len(process.idents), process.uses.distinct, max(deadlines))

    async def find(self, query: Query) -> Found:
        self._expire()
        matches: dict[str, Match] = {}
        taken, strangers = False, 0
        for entry, certain in self._candidates(query):
            if len(matches) == SHORTLIST:
                break
            same = same_name(entry.conversation, query.conversation)
            if entry.ident in matches or (same is False and strangers == STRANGERS):
                continue
            kin = kinship(entry.trail, query.trail, named=same)
            if kin is Kinship.NONE:
                continue
            certain = certain and kin is Kinship.SAME
            if entry.lease.state is State.ISSUED:
                matches[entry.ident] = Match(entry.kept, certain)
                strangers += same is False
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
        entry = _entry(kept)
        ident, size = entry.ident, len(entry.record) + _ENTRY_BYTES
        if ident in self._entries:
            return ()
        if self._max_bytes is not None and size > self._max_bytes:
            return (GivenUp(kept, Why.FULL),)
        given_up = self._supersede(entry)
        if self._is_full(size):
            given_up += [GivenUp(old, Why.FULL) for old in self._make_room(size)]
        process = self._processes.get(entry.process)
        if process is None:
            process = _Process(OrderedDict(), BlockUses())
        process.uses.add(kept.runs)
        if max_blocks is not None and process.uses.distinct > max_blocks:
            given_up += [GivenUp(old, Why.BUDGET) for old in self._keep_to(process, max_blocks)]
        # Not there where it is new, or where the last of its handles was just given up.
        self._processes[entry.process] = process
        process.idents[ident] = None
        self._entries[ident] = entry
        self._bytes += size
        heapq.heappush(self._deadlines, (kept.deadline, ident))
        self._index.add(entry.keys, ident)
        return tuple(given_up)

    async def due(self, before: float) -> tuple[Kept, ...]:
        self._expire()
        return tuple([entry.kept for entry in self._idle(self._entries) if entry.lease.deadline <= before])

    async def renew(self, kept: Kept) -> bool:
        self._expire()
        entry = self._entries.get(kept.ident)
        if entry is None or entry.lease.state is not State.ISSUED:
            return False
        self._bytes -= entry.size
        entry.record = records.encode(kept, step=_STEP)
        entry.lease = entry.lease._replace(deadline=kept.deadline)
        self._bytes += entry.size
        heapq.heappush(self._deadlines, (kept.deadline, entry.ident))
        return True

    async def note_absent(self, query: Query, why: Absence) -> None:
        for key in (named(query.tenant_scope, query.conversation), query.trail.whole):
            self._note(key, why)

    async def end(self, tenant_scope: bytes, conversation: str) -> tuple[Kept, ...]:
        return self._revoke(self._threads(named(tenant_scope, conversation)))

    async def orphan(self, process: str) -> int:
        idents = self._of(process)
        for ident in idents:
            self._apply(ident, Event.ORPHAN)
        return len(idents)

    async def give_up(self, process: str) -> tuple[Kept, ...]:
        return self._revoke(self._of(process))

    async def empty(self) -> tuple[Kept, ...]:
        return self._revoke(tuple(self._entries))

    def _of(self, process: str) -> tuple[str, ...]:
        known = self._processes.get(process)
        return () if known is None else tuple(known.idents)

    def _candidates(self, query: Query) -> Iterator[tuple[_Entry, bool]]:
        """Entries by the longest whole history, then by conversation id, then by a common start; newest first."""
        for index, prefix in enumerate(reversed(query.trail.prefixes)):
            if prefix in self._index:
                yield from self._under(prefix, certain=True, whole=len(query.trail) - index)
        if query.conversation is not None:
            yield from self._under(named(query.tenant_scope, query.conversation), certain=True)
        yield from self._under(query.trail.start, certain=False)

    def _under(self, key: bytes, *, certain: bool, whole: int | None = None) -> Iterator[tuple[_Entry, bool]]:
        for ident in self._index.under(key):
            entry = self._entries[ident]
            if whole is None or len(entry.trail) == whole:
                yield entry, certain

    def _why_absent(self, query: Query) -> Absence:
        keys = [query.trail.prefix(messages) for messages in range(len(query.trail), query.trail.shared, -1)]
        for key in (named(query.tenant_scope, query.conversation), *keys):
            # One that is there by now, but of no use here, is not absent for the reason that another was.
            if key not in self._index and (why := self._absences.get(key)) is not None:
                return why
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

    def _is_full(self, size: int) -> bool:
        most = self._max_bytes
        return len(self._entries) >= self._max or (most is not None and self._bytes + size > most)

    def _make_room(self, size: int) -> Iterator[Kept]:
        """Give up the longest idle until there is room for one more of ``size`` bytes, or none is left."""
        while self._is_full(size):
            oldest = next(self._idle(self._entries), None)
            if oldest is None:
                return
            yield from self._revoke((oldest.ident,))

    def _keep_to(self, process: _Process, most: int) -> Iterator[Kept]:
        """Give up the longest idle of an engine until it retains no more than ``most`` blocks, or none is left."""
        while process.uses.distinct > most:
            oldest = next(self._idle(process.idents), None)
            if oldest is None:
                return
            yield from self._revoke((oldest.ident,))

    def _revoke(self, idents: Iterable[str]) -> tuple[Kept, ...]:
        return tuple([kept for ident in idents if (kept := self._withdraw(ident))])

    def _supersede(self, new: _Entry) -> list[GivenUp]:
        """Give up the handles that a newer one of their conversation holds all of, and of too many threads that share
        its id the oldest."""
        index, trail = self._index, new.trail
        called, whole, start = new.keys
        # What a chat goes on from has its start, or at least its id; a completion's start is all of it.
        if start not in index and called not in index and start != whole:
            return []
        older = []
        for messages, prefix in enumerate(trail.prefixes, start=1):
            if prefix in index:
                older += [
                    entry.ident
                    for entry, _ in self._under(prefix, certain=True, whole=messages)
                    if outgrown(entry.trail, trail, named=same_name(entry.conversation, new.conversation))
                ]
        if new.conversation is not None:
            others = [ident for ident in self._threads(called) if ident not in older]
            older += others[: max(0, len(others) + 1 - THREADS)]
        return [GivenUp(old, Why.SUPERSEDED) for old in self._revoke(older)]

    def _threads(self, key: bytes) -> tuple[str, ...]:
        """The handles under a conversation id, the oldest first."""
        return tuple(self._index.under(key))[::-1]

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

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.ident]
        self._bytes -= entry.size
        process = self._processes[entry.process]
        process.uses.remove(records.runs(entry.record))
        del process.idents[entry.ident]
        if not process.idents:
            del self._processes[entry.process]
        self._index.remove(entry.keys, entry.ident)
        for key in entry.keys[:2]:
            self._note(key, AFTER[entry.lease.state])
        self._ended(entry.lease.state)

    def _note(self, key: bytes, absence: Absence) -> None:
        if key:
            self._absences.note(key, absence)


def named(tenant_scope: bytes, conversation: str | None) -> bytes:
    """The key of a conversation id; empty where there is none."""
    return b"" if conversation is None else tenant_scope + b"/" + conversation.encode("utf-8", "surrogatepass")


def _entry(kept: Kept) -> _Entry:
    conversation, trail = kept.conversation, kept.trail
    return _Entry(
        kept.ident,
        intern(kept.process),
        records.encode(kept, step=_STEP),
        trail,
        conversation,
        (b"" if conversation is None else named(kept.tenant_scope, conversation), trail.whole, trail.start),
        Lease(kept.deadline),
    )
