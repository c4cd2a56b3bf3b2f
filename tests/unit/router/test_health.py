"""What checks and legs show of an engine."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvloop_router.health import Health, Rules

RULES = Rules(check_failures=2, check_successes=2, leg_failures=3, suspect_seconds=10.0)


def healthy() -> Health:
    health = Health(RULES)
    health.vouched_for()
    return health


def test_a_new_engine_is_healthy_after_enough_checks_in_a_row() -> None:
    health = Health(RULES)
    health.check_succeeded()
    health.check_failed()
    health.check_succeeded()
    assert not health.healthy

    health.check_succeeded()
    assert health.healthy


def test_it_is_unhealthy_after_enough_failed_checks_in_a_row() -> None:
    health = healthy()
    for _ in range(5):
        health.check_failed()
        health.check_succeeded()
    assert health.healthy

    health.check_failed()
    health.check_failed()
    assert not health.healthy


def test_a_refused_connection_is_enough_and_its_way_back_is_as_long_as_a_new_ones() -> None:
    health = healthy()
    health.check_succeeded()
    health.refused()
    health.check_succeeded()
    assert not health.healthy

    health.check_succeeded()
    assert health.healthy


def test_legs_that_fail_in_a_row_make_it_suspect_for_a_time_that_doubles() -> None:
    health = healthy()
    for _ in range(3):
        assert not health.suspect(0.0)
        health.leg_failed(0.0)
    assert health.suspect(9.9)
    assert not health.suspect(10.0)

    health.leg_failed(10.0)
    assert health.suspect(29.9)
    assert not health.suspect(30.0)


def test_legs_that_fail_while_it_is_suspect_do_not_make_that_longer() -> None:
    health = healthy()
    for _ in range(50):
        health.leg_failed(0.0)

    assert not health.suspect(10.0)


def test_a_leg_that_succeeds_ends_it_all() -> None:
    health = healthy()
    for _ in range(3):
        health.leg_failed(0.0)
    health.leg_succeeded()
    assert not health.suspect(0.0)

    health.leg_failed(0.0)
    assert not health.suspect(0.0)


def test_one_that_drains_without_saying_so_is_suspect_at_once_and_stays_healthy() -> None:
    health = healthy()
    health.drains(5.0)

    assert health.suspect(5.0)
    assert health.healthy


@given(st.lists(st.sampled_from(["check_succeeded", "leg_failed", "leg_succeeded", "drains"]), max_size=60))
def test_no_leg_makes_it_unhealthy_and_none_is_suspect_for_ever(events: list[str]) -> None:
    health, now = healthy(), 0.0
    for event in events:
        now += 1.0
        if event in ("leg_failed", "drains"):
            getattr(health, event)(now)
        else:
            getattr(health, event)()

    assert health.healthy
    assert not health.suspect(now + 300.0)


@pytest.mark.parametrize("times", [1, 40])
def test_it_is_never_suspect_for_longer_than_five_minutes(times: int) -> None:
    health, now = healthy(), 0.0
    for _ in range(times):
        health.drains(now)
        now = health.suspect_until

    assert health.suspect_until - now <= 300.0
