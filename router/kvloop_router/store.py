"""Where KV handles are kept between turns, each for one use.

The life cycle is ``kvloop_connector.lifecycle``; here are only places and indexes. Methods are coroutines so that a
store outside this process can take the memory's place; in memory none of them waits, so that each is atomic.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, Protocol

from kvloop_connector.digest import Retained
from kvloop_connector.handle import KVHandle, from_ranges, to_ranges
from kvloop_connector.lifecycle import Effect, Event, Lease, State, transition
from kvloop_router.history import Trail, same_conversation

SHORTLIST = 4
"""How many handles a search gives at most; each costs a proof."""


class Absence(StrEnum):
    """Why a search gives no handle."""

    MISS = "miss"
    NO_HANDLE = "no_handle"
    TAKEN = "taken"
    EXPIRED = "expired"
    ENGINE_GONE = "engine_gone"
    EVICTED = "evicted"
    BELOW_THRESHOLD = "below_threshold"


_AFTER: Mapping[State, Absence] = {
    State.TAKEN: Absence.TAKEN,
    State.SPENT: Absence.TAKEN,
    State.EXPIRED: Absence.EXPIRED,
    State.ORPHANED: Absence.ENGINE_GONE,
    State.RELEASED: Absence.EVICTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A handle, and all that it is bound to.

    tenant_scope: digest of tenant, model and salt; nothing is found across scopes.
    decode, process, kv_revision: the engine that issued it; ``process`` as in EngineSpec.
    params, blocks: the engine's object without its block ids, and these as ranges, one tuple a KV group.
    conversation: the id that the client gave, or None.
    deadline: on the router's clock, seconds.
    """

    tenant_scope: bytes
    decode: str
    process: str
    kv_revision: str
    params: Mapping[str, Any]
    blocks: tuple[tuple[tuple[int, int], ...], ...]
    retained: Retained
    block_size: int
    trail: Trail
    conversation: str | None
    deadline: float

    @property
    def ident(self) -> str:
        """Names this handle among all: an engine process never repeats a request id."""
        return f"{self.params['remote_engine_id']}/{self.params['remote_request_id']}"

    @property
    def retained_blocks(self) -> int:
        """KV blocks that the engine cannot use for anything else."""
        return sum(count for runs in self.blocks for _, count in runs)

    @property
    def handle(self) -> KVHandle:
        """The handle as the engine gave it."""
        return KVHandle({**self.params, "remote_block_ids": [from_ranges(runs) for runs in self.blocks]})


def packed(handle: KVHandle) -> tuple[dict[str, Any], tuple[tuple[tuple[int, int], ...], ...]]:
    """``params`` and ``blocks`` of a Kept for ``handle``."""
    params = {name: value for name, value in handle.params.items() if name != "remote_block_ids"}
    return params, tuple(to_ranges(group) for group in handle.block_ids)


@dataclass(frozen=True, slots=True)
class Query:
    """What a search goes by: a conversation id that the client gave, and the new history."""

    tenant_scope: bytes
    conversation: str | None
    trail: Trail


@dataclass(frozen=True, slots=True)
class Match:
    """A handle that may be of use. ``certain``: it is this conversation's by its id, or by all of its history."""

    kept: Kept
    certain: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What a search gave, the best first; with no match, why."""

    matches: tuple[Match, ...]
    absence: Absence


class HandleStore(Protocol):
    """A place for handles. A store that cannot be reached answers as if it were empty."""

    async def find(self, query: Query) -> Found:
        """Handles that could be taken now."""
        ...

    async def take(self, ident: str) -> int | None:
        """The number of the grant, where the one use of this handle is granted to the caller; else None."""
        ...

    async def put_back(self, ident: str, grant: int) -> None:
        """A handle that was taken and, provably, not read may be taken again until its old deadline."""
        ...

    async def spend(self, ident: str, grant: int) -> None:
        """A handle that was taken has been read."""
        ...

    async def withdraw(self, ident: str) -> bool:
        """Whether the caller may release this handle; nobody can take it from now on."""
        ...

    async def put(self, kept: Kept, *, max_blocks: int | None = None) -> tuple[Kept, ...]:
        """Keep a handle; gives those that it supersedes or pushes out, for the caller to release.

        max_blocks: how many blocks its engine may retain in all; None: as many as there are.
        """
        ...

    async def note_absent(self, query: Query, why: Absence) -> None:
        """Remember that this conversation's turn left no handle, so that the next one can say why it is cold."""
        ...

    async def end(self, tenant_scope: bytes, conversation: str) -> tuple[Kept, ...]:
        """Forget a conversation; gives its handles, for the caller to release."""
        ...

    async def orphan(self, process: str) -> int:
        """The engine process is gone: drop its handles; gives how many."""
        ...

    async def give_up(self, process: str) -> tuple[Kept, ...]:
        """Give up the handles of an engine process that nobody has taken, for the caller to release."""
        ...

    async def empty(self) -> tuple[Kept, ...]:
        """Give up every handle that nobody has taken, for the caller to release, where it leaves nobody to use them."""
        ...


