"""Faults planted in the transition function, one each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvloop_connector.lifecycle import Effect, Event, Lease, Outcome, State, transition
from tests.protocol.model import Invariant

Fault = Callable[[Lease, Event, float, int | None], Outcome | None]
"""What a faulty function answers instead; None where it answers as it should."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """The transition function with a fault, and what the fault must break."""

    name: str
    fault: Fault
    breaks: Invariant

    def __call__(self, lease: Lease, event: Event, now: float, *, grant: int | None = None) -> Outcome:
        answer = self.fault(lease, event, now, grant)
        return transition(lease, event, now, grant=grant) if answer is None else answer


def _granted(lease: Lease) -> Outcome:
    return Outcome(lease._replace(state=State.TAKEN, grants=lease.grants + 1), Effect.GRANT)


def _take_of(*states: State) -> Fault:
    def fault(lease: Lease, event: Event, now: float, _: int | None) -> Outcome | None:
        in_time = now + lease.margin < lease.deadline
        return _granted(lease) if event is Event.TAKE and lease.state in states and in_time else None

    return fault


def _take_without_deadline(lease: Lease, event: Event, _: float, __: int | None) -> Outcome | None:
    return _granted(lease) if event is Event.TAKE and lease.state is State.ISSUED else None


def _take_with_margin(margin: Callable[[Lease], float]) -> Fault:
    def fault(lease: Lease, event: Event, now: float, _: int | None) -> Outcome | None:
        issued = event is Event.TAKE and lease.state is State.ISSUED and now < lease.deadline
        return _granted(lease) if issued and now + margin(lease) < lease.deadline else None

    return fault


def _take_at_the_margin(lease: Lease, event: Event, now: float, _: int | None) -> Outcome | None:
    issued = event is Event.TAKE and lease.state is State.ISSUED and now < lease.deadline
    return _granted(lease) if issued and now + lease.margin <= lease.deadline else None


def _take_renews(lease: Lease, event: Event, now: float, grant: int | None) -> Outcome | None:
    outcome = transition(lease, event, now, grant=grant)
    return outcome._replace(lease=outcome.lease._replace(deadline=lease.deadline + 2)) if _grants(outcome) else None


def _grants(outcome: Outcome) -> bool:
    return outcome.effect is Effect.GRANT


def _revives(event: Event, *states: State) -> Fault:
    def fault(lease: Lease, happened: Event, _: float, __: int | None) -> Outcome | None:
        revived = happened is event and lease.state in states
        return Outcome(lease._replace(state=State.ISSUED), Effect.NONE) if revived else None

    return fault


def _put_back_renews(lease: Lease, event: Event, now: float, _: int | None) -> Outcome | None:
    if event is Event.PUT_BACK and lease.state is State.TAKEN:
        return Outcome(lease._replace(state=State.ISSUED, deadline=now + 4), Effect.NONE)
    return None


def _anybodys(event: Event) -> Fault:
    def fault(lease: Lease, happened: Event, now: float, _: int | None) -> Outcome | None:
        return transition(lease, happened, now) if happened is event else None

    return fault


def _ignored(event: Event) -> Fault:
    def fault(lease: Lease, happened: Event, _: float, __: int | None) -> Outcome | None:
        return Outcome(lease, Effect.REFUSE) if happened is event else None

    return fault


def _frees_nothing(state: State) -> Fault:
    def fault(lease: Lease, event: Event, now: float, grant: int | None) -> Outcome | None:
        outcome = transition(lease, event, now, grant=grant)
        freed = outcome.effect is Effect.FREE and outcome.lease.state is state
        return outcome._replace(effect=Effect.NONE) if freed else None

    return fault


def _stays(state: State, instead: State) -> Fault:
    def fault(lease: Lease, event: Event, now: float, grant: int | None) -> Outcome | None:
        outcome = transition(lease, event, now, grant=grant)
        ended = outcome.effect is Effect.FREE and outcome.lease.state is state
        return outcome._replace(lease=outcome.lease._replace(state=instead)) if ended else None

    return fault


def _release_of_taken(lease: Lease, event: Event, now: float, _: int | None) -> Outcome | None:
    taken = event is Event.RELEASE and lease.state is State.TAKEN and now < lease.deadline
    return Outcome(lease._replace(state=State.RELEASED), Effect.FREE) if taken else None


def _expires_late(lease: Lease, event: Event, now: float, _: int | None) -> Outcome | None:
    late = lease.live and now == lease.deadline and event is Event.EXPIRE
    return Outcome(lease, Effect.NONE) if late else None


def _expires_early(lease: Lease, event: Event, now: float, _: int | None) -> Outcome | None:
    early = lease.live and event is Event.EXPIRE and now + 1 >= lease.deadline
    return Outcome(lease._replace(state=State.EXPIRED), Effect.FREE) if early else None


MUTANTS = [
    Mutant("take grants what is taken", _take_of(State.TAKEN), Invariant.NOT_READ_TWICE),
    Mutant("take grants what is spent", _take_of(State.SPENT), Invariant.NOT_READ_AFTER_FREED),
    Mutant("take grants what is released", _take_of(State.RELEASED), Invariant.NOT_READ_AFTER_FREED),
    Mutant("take grants what is orphaned", _take_of(State.ORPHANED), Invariant.NOT_GRANTED_AFTER_ITS_END),
    Mutant("take ignores the deadline", _take_without_deadline, Invariant.NOT_READ_AFTER_FREED),
    Mutant("take ignores the margin", _take_with_margin(lambda lease: 0), Invariant.NOT_READ_AFTER_FREED),
    Mutant(
        "take adds time for the margin", _take_with_margin(lambda lease: -lease.margin), Invariant.NOT_READ_AFTER_FREED
    ),
    Mutant("take grants at the margin", _take_at_the_margin, Invariant.NOT_READ_AFTER_FREED),
    Mutant("take renews", _take_renews, Invariant.NOT_GRANTED_AFTER_ITS_END),
    Mutant("put back revives what is spent", _revives(Event.PUT_BACK, State.SPENT), Invariant.NOT_READ_TWICE),
    Mutant(
        "put back revives what is released", _revives(Event.PUT_BACK, State.RELEASED), Invariant.NOT_READ_AFTER_FREED
    ),
    Mutant(
        "put back revives what is orphaned",
        _revives(Event.PUT_BACK, State.ORPHANED),
        Invariant.NOT_GRANTED_AFTER_ITS_END,
    ),
    Mutant("put back renews", _put_back_renews, Invariant.NOT_READ_AFTER_FREED),
    Mutant("put back by who holds it no more", _anybodys(Event.PUT_BACK), Invariant.NOT_READ_TWICE),
    Mutant("read leaves it issued", _stays(State.SPENT, State.ISSUED), Invariant.NOT_READ_TWICE),
    Mutant("release leaves it issued", _stays(State.RELEASED, State.ISSUED), Invariant.NOT_READ_AFTER_FREED),
    Mutant("orphan leaves it issued", _stays(State.ORPHANED, State.ISSUED), Invariant.NOT_GRANTED_AFTER_ITS_END),
    Mutant("orphan is ignored", _ignored(Event.ORPHAN), Invariant.NOT_GRANTED_AFTER_ITS_END),
    Mutant("release of what is taken", _release_of_taken, Invariant.NOT_READ_AFTER_FREED),
    Mutant("read is ignored", _ignored(Event.READ), Invariant.NOT_GRANTED_AFTER_ITS_END),
    Mutant("expiry is ignored", _ignored(Event.EXPIRE), Invariant.NOT_RETAINED_PAST_TTL),
    Mutant("expiry frees nothing", _frees_nothing(State.EXPIRED), Invariant.FREED_IN_A_FAIR_WORLD),
    Mutant("expiry is late", _expires_late, Invariant.NOT_RETAINED_PAST_TTL),
    Mutant("expiry is early", _expires_early, Invariant.NOT_READ_AFTER_FREED),
    Mutant("a read frees nothing", _frees_nothing(State.SPENT), Invariant.NOT_RETAINED_PAST_TTL),
    Mutant("a release frees nothing", _frees_nothing(State.RELEASED), Invariant.NOT_RETAINED_PAST_TTL),
]
