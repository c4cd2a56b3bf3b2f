"""Handles that wait for their release."""

from __future__ import annotations

import asyncio

import pytest

from kvloop_router.kept import Why
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
    releases.add(kept("one", "a"), Why.ENDED)

    item = releases.rider("a", anyone)

    assert item is not None
    assert item.rider.num_tokens == 0
    assert item.rider.block_ids == ((0, 1, 2),)
    assert releases.rider("a", anyone) is None


def test_a_rider_goes_only_where_its_issuer_is_reached(releases: Releases) -> None:
    releases.add(kept("one", "a", decode="decode-0"), Why.ENDED)
    releases.add(kept("two", "b", decode="decode-1"), Why.ENDED)

    assert releases.rider("another revision", anyone) is None
    assert name(releases.rider("a", lambda item: item.decode == "decode-1")) == "two"


def test_after_a_short_while_it_goes_by_itself(releases: Releases, clock: Clock) -> None:
    releases.add(kept("one", "a"), Why.ENDED)

    assert releases.next_due() is None
    clock.now += 1
    assert name(releases.next_due()) == "one"
    assert len(releases) == 0


def test_what_has_expired_needs_no_release(releases: Releases, clock: Clock) -> None:
    releases.add(kept("late", "a", deadline=clock.now), Why.ENDED)
    releases.add(kept("one", "a", deadline=clock.now + 5), Why.ENDED)
    clock.now += 5

    assert releases.next_due() is None
    assert releases.rider("a", anyone) is None


def test_a_failed_release_is_tried_once_more_by_itself(releases: Releases, outcomes: list[str]) -> None:
    releases.add(kept("one", "a"), Why.ENDED)
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
    releases.add(kept("one", "a"), Why.ENDED)
    first = releases.rider("a", anyone)
    assert first is not None

    releases.failed(first)

    assert releases.rider("a", anyone) is None


def test_a_process_that_is_gone_retains_nothing(releases: Releases, clock: Clock) -> None:
    releases.add(kept("one", "a", process="uid-0"), Why.ENDED)
    releases.add(kept("two", "a", process="uid-1"), Why.ENDED)

    releases.orphan("uid-0")
    clock.now += 1

    assert name(releases.next_due()) == "two"
    assert releases.next_due() is None


async def test_waiting_ends_when_a_handle_is_due(releases: Releases, clock: Clock, outcomes: list[str]) -> None:
    releases.add(kept("one", "a"), Why.ENDED)
    clock.now += 1

    await releases.wait(direct=False)
    item = releases.next_due()

    assert item is not None
    releases.sent(item)
    assert outcomes == ["released"]


class TestTold:
    """Issuers that can be told themselves."""

    @pytest.fixture
    def releases(self, clock: Clock, outcomes: list[str]) -> Releases:
        return Releases(clock, outcomes.append, direct=lambda decode, process: (decode, process) == ("told", "uid-0"))

    def test_they_are_told_at_once_and_nothing_rides(self, releases: Releases) -> None:
        releases.add(kept("one", "a", decode="told"), Why.ENDED)
        releases.add(kept("two", "b", decode="told", process="another"), Why.ENDED)
        releases.add(kept("three", "c", decode="told"), Why.ENDED)

        assert name(releases.rider("a", anyone)) == "two"
        assert [item.handle.request_id for item in releases.take_direct()] == ["one", "three"]
        assert len(releases) == 0

    def test_one_that_does_not_take_it_leaves_it_to_a_leg(
        self, releases: Releases, clock: Clock, outcomes: list[str]
    ) -> None:
        releases.add(kept("one", "a", decode="told"), Why.ENDED)
        (item,) = releases.take_direct()

        releases.failed(item)

        assert releases.take_direct() == ()
        assert releases.next_due() is None, "it may ride first"
        clock.now += 1
        assert name(releases.next_due()) == "one"
        assert outcomes == []

    def test_what_was_not_held_any_more_is_said_to_be(self, releases: Releases, outcomes: list[str]) -> None:
        releases.add(kept("one", "a", decode="told"), Why.ENDED)
        (item,) = releases.take_direct()

        releases.sent(item, held=False)

        assert outcomes == ["not_held"]

    def test_what_prefill_refused_is_told_or_left(self, releases: Releases) -> None:
        releases.add_refused(kept("one", "a", decode="told"))
        releases.add_refused(kept("two", "b", decode="not told"))

        assert [item.handle.request_id for item in releases.take_direct()] == ["one"]
        assert len(releases) == 0

    async def test_waiting_for_one_kind_is_not_ended_by_the_other(self, releases: Releases) -> None:
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            told = group.create_task(releases.wait(direct=True))
            others = group.create_task(releases.wait(direct=False))
            await asyncio.sleep(0)
            releases.add(kept("one", "a", decode="told"), Why.ENDED)
            await told
            assert not others.done()
            others.cancel()


def test_why_handles_were_given_up_is_told(clock: Clock) -> None:
    reasons: list[Why] = []
    releases = Releases(clock, given_up=reasons.append)

    releases.add(kept("one", "a"), Why.BUDGET)
    releases.add(kept("late", "a", deadline=clock.now), Why.ENDED)

    assert reasons == [Why.BUDGET]
