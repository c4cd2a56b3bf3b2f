"""The life cycle of a KV handle, as one pure transition function.

::

    ISSUED ──take──▶ TAKEN ──read──▶ SPENT
      ▲  │             │
      │  │◀─put back───┘      (only where it is proven that nothing was read)
      │  ├──release──▶ RELEASED
      │  └──expire───▶ EXPIRED      (from TAKEN too: retention ends whatever happened)
      └─────orphan───▶ ORPHANED     (from TAKEN too: the issuer is gone)

Router and simulator both run it: the router to decide whether it may use a handle, the simulated decode engine to
decide when blocks are freed. ``tests/protocol`` explores it exhaustively.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """Where a handle stands. All but ISSUED and TAKEN are final."""

    ISSUED = "issued"
    TAKEN = "taken"
    SPENT = "spent"
    RELEASED = "released"
    EXPIRED = "expired"
    ORPHANED = "orphaned"


class Event(StrEnum):
    """What can happen to a handle."""

    TAKE = "take"
    """Somebody asks for its single use."""
    READ = "read"
    """The read has ended and the issuer knows."""
    PUT_BACK = "put_back"
    """The taker proves that nothing was read, such as after a 4xx, which precedes scheduling."""
    RELEASE = "release"
    """It will not be used; the issuer is told to free its blocks."""
    EXPIRE = "expire"
    """Somebody looks whether its time is over."""
    ORPHAN = "orphan"
    """The issuing process is gone, or is no longer the same process."""


class Effect(StrEnum):
    """What whoever applied the event does now."""

    NONE = "none"
    GRANT = "grant"
    """The one use is granted to whoever sent TAKE."""
    FREE = "free"
    """The lease is over: an issuer frees the blocks. For anybody else, only a lease that is RELEASED by this event is a
    reason to tell the issuer so; one that EXPIRED may have been taken, and its read may still run."""
    REFUSE = "refuse"
    """The event was not valid; the handle is unchanged."""


class Lease(NamedTuple):
    """A handle's place in its life cycle.

    deadline: seconds, on the clock of whoever keeps the lease; retention ends then.
    margin: seconds before the deadline from which on it is no longer taken, so that a read that starts can end.
    grants: how often it was granted; the number of a grant is what this was right after it.
    """

    deadline: float
    state: State = State.ISSUED
    margin: float = 0.0
    grants: int = 0

    @property
    def live(self) -> bool:
        """Whether blocks are retained for it."""
        return self.state in (State.ISSUED, State.TAKEN)


class Outcome(NamedTuple):
    """What an event led to: the lease from now on, and what to do."""

    lease: Lease
    effect: Effect


def transition(lease: Lease, event: Event, now: float, *, grant: int | None = None) -> Outcome:
    """Apply ``event`` at ``now`` (seconds, the lease's clock). Total: an event that is not valid is refused.

    A lease whose deadline has passed becomes EXPIRED whatever the event, except that an issuer that is gone orphans.

    grant: the number of the grant that a READ or PUT_BACK speaks of. A store that several takers share must give it:
    a put back that is sent again because its acknowledgement was lost can otherwise find the lease taken by another,
    and free the way for a third while that one reads.
    """
    if not lease.live:
        return Outcome(lease, Effect.REFUSE)
    if event is Event.ORPHAN:
        return _ended(lease, State.ORPHANED)
    if now >= lease.deadline:
        return _ended(lease, State.EXPIRED)
    if grant not in (None, lease.grants):
        return Outcome(lease, Effect.REFUSE)
    match event, lease.state:
        case Event.EXPIRE, _:
            return Outcome(lease, Effect.NONE)
        case Event.TAKE, State.ISSUED if now + lease.margin < lease.deadline:
            return Outcome(Lease(lease.deadline, State.TAKEN, lease.margin, lease.grants + 1), Effect.GRANT)
        case Event.READ, State.TAKEN:
            return _ended(lease, State.SPENT)
        case Event.PUT_BACK, State.TAKEN:
            return Outcome(Lease(lease.deadline, State.ISSUED, lease.margin, lease.grants), Effect.NONE)
        case Event.RELEASE, State.ISSUED:
            return _ended(lease, State.RELEASED)
    return Outcome(lease, Effect.REFUSE)


def _ended(lease: Lease, state: State) -> Outcome:
    return Outcome(Lease(lease.deadline, state, lease.margin, lease.grants), Effect.FREE)
