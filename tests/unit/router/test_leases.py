"""Which handles are renewed for how long, and which are given up for memory."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvloop_router.leases import UNKNOWN, Held, Pace, Terms, budget, patience, renewal, renewed

TERMS = Terms(ttl=450.0, margin=30.0, lead=100.0, expected_gap=60.0, patience=4.0)
LONGEST = 3570.0
HOUR = 3600.0


def pace(*gaps: float) -> Pace:
    known = UNKNOWN
    for gap in gaps:
        known = known.after(gap)
    return known


def held(*gaps: float, since: float = 0.0, deadline: float = 450.0, ends: float = LONGEST) -> Held:
    return Held(since, deadline, ends, pace(*gaps))


@pytest.mark.parametrize(
    ("gaps", "seconds"),
    [
        pytest.param((), 240, id="nothing is known"),
        pytest.param((5, 5, 5), 75, id="an agent that comes back soon"),
        pytest.param((300, 300), 880, id="somebody who reads what it says"),
        pytest.param((5, 5, 5, 5, 5, 600), 900, id="a long pause once"),
        pytest.param((-1,), 120, id="a clock that lags"),
    ],
)
def test_a_conversation_is_waited_for_as_its_own_pauses_suggest(gaps: tuple[float, ...], seconds: float) -> None:
    assert patience(pace(*gaps), TERMS) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("handle", "now", "seconds"),
    [
        pytest.param(held(300, 300), 349, None, id="not due yet"),
        pytest.param(held(300, 300), 360, 450 + 30, id="for its whole time"),
        pytest.param(held(300, 300, deadline=800), 710, 170 + 30, id="for as long as a turn is likely"),
        pytest.param(held(300, 300, deadline=890), 800, None, id="no turn is likely after its end"),
        pytest.param(held(), 400, None, id="one of which nothing is known has its time"),
        pytest.param(held(300, 300), 450, None, id="too late"),
        pytest.param(held(HOUR, HOUR, deadline=3500), 3450, 120 + 30, id="up to the longest lease"),
        pytest.param(held(HOUR, HOUR, deadline=LONGEST), 3560, None, id="at the longest lease"),
        pytest.param(held(300, 300, ends=0.0), 400, None, id="where nothing is renewed"),
    ],
)
def test_when_a_handle_is_renewed_and_for_how_long(handle: Held, now: float, seconds: float | None) -> None:
    assert renewal(handle, now, TERMS) == (None if seconds is None else pytest.approx(seconds))


def test_a_deadline_moves_by_what_the_engine_says() -> None:
    assert renewed(held(), 380.5) == held(deadline=830.5)


@pytest.mark.parametrize("seconds", [0.0, -3.0])
def test_an_engine_that_moves_nothing_is_not_asked_again(seconds: float) -> None:
    stuck = renewed(held(HOUR), seconds)

    assert stuck == held(HOUR, ends=450.0)
    assert renewal(stuck, 449, TERMS) is None


@given(
    gaps=st.lists(st.floats(0, 2 * HOUR), max_size=6),
    ttl=st.floats(1, HOUR),
    patient=st.floats(0, 10),
    longest=st.floats(1, 4 * HOUR),
)
def test_no_handle_is_held_past_the_patience_or_the_longest_lease(
    gaps: list[float], ttl: float, patient: float, longest: float
) -> None:
    """An engine that grants all that it is asked for, and a router that looks all the time."""
    terms = Terms(ttl=ttl, margin=30.0, lead=ttl / 4, expected_gap=60.0, patience=patient)
    ends = max(ttl, longest)
    handle = Held(0.0, ttl, ends, pace(*gaps))
    until = max(ttl, min(patience(handle.pace, terms), ends))
    asked, now = 0, 0.0
    while now < handle.deadline:
        seconds = renewal(handle, now, terms)
        if seconds is not None:
            asked += 1
            assert seconds <= ttl + terms.margin + 1e-6
            handle = renewed(handle, now + seconds - (handle.deadline + terms.margin))
            assert handle.deadline <= until + 1e-3
        now += terms.lead / 2

    assert handle.deadline == pytest.approx(until, rel=1e-3, abs=1e-2), "and it is held for as long as that"
    # Each renewal but the last gives at least what was not its last part.
    assert asked <= until / (ttl * 3 / 4) * 1.5 + 2


@pytest.mark.parametrize(
    ("capped", "newest", "blocks"),
    [(False, 10, 1000), (True, 10, 900), (True, 300, 700), (True, 900, 500)],
)
def test_room_is_left_where_the_engine_itself_refuses_more(capped: bool, newest: int, blocks: int) -> None:
    assert budget(1000, capped=capped, newest=newest) == blocks