@dataclass(slots=True)
class _Entry:
    kept: Kept
    lease: Lease


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
        self._blocks: dict[str, int] = {}
        self._absences: OrderedDict[bytes, Absence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

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
        taken = False
        for entry, certain in self._candidates(query):
            kept = entry.kept
            if len(matches) == SHORTLIST:
                break
            if kept.ident in matches or not _may_share(kept, query):
                continue
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

    async def put_back(self, ident: str, grant: int) -> None:
        self._apply(ident, Event.PUT_BACK, grant)

    async def spend(self, ident: str, grant: int) -> None:
        self._apply(ident, Event.READ, grant)

    async def withdraw(self, ident: str) -> bool:
        entry = self._entries.get(ident)
        self._apply(ident, Event.RELEASE)
        return entry is not None and entry.lease.state is State.RELEASED

    async def put(self, kept: Kept, *, max_blocks: int | None = None) -> tuple[Kept, ...]:
        self._expire()
        superseded = await self.end(kept.tenant_scope, kept.conversation) if kept.conversation else ()
        if max_blocks is not None:
            superseded += self._shrink(kept.process, max_blocks - kept.retained_blocks)
        if len(self._entries) >= self._max:
            superseded += self._oldest(self._entries, 1)
        self._entries[kept.ident] = _Entry(kept, Lease(kept.deadline))
        self._blocks[kept.process] = self._blocks.get(kept.process, 0) + kept.retained_blocks
        for key in _keys(kept):
            self._index.setdefault(key, {})[kept.ident] = None
            self._absences.pop(key, None)
        return superseded

    async def note_absent(self, query: Query, why: Absence) -> None:
        for key in (_named(query.tenant_scope, query.conversation), query.trail.whole):
            self._note(key, why)

    async def end(self, tenant_scope: bytes, conversation: str) -> tuple[Kept, ...]:
        idents = tuple(self._index.get(_named(tenant_scope, conversation), ()))
        return tuple(kept for ident in idents if (kept := self._withdraw_issued(ident)))

    async def orphan(self, process: str) -> int:
        idents = tuple(self._index.get(_of_process(process), ()))
        for ident in idents:
            self._apply(ident, Event.ORPHAN)
        return len(idents)

    async def give_up(self, process: str) -> tuple[Kept, ...]:
        idents = self._index.get(_of_process(process), {})
        return self._oldest(idents, len(idents))

    async def empty(self) -> tuple[Kept, ...]:
        return self._oldest(self._entries, len(self._entries))

    def _candidates(self, query: Query) -> Iterator[tuple[_Entry, bool]]:
        """Entries by conversation id, then by the longest whole history, then by a common start; newest first."""
        if query.conversation is not None:
            yield from self._under(_named(query.tenant_scope, query.conversation), certain=True)
        for messages in range(len(query.trail), 0, -1):
            yield from self._under(query.trail.prefix(messages), certain=True, whole=messages)
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

    def _withdraw_issued(self, ident: str) -> Kept | None:
        entry = self._entries[ident]
        self._apply(ident, Event.RELEASE)
        return entry.kept if entry.lease.state is State.RELEASED else None

    def _expire(self) -> None:
        now = self._clock()
        # Kept in the order of their deadlines, since all live equally long.
        while self._entries and next(iter(self._entries.values())).kept.deadline <= now:
            self._apply(next(iter(self._entries)), Event.EXPIRE)

    def _oldest(self, idents: Iterable[str], count: int) -> tuple[Kept, ...]:
        """Give up the first ``count`` handles of these that nobody has taken."""
        free = (ident for ident in idents if self._entries[ident].lease.state is State.ISSUED)
        chosen = tuple(islice(free, count))
        return tuple(kept for ident in chosen if (kept := self._withdraw_issued(ident)))

    def _shrink(self, process: str, blocks: int) -> tuple[Kept, ...]:
        """Give up an engine's oldest handles until it retains no more than ``blocks``."""
        given_up: tuple[Kept, ...] = ()
        while self._blocks.get(process, 0) > blocks:
            oldest = self._oldest(self._index.get(_of_process(process), ()), 1)
            if not oldest:
                break
            given_up += oldest
        return given_up

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.kept.ident]
        self._blocks[entry.kept.process] -= entry.kept.retained_blocks
        if not self._blocks[entry.kept.process]:
            del self._blocks[entry.kept.process]
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


def _may_share(kept: Kept, query: Query) -> bool:
    """Two ids that differ are two conversations; without ids, more than a system prompt must be equal."""
    if kept.conversation is not None and query.conversation is not None:
        return kept.conversation == query.conversation
    return same_conversation(kept.trail, query.trail)
