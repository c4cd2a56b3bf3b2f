from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.lifecycle import Effect, Event, Lease, Outcome, State, transition

DEADLINE = 100.0
FINAL = [State.SPENT, State.RELEASED, State.EXPIRED, State.ORPHANED]

# Every pair of a live state and an event, in time: the state it leads to, and what to do.
TABLE = {
    (State.ISSUED, Event.TAKE): (State.TAKEN, Effect.GRANT),
    (State.ISSUED, Event.READ): (State.ISSUED, Effect.REFUSE),
    (State.ISSUED, Event.PUT_BACK): (State.ISSUED, Effect.REFUSE),
    (State.ISSUED, Event.RELEASE): (State.RELEASED, Effect.FREE),
    (State.ISSUED, Event.EXPIRE): (State.ISSUED, Effect.NONE),
    (State.ISSUED, Event.ORPHAN): (State.ORPHANED, Effect.FREE),
    (State.TAKEN, Event.TAKE): (State.TAKEN, Effect.REFUSE),
    (State.TAKEN, Event.READ): (State.SPENT, Effect.FREE),
    (State.TAKEN, Event.PUT_BACK): (State.ISSUED, Effect.NONE),
    (State.TAKEN, Event.RELEASE): (State.TAKEN, Effect.REFUSE),
    (State.TAKEN, Event.EXPIRE): (State.TAKEN, Effect.NONE),
    (State.TAKEN, Event.ORPHAN): (State.ORPHANED, Effect.FREE),
}


def test_the_table_is_whole() -> None:
    assert TABLE.keys() == set(product([State.ISSUED, State.TAKEN], Event))
    assert set(State) == {State.ISSUED, State.TAKEN, *FINAL}


@pytest.mark.parametrize(("before", "after"), TABLE.items(), ids=lambda pair: "-".join(map(str, pair)))
def test_a_live_lease_in_time(before: tuple[State, Event], after: tuple[State, Effect]) -> None:
    state, event = before

    outcome = transition(Lease(DEADLINE, state=state), event, DEADLINE - 1)

    assert (outcome.lease.state, outcome.effect) == after


@pytest.mark.parametrize("state", [State.ISSUED, State.TAKEN])
@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("now", [DEADLINE, DEADLINE + 1])
def test_a_live_lease_at_its_deadline_ends_whatever_happens(state: State, event: Event, now: float) -> None:
    outcome = transition(Lease(DEADLINE, state=state, grants=1), event, now, grant=0)

    assert outcome.effect is Effect.FREE
    assert outcome.lease.state is (State.ORPHANED if event is Event.ORPHAN else State.EXPIRED)


@pytest.mark.parametrize("state", FINAL)
@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("now", [0.0, DEADLINE, DEADLINE + 1])
def test_the_end_is_final_and_nothing_is_freed_twice(state: State, event: Event, now: float) -> None:
    lease = Lease(DEADLINE, state=state)

    assert not lease.live
    assert transition(lease, event, now) == Outcome(lease, Effect.REFUSE)


@pytest.mark.parametrize(
    ("now", "effect"), [(DEADLINE - 5.1, Effect.GRANT), (DEADLINE - 5, Effect.REFUSE), (DEADLINE - 0.1, Effect.REFUSE)]
)
def test_nothing_is_granted_within_the_margin(now: float, effect: Effect) -> None:
    assert transition(Lease(DEADLINE, margin=5), Event.TAKE, now).effect is effect


@pytest.mark.parametrize("event", [Event.READ, Event.PUT_BACK])
def test_the_margin_hinders_only_the_start(event: Event) -> None:
    taken = Lease(DEADLINE, state=State.TAKEN, margin=5)

    assert transition(taken, event, DEADLINE - 1).effect is not Effect.REFUSE


@pytest.mark.parametrize("event", [Event.READ, Event.PUT_BACK])
def test_who_holds_it_no_more_cannot_end_anothers_use(event: Event) -> None:
    first = transition(Lease(DEADLINE), Event.TAKE, 0).lease
    put_back = transition(first, Event.PUT_BACK, 1, grant=first.grants).lease
    second = transition(put_back, Event.TAKE, 2).lease

    assert transition(second, event, 3, grant=first.grants) == Outcome(second, Effect.REFUSE)
    assert transition(second, event, 3, grant=second.grants).effect is not Effect.REFUSE


@given(
    steps=st.lists(st.tuples(st.sampled_from(Event), st.floats(0, 40)), max_size=12),
    margin=st.floats(0, 10),
)
def test_any_history_ends_at_most_once_and_keeps_its_deadline(steps: list[tuple[Event, float]], margin: float) -> None:
    lease = Lease(DEADLINE, margin=margin)
    now = 0.0
    freed = 0
    for event, passed in steps:
        now += passed
        outcome = transition(lease, event, now)
        assert (outcome.effect is Effect.GRANT) == (outcome.lease.grants > lease.grants)
        assert outcome.effect is not Effect.GRANT or now + margin < DEADLINE
        assert outcome.effect is not Effect.REFUSE or outcome.lease == lease
        lease = outcome.lease
        freed += outcome.effect is Effect.FREE

    assert lease.deadline == DEADLINE
    assert freed == (not lease.live)
