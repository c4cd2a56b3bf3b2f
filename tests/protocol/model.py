"""A KV handle between a decode engine, a store that routers share, and a prefill engine, and all that can befall it.

Every decision about it, in the store, in the decode engine and in the prefill engine, is the transition function under
test. What it decides about is physical and kept beside it: whether the blocks are held, how often they were read, when
their time is over. Time is in ticks; what is left of each deadline is kept, so that the states are finitely many.

What the surroundings may do: lose an answer on any way, delay a leg in the prefill queue, refuse it (4xx) or fail it
(5xx), lose the notification of a read, restart the decode engine, let a router die or give a leg up and hear its answer
late, send a put back again because its acknowledgement was lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvloop_connector.lifecycle import Effect, Event, Lease, Outcome, State

ROUTERS = (0, 1)
"""Each has one leg, or one word to the store, under way at most."""


_GONE = Lease(0)
"""Stands for the decode engine's lease once the blocks are free: they are never held again, whatever it says."""


class Transition(Protocol):
    """The function under test."""

    def __call__(self, lease: Lease, event: Event, now: float, *, grant: int | None = None) -> Outcome: ...


class Invariant(StrEnum):
    """What must hold in every state."""

    NOT_READ_AFTER_FREED = "no block is read after it was freed"
    NOT_READ_TWICE = "no handle's blocks are read twice"
    NOT_RETAINED_PAST_TTL = "no block is retained past its TTL"
    NOT_GRANTED_AFTER_ITS_END = "no handle is granted after it was spent, released, orphaned or past its deadline"
    FREED_IN_A_FAIR_WORLD = "where everything under way arrives and time passes, every retained block is freed"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How long things take, in ticks.

    ttl: how long a decode engine retains blocks.
    handle_ttl, handle_margin: the deadline, from when the router has the handle, and the margin that the router keeps.
    arrival: how long the answer that brings the handle is at most under way.
    queue: how long a leg waits at most in the prefill engine; None for any time.
    read: how long a read takes at most.
    read_margin: the prefill engine declines a read that starts later than this before the decode engine's deadline;
        None for one that does not look.
    """

    ttl: int
    handle_ttl: int
    handle_margin: int
    arrival: int
    queue: int | None
    read: int
    read_margin: int | None


class Phase(StrEnum):
    """Where a leg stands. All after READING are answers under way to the router."""

    QUEUED = "queued"
    READING = "reading"
    DONE = "200"
    REFUSED = "4xx"
    FAILED = "5xx"
    PUT_BACK = "put back, acknowledgement lost"


class Leg(NamedTuple):
    """A prefill leg with a handle, or what is left of one.

    left: ticks until it must go on; -1 where nothing urges it.
    """

    router: int
    release: bool
    phase: Phase
    left: int
    grant: int
    given_up: bool


class Handle(NamedTuple):
    """A handle and its blocks.

    expires: ticks until the decode engine's deadline, as it stands in the handle.
    retained: the decode engine's lease. stored: the store's; None before the router has it.
    arriving: ticks for which its answer may still be under way; -1 when it is not.
    usable: ticks until the deadline that the router gave it at first.
    held: whether the decode engine has not freed its blocks. same_process: whether it was not restarted.
    reads: reads that began. ended: whether a router has said that it is over.
    """

    decode: int
    expires: int
    retained: Lease
    arriving: int
    stored: Lease | None
    usable: int
    held: bool
    same_process: bool
    reads: int
    ended: bool
    legs: tuple[Leg, ...]


class Move(NamedTuple):
    """Something that befalls a handle: what it is then (None: forgotten by all), what it breaks, and who must be free
    to do it."""

    label: str
    after: Handle | None
    broken: Invariant | None = None
    router: int | None = None


class HandleModel:
    """One handle in a world, with every decision made by one transition function."""

    def __init__(self, transition: Transition, world: World) -> None:
        self._transition = transition
        self._world = world

    def issued(self, decode: int) -> Handle:
        """A handle that decode engine ``decode`` has just made."""
        return Handle(
            decode=decode,
            expires=self._world.ttl,
            retained=Lease(self._world.ttl),
            arriving=self._world.arrival,
            stored=None,
            usable=0,
            held=True,
            same_process=True,
            reads=0,
            ended=False,
            legs=(),
        )

    def moves(self, handle: Handle) -> Iterator[Move]:
        """All that can befall ``handle``, but for the passing of time and a restart."""
        if handle.arriving >= 0:
            yield self._arrival(handle)
            yield Move("the answer that brings it is lost", handle._replace(arriving=-1))
        elif handle.stored:
            yield from self._store_moves(handle, handle.stored)
        elif not handle.held:
            yield Move("nobody knows of it any more", None)
        for leg in handle.legs:
            yield from self._leg_moves(handle, leg)

    def fair_move(self, handle: Handle) -> Move | None:
        """What befalls ``handle`` next where everything arrives; None where nothing is under way."""
        if handle.arriving >= 0:
            return self._arrival(handle)
        return next(self._leg_moves(handle, handle.legs[0])) if handle.legs else None

    def tick(self, handle: Handle) -> Move:
        """A tick passes, and the decode engine looks at its deadlines."""
        move = self._notified("a tick passes", _aged(handle), Event.EXPIRE)
        if move.after and move.after.held and move.after.expires <= 0 and not move.broken:
            return move._replace(broken=Invariant.NOT_RETAINED_PAST_TTL)
        return move

    def restart(self, handle: Handle) -> Handle:
        """The decode engine's process is another one: its memory is too, and a read that runs breaks off."""
        legs = tuple(_at(leg, Phase.FAILED) if leg.phase is Phase.READING else leg for leg in handle.legs)
        return handle._replace(held=False, same_process=False, expires=0, retained=_GONE, legs=tuple(sorted(legs)))

    def _arrival(self, handle: Handle) -> Move:
        ttl = self._world.handle_ttl
        stored = Lease(ttl, margin=self._world.handle_margin)
        return Move("it arrives at a router", handle._replace(arriving=-1, stored=stored, usable=ttl))

    def _store_moves(self, handle: Handle, lease: Lease) -> Iterator[Move]:
        taken, outcome = self._told(handle, Event.TAKE)
        if outcome.effect is not Effect.GRANT:
            yield Move(f"somebody asks for it: {outcome.effect}", taken)
        else:
            over = handle.ended or handle.usable <= 0
            broken = Invariant.NOT_GRANTED_AFTER_ITS_END if over else None
            yield Move("it is granted, and the grant is lost", taken, broken)
            for router in ROUTERS:
                leg = Leg(router, False, Phase.QUEUED, self._queue(), outcome.lease.grants, False)
                yield Move(f"it is granted to router {router}, which sends a leg", _joined(taken, leg), broken, router)
        released, outcome = self._told(handle, Event.RELEASE)
        # A lease that has expired was perhaps taken before, and may still be read: no word then, although it is FREE.
        if outcome.effect is not Effect.REFUSE and outcome.lease.state is not State.EXPIRED:
            for router in ROUTERS:
                leg = Leg(router, True, Phase.QUEUED, -1, 0, False)
                yield Move(
                    f"router {router} releases it and sends word",
                    _joined(released._replace(ended=True), leg),
                    router=router,
                )
        yield Move("the store looks at its deadline", self._told(handle, Event.EXPIRE)[0])
        if not handle.same_process:
            orphaned = self._told(handle, Event.ORPHAN)[0]
            yield Move("a router learns that its engine is gone", orphaned._replace(ended=True))
        if not lease.live and not handle.held and not handle.legs:
            yield Move("the store forgets it", None)

    def _leg_moves(self, handle: Handle, leg: Leg) -> Iterator[Move]:
        """What can happen to a leg; first what happens in a fair world."""
        if leg.release:
            yield self._notified("word of its release arrives", _dropped(handle, leg), Event.RELEASE)
            yield Move("word of its release is lost", _dropped(handle, leg))
        elif leg.phase is Phase.QUEUED:
            yield self._started(handle, leg)
            yield Move("prefill answers 4xx", _moved(handle, leg, Phase.REFUSED))
        elif leg.phase is Phase.READING:
            done = _moved(handle, leg, Phase.DONE)
            yield self._notified("the read ends, and decode knows", done, Event.TAKE, Event.READ)
            yield Move("the read ends, and the notification is lost", done)
        else:
            yield from self._answer_moves(handle, leg)
        if leg.phase in (Phase.QUEUED, Phase.READING) and not leg.given_up and not leg.release:
            spent = self._told(handle, Event.READ, leg.grant)[0]._replace(ended=True)
            yield Move(f"router {leg.router} gives its leg up", _changed(spent, leg, leg._replace(given_up=True)))

    def _answer_moves(self, handle: Handle, leg: Leg) -> Iterator[Move]:
        heard = _dropped(handle, leg)
        if leg.phase in (Phase.DONE, Phase.FAILED):
            spent = self._told(heard, Event.READ, leg.grant)[0]._replace(ended=True)
            yield Move(f"router {leg.router} hears {leg.phase}, or nothing, and counts it as spent", spent)
        else:
            put_back, outcome = self._told(heard, Event.PUT_BACK, leg.grant)
            yield Move(f"router {leg.router} puts it back ({leg.phase}): {outcome.effect}", put_back)
            if leg.phase is Phase.REFUSED:
                again = _joined(put_back, leg._replace(phase=Phase.PUT_BACK))
                yield Move(f"router {leg.router} puts it back, and the acknowledgement is lost", again)
        yield Move(f"router {leg.router} dies", heard)

    def _started(self, handle: Handle, leg: Leg) -> Move:
        if not handle.same_process:
            failed = _moved(handle, leg, Phase.FAILED)
            return Move("prefill answers 5xx: not the engine that issued it", failed)
        if self._world.read_margin is not None:
            # All that a prefill engine knows is the deadline in the handle.
            check = self._transition(Lease(handle.expires, margin=self._world.read_margin), Event.TAKE, 0)
            if check.effect is not Effect.GRANT:
                return Move("prefill answers 5xx: expired", _moved(handle, leg, Phase.FAILED))
        broken = None
        if not handle.held:
            broken = Invariant.NOT_READ_AFTER_FREED
        elif handle.reads:
            broken = Invariant.NOT_READ_TWICE
        reading = _moved(handle, leg, Phase.READING, self._world.read)
        return Move("prefill begins to read", reading._replace(reads=handle.reads + 1), broken)

    def _told(self, handle: Handle, event: Event, grant: int | None = None) -> tuple[Handle, Outcome]:
        """``handle`` after the store, which has it, was told ``event``, and what it answers."""
        assert handle.stored
        outcome = self._transition(handle.stored, event, 0, grant=grant)
        return handle._replace(stored=outcome.lease), outcome

    def _notified(self, label: str, handle: Handle, *events: Event) -> Move:
        """Its decode engine, if it is still the same process, is told ``events``."""
        if not handle.same_process or not handle.held:
            return Move(label, handle)
        lease = handle.retained
        effects = []
        for event in events:
            outcome = self._transition(lease, event, 0)
            lease = outcome.lease
            effects.append(outcome.effect)
        if Effect.FREE not in effects:
            return Move(label, handle._replace(retained=lease))
        reading = any(leg.phase is Phase.READING for leg in handle.legs)
        broken = Invariant.NOT_READ_AFTER_FREED if reading else None
        return Move(label, handle._replace(retained=_GONE, held=False), broken)

    def _queue(self) -> int:
        return -1 if self._world.queue is None else self._world.queue


