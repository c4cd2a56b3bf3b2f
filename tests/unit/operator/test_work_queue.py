"""The work queue: one worker a key, wishes that fall together, and longer and longer waits after failures."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvloop_operator.work_queue import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, WorkQueue


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def queue(clock: _Clock) -> WorkQueue[str]:
    return WorkQueue(clock, Random(1))


async def test_wishes_for_a_waiting_key_fall_together(queue: WorkQueue[str]) -> None:
    for _ in range(3):
        queue.add("a")
    assert await queue.take() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_a_wish_during_the_work_gives_one_more_pass_after_it(queue: WorkQueue[str]) -> None:
    queue.add("a")
    await queue.take()
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0
    queue.done("a")
    assert await queue.take() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_the_earliest_of_several_wishes_counts(queue: WorkQueue[str], clock: _Clock) -> None:
    queue.add("a", after=10)
    queue.add("a", after=2)
    queue.add("a", after=30)
    clock.now = 2
    assert await queue.take() == "a"
    queue.done("a")
    clock.now = 100
    assert len(queue) == 0


async def test_a_worker_that_waits_takes_a_key_as_soon_as_it_is_asked_for(queue: WorkQueue[str]) -> None:
    async with asyncio.TaskGroup() as group:
        taken = group.create_task(queue.take())
        await asyncio.sleep(0)
        queue.add("a")
    assert taken.result() == "a"


async def test_who_has_been_due_longest_is_first(queue: WorkQueue[str], clock: _Clock) -> None:
    queue.add("late", after=2)
    queue.add("early", after=1)
    clock.now = 5
    assert queue.lag() == 4
    assert [await queue.take(), await queue.take()] == ["early", "late"]


async def test_waits_after_failures_double_up_to_a_bound_and_start_anew_after_a_success(
    queue: WorkQueue[str], clock: _Clock
) -> None:
    queue.add("a")
    waits = []
    for _ in range(14):
        await queue.take()
        waits.append(queue.failed("a"))
        clock.now += waits[-1]
    bounds = [min(FIRST_RETRY_SECONDS * 2**count, LAST_RETRY_SECONDS) for count in range(14)]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    await queue.take()
    queue.done("a", again_after=0)
    await queue.take()
    assert queue.failed("a") <= FIRST_RETRY_SECONDS


async def test_a_failure_waits_as_long_as_the_server_asked_whatever_was_wished_meanwhile(
    queue: WorkQueue[str], clock: _Clock
) -> None:
    queue.add("a")
    await queue.take()
    queue.add("a")
    assert queue.failed("a", retry_after=50) == 50
    clock.now = 49
    assert len(queue) == 0
    clock.now = 50
    assert await queue.take() == "a"


async def test_a_key_that_is_gone_is_forgotten_unless_it_was_asked_for_meanwhile(queue: WorkQueue[str]) -> None:
    queue.add("a")
    await queue.take()
    queue.forget("a")
    assert len(queue) == 0
    queue.add("a")
    await queue.take()
    queue.add("a")
    queue.forget("a")
    assert await queue.take() == "a"


class _Machine(RuleBasedStateMachine):
    """Against a model: for each key whether it is worked on, and when it is due at the latest."""

    @initialize()
    def start(self) -> None:
        self.clock = _Clock()
        self.queue: WorkQueue[int] = WorkQueue(self.clock, Random(7))
        self.working: set[int] = set()
        self.wishes: dict[int, float] = {}

    @rule(key=st.integers(0, 3), after=st.sampled_from([0.0, 1.0, 5.0]))
    def add(self, key: int, after: float) -> None:
        self.queue.add(key, after=after)
        due = self.clock.now + after
        self.wishes[key] = min(due, self.wishes.get(key, due))

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def take(self) -> None:
        if len(self.queue):
            key = asyncio.run(self.queue.take())
            assert key not in self.working
            assert self.wishes.pop(key) <= self.clock.now
            self.working.add(key)

    @rule(data=st.data(), again=st.sampled_from([None, 0.0, 3.0]))
    def done(self, data: st.DataObject, again: float | None) -> None:
        if self.working:
            key = data.draw(st.sampled_from(sorted(self.working)))
            self.queue.done(key, again_after=again)
            self.working.discard(key)
            if again is not None:
                due = self.clock.now + again
                self.wishes[key] = min(due, self.wishes.get(key, due))

    @invariant()
    def what_is_due_and_not_worked_on_can_be_taken(self) -> None:
        due = [key for key, at in self.wishes.items() if at <= self.clock.now and key not in self.working]
        assert len(self.queue) == len(due)


TestAgainstAModel = _Machine.TestCase


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_no_wish_is_lost(keys: list[int]) -> None:
    async def taken() -> set[int]:
        queue: WorkQueue[int] = WorkQueue(lambda: 0.0, Random(1))
        for key in keys:
            queue.add(key)
        found = set()
        while len(queue):
            key = await queue.take()
            found.add(key)
            queue.done(key)
        return found

    assert asyncio.run(taken()) == set(keys)
