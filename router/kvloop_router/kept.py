"""A kept KV handle, how it is looked for, and what any place for handles can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple, Protocol

from kvloop_connector.digest import Retained
from kvloop_connector.handle import KVHandle, from_ranges, to_ranges
from kvloop_router.history import Trail
from kvloop_router.leases import UNKNOWN, Held, Pace

SHORTLIST = 4
"""How many handles a search gives at most; each costs a proof."""

STRANGERS = 2
"""How many of those may come from under other conversation ids."""

THREADS = 4
"""How many handles are kept under one conversation id: of threads that share it, and of what was edited or forked."""


class Absence(StrEnum):
    """Why a search gives no handle."""

    MISS = "miss"
    NO_HANDLE = "no_handle"
    TAKEN = "taken"
    EXPIRED = "expired"
    ENGINE_GONE = "engine_gone"
    EVICTED = "evicted"
    BELOW_THRESHOLD = "below_threshold"
    STORE_UNAVAILABLE = "store_unavailable"


class Why(StrEnum):
    """Why a handle was given up, for its blocks to be released."""

    SUPERSEDED = "superseded"
    """Its conversation has gone on without it."""
    ENDED = "ended"
    """Its conversation was ended."""
    BUDGET = "budget"
    """Its engine retained more than it may; it was the longest idle."""
    FULL = "full"
    """There is no place for more handles."""
    STORE_UNAVAILABLE = "store_unavailable"
    """The store that routers share could not be reached."""
    USELESS = "useless"
    """Its conversation has gone on in a way that cannot use it."""
    NO_PAIR = "no_pair"
    """There are no engines that it could go between."""
    NOT_KEPT = "not_kept"
    """It was not worth keeping."""
    NOT_SENT = "not_sent"
    """The engine that was to pull it could not be reached."""
    REFUSED = "refused"
    """A prefill engine would not read it."""
    LEG_FAILED = "leg_failed"
    """The prefill engine that was to read it has failed the leg."""
    WRONG = "wrong"
    """What its engine retained was found wrong."""
    ENGINE_ENDING = "engine_ending"
    """Its engine is being ended."""
    SHUTDOWN = "shutdown"
    """The router ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A handle, and all that it is bound to.

    tenant_scope: digest of tenant, model and salt; nothing is found across scopes.
    decode, process, kv_revision: the engine that issued it; ``process`` as in EngineSpec.
    params, blocks: the engine's object without its block ids, and these as ranges, one tuple a KV group.
    conversation: the id that the client gave, or None.
    deadline: on the router's clock, seconds.
    since, ends, pace: as in ``leases.Held``; not renewed where they are not given.
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
    since: float = 0.0
    ends: float = 0.0
    pace: Pace = UNKNOWN

    @property
    def ident(self) -> str:
        """Names this handle among all: an engine process never repeats a request id."""
        return f"{self.params['remote_engine_id']}/{self.params['remote_request_id']}"

    @property
    def retained_blocks(self) -> Iterator[int]:
        """KV blocks that the engine cannot use for anything else."""
        return (block for runs in self.blocks for block in from_ranges(runs))

    @property
    def runs(self) -> Iterator[tuple[int, int]]:
        """The same as runs."""
        return chain.from_iterable(self.blocks)

    @property
    def group_sizes(self) -> list[int]:
        """How many blocks each KV group has."""
        return [sum(abs(count) for _, count in runs) for runs in self.blocks]

    @property
    def held(self) -> Held:
        """What its renewal goes by."""
        return Held(self.since, self.deadline, self.ends, self.pace)

    def renewed(self, params: Mapping[str, Any], held: Held) -> Kept:
        """With the deadline that its engine has moved, which stands in ``params`` too."""
        return replace(self, params=params, deadline=held.deadline, ends=held.ends)

    @property
    def handle(self) -> KVHandle:
        """The handle as the engine gave it."""
        return KVHandle({**self.params, "remote_block_ids": [from_ranges(runs) for runs in self.blocks]})