def urgent(handle: Handle) -> bool:
    """Whether something about ``handle`` has to happen before time goes on."""
    return handle.arriving == 0 or any(leg.left == 0 for leg in handle.legs)


def renumbered(handle: Handle) -> Handle:
    """``handle`` with its grants numbered anew: there is no end to them, and only which are the same matters."""
    if handle.stored is None or not handle.stored.grants:
        return handle
    grants = sorted({handle.stored.grants, *(leg.grant for leg in handle.legs)})
    legs = tuple(leg._replace(grant=grants.index(leg.grant)) for leg in handle.legs)
    return handle._replace(stored=handle.stored._replace(grants=grants.index(handle.stored.grants)), legs=legs)


def _aged(handle: Handle) -> Handle:
    stored = handle.stored
    return handle._replace(
        expires=max(0, handle.expires - 1),
        retained=_lease_aged(handle.retained),
        arriving=handle.arriving - 1 if handle.arriving > 0 else handle.arriving,
        stored=stored and _lease_aged(stored),
        usable=max(0, handle.usable - 1),
        legs=tuple(leg._replace(left=leg.left - 1) if leg.left > 0 else leg for leg in handle.legs),
    )


def _lease_aged(lease: Lease) -> Lease:
    return Lease(max(0, lease.deadline - 1), lease.state, lease.margin, lease.grants)


def _joined(handle: Handle, leg: Leg) -> Handle:
    return handle._replace(legs=tuple(sorted((*handle.legs, leg))))


def _dropped(handle: Handle, leg: Leg) -> Handle:
    legs = list(handle.legs)
    legs.remove(leg)
    return handle._replace(legs=tuple(legs))


def _changed(handle: Handle, leg: Leg, to: Leg) -> Handle:
    return _joined(_dropped(handle, leg), to)


def _moved(handle: Handle, leg: Leg, phase: Phase, left: int = -1) -> Handle:
    return _changed(handle, leg, _at(leg, phase, left))


def _at(leg: Leg, phase: Phase, left: int = -1) -> Leg:
    return leg._replace(phase=phase, left=left)
