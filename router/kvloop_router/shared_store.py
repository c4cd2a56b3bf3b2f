"""Handles that several routers share, in a Valkey or Redis server.

Everything that is decided about a handle is decided there, by one script that is atomic (``shared_*.lua``); here it
is asked. A server that does not answer in time, or with an error, makes turns cold, and nothing else: what it was asked
may have been done, so that a handle of which that is unknown is used and released by nobody until its engine frees it.

Times are on the server's clock there, and on the router's here. How far one is ahead of the other lies between two
bounds, by when a question was sent and its answer came; of these, the one counts that ends a handle sooner.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files
from typing import Any

from kvloop_connector.lifecycle import State
from kvloop_router import records
from kvloop_router.background import Background
from kvloop_router.history import GAIN
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
)
from kvloop_router.store_link import StoreLink, StoreUnavailable

_log = logging.getLogger(__name__)

SCRIPT = "\n".join(
    files("kvloop_router").joinpath(name).read_text(encoding="utf-8")
    for name in ("shared_handles.lua", "shared_store.lua")
)
LAYOUT = 2
"""Of keys and records. Routers that write another one see nothing of these."""

_BATCH = 64
"""How many handles one call works on at most: the server does nothing else meanwhile."""
_CLAIM_SECONDS = 10.0
_REFRESH_SECONDS = 5.0
_LARGEST_BLOCK = 2**24
"""Blocks with larger ids, which no engine has, are not counted: the server would make room for all before them."""
_ENDS = (State.SPENT, State.RELEASED, State.EXPIRED, State.ORPHANED)


@dataclass(slots=True)
class _Taking:
    """A take on its way. abandoned: whoever wanted it is gone."""

    grant: int | None = None
    abandoned: bool = False


class SharedStore:
    """Handles in a server that other routers use too."""

    shared = True

    def __init__(
        self,
        link: StoreLink,
        *,
        name: str,
        max_handles: int,
        max_bytes: int,
        keep_seconds: int,
        background: Background,
        clock: Callable[[], float],
        ended: Callable[[State], None] = lambda state: None,
        shared_clock: Callable[[], float] | None = None,
    ) -> None:
        """name: of what the routers that share handles have in common.

        keep_seconds: for how long what is remembered of handles outlives them.
        shared_clock: a clock that all who use the store have, in place of the server's; for tests.
        """
        self._link = link
        # One slot of a cluster, whose nodes run scripts over keys of one slot only.
        self._prefix = f"kvloop:{LAYOUT}:{{{name}}}:"
        self._most = (max_handles, max_bytes)
        self._keep = keep_seconds
        self._background = background
        self._clock = clock
        self._ended = ended
        self._shared_clock = shared_clock
        self._ahead_at_least = self._ahead_at_most = 0.0
        self._retained: Mapping[str, Retention] = {}
        self._orphans: set[str] = set()

    def __len__(self) -> int:
        return sum(each.handles for each in self._retained.values())

    def retained_blocks(self, process: str) -> int:
        known = self._retained.get(process)
        return 0 if known is None else known.blocks

    @property
    def up(self) -> bool:
        """Whether the server answers."""
        return self._link.up

    async def connect(self) -> bool:
        """See whether the server answers; else ``watch`` goes on trying."""
        return await self._link.connect(self._catch_up)

    async def watch(self) -> None:
        """Connect anew after each failure, until cancelled."""
        await self._link.watch(self._catch_up)

    async def refresh(self) -> None:
        """Keep what is known of the server's contents up to date, until cancelled."""
        while True:
            await self.retained()
            await asyncio.sleep(_REFRESH_SECONDS)

    async def retained(self) -> Mapping[str, Retention]:
        """As it was when the server last answered, while it does not."""
        try:
            while (await self._call("tidy", _BATCH))[0] == _BATCH:
                pass
            flat = await self._call("retained")
        except StoreUnavailable:
            return self._retained
        parts = iter(flat)
        self._retained = {
            process.decode(): Retention(handles, blocks, float(last) - self._ahead_at_most)
            for process, handles, blocks, last in zip(parts, parts, parts, parts, strict=True)
        }
        return self._retained

    async def find(self, query: Query) -> Found:
        trail = query.trail
        named = _named(query.tenant_scope, query.conversation)
        try:
            why, *rest = await self._call(
                "find", named, trail.digests, trail.shared, _flag(trail.answered), SHORTLIST, STRANGERS, GAIN
            )
        except StoreUnavailable:
            return Found((), Absence.STORE_UNAVAILABLE)
        parts = iter(rest)
        matches = [
            Match(kept, bool(certain))
            for record, certain in zip(parts, parts, strict=True)
            if (kept := self._decoded(record)) is not None
        ]
        return Found(tuple(matches), Absence(why.decode()))

    async def take(self, ident: str) -> int | None:
        taking = _Taking()
        try:
            return await self._background.finish(self._take(ident, taking))
        except asyncio.CancelledError:
            taking.abandoned = True
            if taking.grant is not None:
                self._background.start(self._back(ident, taking.grant), "a take that nobody waits for")
            raise

    async def _take(self, ident: str, taking: _Taking) -> int | None:
        try:
            granted = await self._call("take", ident)
        except StoreUnavailable:
            return None
        if granted and taking.abandoned:
            await self._back(ident, granted[0])
        elif granted:
            taking.grant = granted[0]
        return taking.grant

    async def _back(self, ident: str, grant: int) -> None:
        await self.put_back(ident, grant)

    async def put_back(self, ident: str, grant: int) -> Kept | None:
        try:
            revoked = await self._call("put_back", ident, grant)
        except StoreUnavailable:
            return None
        return self._decoded(revoked[0]) if revoked else None

    async def spend(self, ident: str, grant: int) -> None:
        try:
            await self._call("spend", ident, grant)
        except StoreUnavailable:
            # It stays taken until its time is over.
            return

    async def withdraw(self, ident: str) -> bool:
        try:
            return bool((await self._call("withdraw", ident))[0])
        except StoreUnavailable:
            return False

    async def put(self, kept: Kept, *, max_blocks: int | None = None) -> tuple[GivenUp, ...]:
        named, trail = _named(kept.tenant_scope, kept.conversation), kept.trail
        most_handles, most_bytes = self._most
        try:
            flat = await self._call(
                "put",
                kept.ident,
                records.encode(kept, ahead=self._ahead_at_least),
                self._there(kept.deadline),
                kept.process,
                named,
                trail.digests,
                trail.shared,
                _flag(trail.answered),
                _words({named, trail.whole, trail.start} - {b""}),
                _counted(kept.runs),
                most_handles,
                most_bytes,
                "" if max_blocks is None else max_blocks,
                THREADS,
            )
        except StoreUnavailable as error:
            # One that may be there is not released: another router may be reading it.
            return () if error.sent else (GivenUp(kept, Why.STORE_UNAVAILABLE),)
        parts = iter(flat)
        return tuple(
            GivenUp(old, Why(why.decode()))
            for why, record in zip(parts, parts, strict=True)
            if (old := self._decoded(record)) is not None
        )

    async def due(self, before: float) -> tuple[Kept, ...]:
        """Those that no other router was just given."""
        found: list[Kept] = []
        async for batch in self._batches("due", self._there(before), _BATCH, _CLAIM_SECONDS):
            found += batch
        return tuple(found)

    async def renew(self, kept: Kept) -> bool:
        record = records.encode(kept, ahead=self._ahead_at_least)
        try:
            return bool((await self._call("renew", kept.ident, record, self._there(kept.deadline)))[0])
        except StoreUnavailable:
            return False

    async def note_absent(self, query: Query, why: Absence) -> None:
        names = {_named(query.tenant_scope, query.conversation), query.trail.whole} - {b""}
        try:
            await self._call("note_absent", why.value, *names)
        except StoreUnavailable:
            return

    async def end(self, tenant_scope: bytes, conversation: str) -> tuple[Kept, ...]:
        try:
            return self._all_decoded(await self._call("end", _named(tenant_scope, conversation)))
        except StoreUnavailable:
            return ()

    async def orphan(self, process: str) -> int:
        gone = 0
        try:
            while batch := (await self._call("orphan", process, _BATCH))[0]:
                gone += batch
        except StoreUnavailable:
            # Nobody reads from a process that is gone; said once more where the server is back.
            self._orphans.add(process)
        return gone

    async def give_up(self, process: str) -> tuple[Kept, ...]:
        given_up: list[Kept] = []
        async for batch in self._batches("give_up", process, _BATCH):
            given_up += batch
        return tuple(given_up)

    async def empty(self) -> tuple[Kept, ...]:
        """None: other routers, or this one when it is back, use them."""
        return ()

    async def _batches(self, operation: str, *arguments: bytes | str | float) -> AsyncIterator[tuple[Kept, ...]]:
        """Call until less than a batch is left."""
        full = True
        while full:
            try:
                batch = await self._call(operation, *arguments)
            except StoreUnavailable:
                return
            full = len(batch) == _BATCH
            yield self._all_decoded(batch)

    async def _catch_up(self) -> None:
        """After a time without the server."""
        await self._call("tidy", _BATCH)
        while self._orphans:
            await self.orphan(self._orphans.pop())
            if not self._link.up:
                return

    async def _call(self, operation: str, *arguments: bytes | str | float) -> list[Any]:
        sent = self._clock()
        now = "" if self._shared_clock is None else self._shared_clock()
        time, *rest = await self._link.call(operation, (self._prefix,), now, self._keep, *arguments)
        if self._shared_clock is None:
            self._ahead_at_least, self._ahead_at_most = float(time) - self._clock(), float(time) - sent
        for state, count in zip(_ENDS, rest, strict=False):
            for _ in range(count):
                self._ended(state)
        return rest[len(_ENDS) :]

    def _there(self, moment: float) -> str:
        """A moment on the server's clock, or shortly before it."""
        return f"{moment + self._ahead_at_least:.6f}"

    def _decoded(self, record: bytes) -> Kept | None:
        try:
            return records.decode(record, ahead=self._ahead_at_most)
        except records.UnknownRecord as error:
            _log.warning("a record of the handle store cannot be read", extra={"error": str(error)})
            return None

    def _all_decoded(self, batch: Iterable[bytes]) -> tuple[Kept, ...]:
        return tuple(kept for record in batch if (kept := self._decoded(record)) is not None)


def _flag(value: bool) -> str:
    return "1" if value else ""


def _named(tenant_scope: bytes, conversation: str | None) -> bytes:
    """The key of a conversation id, which says nothing of it; empty where there is none."""
    if conversation is None:
        return b""
    return blake2b(conversation.encode("utf-8", "surrogatepass"), key=tenant_scope[:64], digest_size=16).digest()


def _words(keys: Iterable[bytes]) -> bytes:
    return b"".join(len(each).to_bytes(2, "big") + each for each in keys)


def _counted(runs: Iterable[tuple[int, int]]) -> bytes:
    """The blocks in runs, each once and upwards, as pairs of a first id and a count."""
    upwards = sorted((first, first + count) if count > 0 else (first + count + 1, first + 1) for first, count in runs)
    merged: list[tuple[int, int]] = []
    for start, end in upwards:
        if end > _LARGEST_BLOCK:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return b"".join(struct.pack("<II", start, end - start) for start, end in merged)
