"""Leases on the blocks that a decode engine retains for finished turns, and the cap on how many there are.

Each lease goes through the life cycle of ``kvloop_connector.lifecycle``. Beside it stand here: renewal, and revoking.
A lease that is revoked (released, or given up for newer ones) grants no read any more from that moment on; its blocks
are freed once the read that was granted before has ended, or at the deadline, whichever comes first.

Blocks that several leases share, as those of a common system prompt, count once. Times are seconds on one monotonic
clock, given with each call and never going back. What each call returns besides are the ids whose blocks are free now;
no id is ever returned twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvloop_connector.lifecycle import Effect, Event, Lease, State, transition

Freed = tuple[str, ...]
"""Ids of turns whose blocks are to be freed now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """What leases are given.

    seconds: how long blocks are retained without renewal.
    longest: how long at most, with all renewals.
    margin: how long before its end a lease grants no read any more: the longest that a read may take.
    most_blocks: how many blocks may be retained; None for any number.
    """

    seconds: float
    longest: float
    margin: float
    most_blocks: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.margin < self.seconds <= self.longest:
            raise ValueError(f"a lease needs 0 <= margin < seconds <= longest, and not {self}")


def most_blocks(share: float, blocks: int) -> int:
    """The cap, in whole blocks, that is a ``share`` (0 to 1) of an engine's KV ``blocks``."""
    if not 0 <= share <= 1:
        raise ValueError(f"{share} is no share")
    return int(share * blocks)


class Retained(NamedTuple):
    """What became of a turn that ended. ``deadline`` is None where its blocks are not retained."""

    deadline: float | None
    freed: Freed


class Renewal(NamedTuple):
    """What a renewal led to: until when blocks are retained now, and which renewal of this lease it was (from 1)."""

    deadline: float
    number: int


class Claim(NamedTuple):
    """What became of the wish to read. ``grant`` is the number of the grant, or None where there is none."""

    grant: int | None
    freed: Freed


@dataclass(frozen=True, slots=True)
class _Held:
    lease: Lease
    blocks: frozenset[int]
    ends: float
    renewals: int = 0
    revoked: bool = False


class Leases:
    """The leases of one decode engine."""

    def __init__(self, terms: LeaseTerms) -> None:
        self._terms = terms
        # The longest idle first.
        self._held: dict[str, _Held] = {}
        self._uses: Counter[int] = Counter()

    @property
    def blocks(self) -> int:
        """How many blocks are retained."""
        return len(self._uses)

    @property
    def turns(self) -> Freed:
        """Ids of the turns for which blocks are retained, the longest idle first."""
        return tuple(self._held)

    def retain(self, turn: str, blocks: Iterable[int], now: float) -> Retained:
        """Retain ``blocks`` for the turn of this id, which nothing is retained for yet.

        Where they would pass the cap, the longest idle are given up until they fit. Where they would not fit even then,
        because of what is being read, nobody is given up and they are not retained.
        """
        if turn in self._held:
            raise ValueError("blocks are retained for this turn already")
        freed = list(self.expire(now))
        wanted = frozenset(blocks)
        if self._terms.most_blocks is not None:
            pinned = wanted.union(*(held.blocks for held in self._held.values() if held.lease.state is State.TAKEN))
            if len(pinned) > self._terms.most_blocks:
                return Retained(None, tuple(freed))
            idle = [other for other, held in self._held.items() if held.lease.state is State.ISSUED]
            while len(self._uses.keys() | wanted) > self._terms.most_blocks:
                freed += self.release(idle.pop(0), now)
        lease = Lease(now + self._terms.seconds, margin=self._terms.margin)
        self._held[turn] = _Held(lease, wanted, now + self._terms.longest)
        self._uses.update(wanted)
        return Retained(lease.deadline, tuple(freed))

    def renew(self, turn: str, seconds: float, now: float) -> Renewal | None:
        """Retain the turn's blocks for ``seconds`` from now; never shorter than before, nor past the longest time.

        None where nothing is retained for it, it is revoked, or its one read was granted already.
        """
        held = self._held.get(turn)
        if held is None or held.lease.state is not State.ISSUED or now >= held.lease.deadline:
            return None
        deadline = max(held.lease.deadline, min(now + seconds, held.ends))
        del self._held[turn]
        self._held[turn] = replace(held, lease=held.lease._replace(deadline=deadline), renewals=held.renewals + 1)
        return Renewal(deadline, held.renewals + 1)

    def claim(self, turn: str, now: float) -> Claim:
        """Grant the turn's one read, to be followed by ``read`` or ``put_back`` with the number of the grant."""
        held = self._held.get(turn)
        if held is None or held.revoked:
            return Claim(None, self.expire(now))
        outcome = transition(held.lease, Event.TAKE, now)
        freed = self._apply(turn, held, outcome.lease, outcome.effect)
        return Claim(outcome.lease.grants if outcome.effect is Effect.GRANT else None, freed)

    def read(self, turn: str, grant: int, now: float) -> Freed:
        """The read of this grant has ended."""
        return self._after(turn, Event.READ, now, grant)

    def put_back(self, turn: str, grant: int, now: float) -> Freed:
        """The read of this grant will not take place."""
        freed = self._after(turn, Event.PUT_BACK, now, grant)
        held = self._held.get(turn)
        if held is not None and held.revoked and held.lease.state is State.ISSUED:
            return (*freed, *self._after(turn, Event.RELEASE, now))
        return freed

    def release(self, turn: str, now: float) -> Freed:
        """Nobody will ask for the turn's blocks any more."""
        freed = self._after(turn, Event.RELEASE, now)
        held = self._held.get(turn)
        if held is not None:
            self._held[turn] = replace(held, revoked=True)
        return freed

    def expire(self, now: float) -> Freed:
        """End the leases whose deadline has passed."""
        return tuple(freed for turn in list(self._held) for freed in self._after(turn, Event.EXPIRE, now))

    def _after(self, turn: str, event: Event, now: float, grant: int | None = None) -> Freed:
        held = self._held.get(turn)
        if held is None:
            return ()
        outcome = transition(held.lease, event, now, grant=grant)
        return self._apply(turn, held, outcome.lease, outcome.effect)

    def _apply(self, turn: str, held: _Held, lease: Lease, effect: Effect) -> Freed:
        if effect is not Effect.FREE:
            self._held[turn] = replace(held, lease=lease)
            return ()
        del self._held[turn]
        self._uses.subtract(held.blocks)
        for block in held.blocks:
            if not self._uses[block]:
                del self._uses[block]
        return (turn,)
