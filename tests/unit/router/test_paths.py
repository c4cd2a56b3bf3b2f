"""What legs teach: how long engines take, and what they still have to do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvloop_router.cost_model import COMPUTE_PRIOR, Work
from kvloop_router.path_choice import Terms
from kvloop_router.paths import Backlog, Paths, unwatched


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_legs_on_one_engine_wait_for_each_other() -> None:
    backlog = Backlog()
    backlog.begin(1, 2.0, 10.0)
    backlog.begin(2, 3.0, 10.5)

    assert backlog.wait(11.0) == 4.0
    assert backlog.wait(20.0) == 3.0
    assert backlog.end(1, 12.5) == (2.5, False)
    assert backlog.wait(13.5) == 2.0
    assert backlog.end(2, 15.0) == (2.5, True)
    assert backlog.wait(15.0) == 0.0


def test_a_leg_that_overtakes_leaves_the_first_one_where_it_was() -> None:
    backlog = Backlog()
    backlog.begin(1, 2.0, 0.0)
    backlog.begin(2, 1.0, 0.0)
    backlog.end(2, 0.5)

    assert backlog.wait(1.0) == 1.0


def played(paths: Paths, clock: Clock, name: str, work: Work, seconds: float) -> None:
    leg = paths.prefill_leg(name, work)
    clock.now += seconds
    leg.first_token()
    leg.close()


def test_an_engine_is_expected_to_take_what_it_took() -> None:
    clock = Clock()
    paths = Paths(Terms(), clock)
    for tokens in range(1_000, 9_000, 250):
        played(paths, clock, "p", Work(tokens), 0.2 + tokens * 1e-4)

    assert paths.prefill_speed("p").compute_seconds(Work(5_100)) == pytest.approx(0.71, rel=0.05)
    # One of which nothing is known is thought to be like it.
    assert paths.prefill_speed("other").compute_seconds(Work(5_100)) == pytest.approx(0.71, rel=0.05)


def test_what_a_leg_waited_for_others_is_not_its_own_time() -> None:
    clock = Clock()
    paths = Paths(Terms(), clock)
    for _ in range(20):
        first, second = paths.prefill_leg("p", Work(4_000)), paths.prefill_leg("p", Work(4_000))
        clock.now += 0.5
        first.first_token()
        clock.now += 0.5
        second.first_token()

    assert paths.prefill_speed("p").compute_seconds(Work(4_000)) == pytest.approx(0.5, rel=0.05)


def test_a_leg_turns_out_to_be_less_than_was_thought() -> None:
    clock = Clock()
    paths = Paths(Terms(), clock)
    for _ in range(20):
        leg = paths.prefill_leg("p", Work(8_000))
        clock.now += 0.3
        leg.first_token(Work(1_000, context=7_000))

    assert paths.prefill_speed("p").compute_seconds(Work(1_000, context=7_000)) == pytest.approx(0.3, rel=0.05)


def test_a_leg_that_failed_teaches_nothing_and_is_no_longer_waited_for() -> None:
    clock = Clock()
    paths = Paths(Terms(), clock)
    before = paths.prefill_speed("p")
    leg = paths.prefill_leg("p", Work(8_000))
    place = paths.place("p", "d", running=0, holds=True, can_serve_alone=True)
    clock.now += 60
    leg.close()
    leg.first_token()

    assert place.prefill_wait > 0
    assert paths.place("p", "d", running=0, holds=True, can_serve_alone=True).prefill_wait == 0
    assert paths.prefill_speed("p") == before


def test_decode_is_thought_to_compute_slowly_until_it_was_seen() -> None:
    clock = Clock()
    paths = Paths(Terms(caution=3.0), clock)
    work, like = Work(200, context=4_000), paths.prefill_speed("p")
    assert paths.decode_speed("d").compute_seconds(work, like, 3.0) == pytest.approx(3 * like.compute_seconds(work))

    for _ in range(10):
        leg = paths.decode_leg("d", work, like="p")
        clock.now += 0.25
        leg.first_token()

    assert paths.decode_speed("d").compute_seconds(work, like, 3.0) == pytest.approx(0.25, rel=0.05)


def test_a_local_leg_is_waited_for_at_decode() -> None:
    clock = Clock()
    paths = Paths(Terms(), clock)
    leg = paths.decode_leg("d", Work(200, context=4_000), like="p")

    assert paths.place("p", "d", running=1, holds=True, can_serve_alone=True).decode_wait > COMPUTE_PRIOR[0]
    leg.first_token()
    assert paths.place("p", "d", running=1, holds=True, can_serve_alone=True).decode_wait == 0


def test_the_pull_of_decode_legs_is_learned() -> None:
    clock = Clock()
    paths = Paths(Terms(), clock)
    for tokens in (100, 2_000, 8_000) * 10:
        leg = paths.decode_leg("d", Work(0, pulled=tokens), like="p")
        clock.now += 0.02 + tokens * 1e-5
        leg.first_token()

    assert paths.decode_speed("d").pull_seconds(Work(0, pulled=4_000)) == pytest.approx(0.06, rel=0.05)


def test_a_leg_that_is_not_watched_takes_being_told() -> None:
    leg = unwatched()
    leg.first_token()
    leg.close()


def test_characters_a_token_are_counted() -> None:
    paths = Paths(Terms(), Clock())
    for _ in range(100):
        paths.count(1_000, 500)
    paths.count(0, 5)

    assert paths.tokens_per_character == pytest.approx(0.5)