def packed(handle: KVHandle) -> tuple[dict[str, Any], tuple[tuple[tuple[int, int], ...], ...]]:
    """``params`` and ``blocks`` of a Kept for ``handle``."""
    params = {name: value for name, value in handle.params.items() if name != "remote_block_ids"}
    return params, tuple([to_ranges(group) for group in handle.params["remote_block_ids"]])


class Query(NamedTuple):
    """What a search goes by: a conversation id that the client gave, and the new history."""

    tenant_scope: bytes
    conversation: str | None
    trail: Trail


def same_name(left: str | None, right: str | None) -> bool | None:
    """Whether two conversation ids are one; None where one of them is not known."""
    return None if left is None or right is None else left == right


class Match(NamedTuple):
    """A handle that may be of use. ``certain``: it is this conversation's by its id, or by all of its history."""

    kept: Kept
    certain: bool


class Found(NamedTuple):
    """What a search gave, the best first; with no match, why."""

    matches: tuple[Match, ...]
    absence: Absence


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A handle that nobody can take any more, for the caller to release."""

    kept: Kept
    why: Why


@dataclass(frozen=True, slots=True)
class Retention:
    """What an engine process retains for live handles.

    blocks: those that several handles share count once. last_deadline: on the router's clock.
    """

    handles: int
    blocks: int
    last_deadline: float


class HandleStore(Protocol):
    """A place for handles. A store that cannot be reached answers as if it were empty.

    shared: others have handles there too; if not, none of the methods ever waits.
    """

    @property
    def shared(self) -> bool: ...

    def __len__(self) -> int:
        """How many handles there are, as far as is known without waiting."""
        ...

    def retained_blocks(self, process: str) -> int:
        """How many blocks an engine process retains for live handles, as far as is known without waiting."""
        ...

    async def find(self, query: Query) -> Found:
        """Handles that could be taken now."""
        ...

    async def take(self, ident: str) -> int | None:
        """The number of the grant, where the one use of this handle is granted to the caller; else None."""
        ...

    async def put_back(self, ident: str, grant: int) -> Kept | None:
        """A handle that was taken and, provably, not read may be taken again until its old deadline.

        Given back, for the caller to release, where it was given up while it was taken.
        """
        ...

    async def spend(self, ident: str, grant: int) -> None:
        """A handle that was taken has been read."""
        ...

    async def withdraw(self, ident: str) -> bool:
        """Whether the caller may release this handle; nobody can take it from now on."""
        ...

    async def put(self, kept: Kept, *, max_blocks: int | None = None) -> tuple[GivenUp, ...]:
        """Keep a handle; gives those that it supersedes or pushes out.

        max_blocks: how many blocks its engine may retain in all; None: as many as there are.
        """
        ...

    async def due(self, before: float) -> tuple[Kept, ...]:
        """The handles that nobody has taken and whose deadline comes first, up to ``before``."""
        ...

    async def renew(self, kept: Kept) -> bool:
        """Keep ``kept`` in the place of the handle of this name, whose deadline its engine has moved.

        False where that is gone or somebody has taken it: it then has its old deadline, whatever becomes of it.
        """
        ...

    async def note_absent(self, query: Query, why: Absence) -> None:
        """Remember that this conversation's turn left no handle, so that the next one can say why it is cold."""
        ...

    async def end(self, tenant_scope: bytes, conversation: str) -> tuple[Kept, ...]:
        """Forget a conversation; gives its handles, for the caller to release. One that is taken is given by
        ``put_back``, should it come back.
        """
        ...

    async def orphan(self, process: str) -> int:
        """The engine process is gone: drop its handles; gives how many."""
        ...

    async def give_up(self, process: str) -> tuple[Kept, ...]:
        """Give up the handles of an engine process, for the caller to release; those that are taken as in ``end``."""
        ...

    async def retained(self) -> Mapping[str, Retention]:
        """What each engine process retains for live handles, taken ones too; no process that has none."""
        ...

    async def empty(self) -> tuple[Kept, ...]:
        """Give up every handle that nobody has taken, for the caller to release, where it leaves nobody to use them."""
        ...
