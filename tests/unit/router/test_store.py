"""Keeping handles in the router's own memory."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import settings

from kvloop_connector.digest import Retained
from kvloop_router.kept import GivenUp, Why
from kvloop_router.leases import Held, Pace
from kvloop_router.store import MemoryStore
from tests.unit.router.kept_handles import Clock, kept
from tests.unit.router.store_contract import StoreContract
from tests.unit.router.store_model import Bookkeeping, T


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(max_handles=10, clock=clock)


class TestMemoryStore(StoreContract):
    pass


class TestBytes:
    """Long conversations take more room than short ones, whatever their number."""

    LONG = Retained(digests=bytes(12_000), tokens=24_000, exact=b"")

    async def test_the_longest_idle_are_given_up(self, clock: Clock) -> None:
        store = MemoryStore(max_handles=1000, max_bytes=64_000, clock=clock)
        handles = [kept(f"{index}", f"question {index}", retained=self.LONG) for index in range(5)]
        for handle in handles[:4]:
            assert await store.put(handle) == ()
        await store.take(handles[0].ident)

        assert await store.put(handles[4]) == (GivenUp(handles[1], Why.FULL),)
        assert 4 * 12_000 < store.size <= 64_000

    async def test_one_that_fits_nowhere_is_not_kept_and_pushes_nobody_out(self, clock: Clock) -> None:
        store = MemoryStore(max_handles=1000, max_bytes=10_000, clock=clock)
        await store.put(kept("short", "a"))
        long = kept("long", "b", retained=self.LONG)

        assert await store.put(long) == (GivenUp(long, Why.FULL),)
        assert len(store) == 1

    async def test_nothing_is_counted_that_is_gone(self, store: MemoryStore, clock: Clock) -> None:
        handle = kept("one", "a")
        await store.put(handle)
        await store.renew(handle.renewed({**handle.params, "more": "x" * 100}, Held(0.0, 1900.0, 4000.0, Pace())))
        assert await store.withdraw(handle.ident)

        assert store.size == 0


async def test_an_emptied_store_gives_back_all_that_nobody_has_taken(store: MemoryStore) -> None:
    first, second = kept("1", "a"), kept("2", "b")
    await store.put(first)
    await store.put(second)
    await store.take(first.ident)

    assert await store.empty() == (second,)
    assert len(store) == 1


class InMemory(Bookkeeping):
    """Whatever happens, in memory."""

    def new_store(self) -> MemoryStore:
        return MemoryStore(max_handles=4, clock=self.clock, ended=self.ends.append)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Without an event loop: in memory nothing waits, which is what makes each step atomic."""
        try:
            work.send(None)
        except StopIteration as ended:
            result: T = ended.value
            return result
        raise AssertionError("the store waited")


TestBookkeeping = InMemory.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
