"""Handles that wait for their release."""

from __future__ import annotations

import pytest

from kvloop_router.release import Pending, Releases
from tests.unit.router.kept_handles import Clock, kept


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outcomes() -> list[str]:
    return []


@pytest.fixture
def releases(clock: Clock, outcomes: list[str]) -> Releases:
    return Releases(clock, outcomes.append)


def anyone(_item: Pending) -> bool:
    return True


def name(item: Pending | None) -> str | None:
    return None if item is None else item.handle.request_id


def test_a_rider_pulls_nothing_and_is_given_once(releases: Releases) -> None:
    releases.add(kept("one", "a"))

    item = releases.rider("a", anyone)

    assert item is not None
    assert item.rider.num_tokens == 0
    assert item.rider.block_ids == ((0, 1, 2),)
    assert releases.rider("a", anyone) is None


def test_a_rider_goes_only_where_its_issuer_is_reached(releases: Releases) -> None:
    releases.add(kept("one", "a", decode="decode-0"))
    releases.add(kept("two", "b", decode="decode-1"))

    assert releases.rider("another revision", anyone) is None
    assert name(releases.rider("a", lambda item: item.decode == "decode-1")) == "two"


def test_after_a_short_while_it_goes_by_itself(releases: Releases, clock: Clock) -> None:
    releases.add(kept("one", "a"))

    assert releases.next_due() is None
    clock.now += 1
    assert name(releases.next_due()) == "one"
    assert len(releases) == 0


def test_what_has_expired_needs_no_release(releases: Releases, clock: Clock) -> None:
    releases.add(kept("late", "a", deadline=clock.now))
    releases.add(kept("one", "a", deadline=clock.now + 5))
    clock.now += 5

    assert releases.next_due() is None
    assert releases.rider("a", anyone) is None


def test_a_failed_release_is_tried_once_more_by_itself(releases: Releases, outcomes: list[str]) -> None:
    releases.add(kept("one", "a"))
    first = releases.rider("a", anyone)
    assert first is not None

    releases.failed(first)
    second = releases.next_due()
    assert name(second) == "one"
    assert second is not None
    releases.failed(second)

    assert releases.next_due() is None
    assert outcomes == ["lost"]


def test_a_handle_that_failed_once_does_not_ride_again(releases: Releases) -> None:
    releases.add(kept("one", "a"))
    first = releases.rider("a", anyone)
    assert first is not None

    releases.failed(first)

    assert releases.rider("a", anyone) is None


def test_a_process_that_is_gone_retains_nothing(releases: Releases, clock: Clock) -> None:
    releases.add(kept("one", "a", process="uid-0"))
    releases.add(kept("two", "a", process="uid-1"))

    releases.orphan("uid-0")
    clock.now += 1

    assert name(releases.next_due()) == "two"
    assert releases.next_due() is None


async def test_waiting_ends_when_a_handle_is_due(releases: Releases, clock: Clock, outcomes: list[str]) -> None:
    releases.add(kept("one", "a"))
    clock.now += 1

    await releases.wait()
    item = releases.next_due()

    assert item is not None
    releases.sent(item)
    assert outcomes == ["released"]
