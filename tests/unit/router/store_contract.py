"""What every place for handles does: each is used once, in time, and by its own conversation only."""

from __future__ import annotations

import asyncio

import pytest

from kvloop_router.kept import SHORTLIST, Absence, GivenUp, HandleStore, Kept, Retention, Why
from kvloop_router.leases import Held, Pace
from tests.unit.router.kept_handles import Clock, kept, next_turn, query
from tests.unit.router.store_search_contract import StoreSearchContract, absence, held, names


async def blocks(store: HandleStore, process: str) -> int:
    """How many blocks the process retains."""
    known = (await store.retained()).get(process)
    assert store.retained_blocks(process) == (known.blocks if known else 0)
    return store.retained_blocks(process)


class StoreContract(StoreSearchContract):
    """The tests; ``store``: for at most 10 handles, on ``clock``."""

    async def test_a_handle_is_granted_once(self, store: HandleStore) -> None:
        handle = kept("one", "hello")
        await store.put(handle)

        grants = await asyncio.gather(*(store.take(handle.ident) for _ in range(5)))

        assert [grant for grant in grants if grant is not None] == [1]
        assert await absence(store, "hello") is Absence.TAKEN

    async def test_a_spent_handle_is_gone(self, store: HandleStore) -> None:
        handle = kept("one", "hello")
        await store.put(handle)
        grant = await store.take(handle.ident)
        assert grant is not None

        await store.spend(handle.ident, grant)

        assert await held(store) == 0
        assert await absence(store, "hello") is Absence.TAKEN
        assert await store.take(handle.ident) is None

    async def test_a_handle_that_was_put_back_can_be_taken_until_its_old_deadline(
        self, store: HandleStore, clock: Clock
    ) -> None:
        handle = kept("one", "hello")
        await store.put(handle)
        first = await store.take(handle.ident)
        assert first is not None
        clock.now += 400
        await store.put_back(handle.ident, first)

        assert await names(store, "hello") == ["one"]
        second = await store.take(handle.ident)
        assert second is not None
        assert second != first
        await store.put_back(handle.ident, first)
        assert await store.take(handle.ident) is None, "a grant that is over puts nothing back"

        await store.put_back(handle.ident, second)
        clock.now += 50
        assert await absence(store, "hello") is Absence.EXPIRED

    async def test_a_handle_ends_at_its_deadline_even_while_taken(self, store: HandleStore, clock: Clock) -> None:
        handle = kept("one", "hello")
        await store.put(handle)
        await store.take(handle.ident)

        clock.now = handle.deadline

        assert await absence(store, "hello") is Absence.EXPIRED
        assert await held(store) == 0

    LATER = Held(1000.0, 1900.0, 4000.0, Pace())

    def renewed(self, handle: Kept) -> Kept:
        return handle.renewed({**handle.params, "remote_blocks_expiry_time": 99.5}, self.LATER)

    async def test_a_renewed_handle_is_there_after_its_first_deadline(self, store: HandleStore, clock: Clock) -> None:
        handle = kept("one", "hello")
        await store.put(handle)
        await store.put(kept("another", "other"))

        assert await store.renew(self.renewed(handle))

        clock.now = handle.deadline
        assert (await store.find(next_turn("hello"))).matches[0].kept.params["remote_blocks_expiry_time"] == 99.5
        assert await absence(store, "other") is Absence.EXPIRED
        assert await store.retained() == {"uid-0": Retention(1, 3, 1900.0)}
        clock.now = self.LATER.deadline
        assert await absence(store, "hello") is Absence.EXPIRED

    async def test_a_taken_handle_keeps_its_deadline(self, store: HandleStore, clock: Clock) -> None:
        handle = kept("one", "hello")
        await store.put(handle)
        grant = await store.take(handle.ident)
        assert grant is not None

        assert not await store.renew(self.renewed(handle))

        await store.put_back(handle.ident, grant)
        assert (await store.find(next_turn("hello"))).matches[0].kept == handle

    @pytest.mark.parametrize("end", ["spent", "released", "expired", "orphaned"])
    async def test_what_is_over_does_not_come_back(self, store: HandleStore, clock: Clock, end: str) -> None:
        handle = kept("one", "hello")
        await store.put(handle)
        if end == "spent":
            await store.spend(handle.ident, await store.take(handle.ident) or 0)
        elif end == "released":
            assert await store.withdraw(handle.ident)
        elif end == "expired":
            clock.now = handle.deadline
        else:
            await store.orphan(handle.process)

        assert not await store.renew(self.renewed(handle))
        assert await held(store) == 0
        assert await store.take(handle.ident) is None

    async def test_those_that_are_due_and_that_nobody_has_taken_are_told(self, store: HandleStore) -> None:
        soon, later, taken = kept("soon", "a", deadline=1100.0), kept("later", "b"), kept("taken", "c", deadline=1100.0)
        for each in (soon, later, taken):
            await store.put(each)
        await store.take(taken.ident)

        assert await store.due(1100.0) == (soon,)

    async def test_a_full_store_gives_up_the_oldest_that_nobody_reads(self, store: HandleStore, clock: Clock) -> None:
        handles = [kept(f"{index}", f"question {index}") for index in range(10)]
        for handle in handles:
            await store.put(handle)
        await store.take(handles[0].ident)

        assert await store.put(kept("new", "new")) == (GivenUp(handles[1], Why.FULL),)
        assert await held(store) == 10
        assert await absence(store, "question 1") is Absence.EVICTED

    async def test_a_handle_is_kept_once(self, store: HandleStore) -> None:
        handle = kept("one", "a")
        await store.put(handle)
        grant = await store.take(handle.ident)

        assert await store.put(handle) == ()

        assert grant is not None
        assert await store.take(handle.ident) is None
        await store.spend(handle.ident, grant)
        assert (await held(store), await blocks(store, "uid-0")) == (0, 0)

    async def test_an_engine_retains_no_more_blocks_than_it_may(self, store: HandleStore) -> None:
        first, second = kept("1", "a", blocks=(((0, 3),),)), kept("2", "b", blocks=(((3, 3),),))
        elsewhere = kept("3", "c", process="uid-1")
        for handle in (first, second, elsewhere):
            assert await store.put(handle, max_blocks=6) == ()

        third = kept("4", "d", blocks=(((6, 1), (8, 2)),))
        assert await store.put(third, max_blocks=6) == (GivenUp(first, Why.BUDGET),)
        await store.take(second.ident)
        assert await store.put(kept("5", "e", blocks=(((20, 3),),)), max_blocks=6) == (GivenUp(third, Why.BUDGET),)
        assert await names(store, "c") == ["3"]
        assert await blocks(store, "uid-0") == 6

    async def test_a_renewal_does_not_make_a_conversation_less_idle(self, store: HandleStore) -> None:
        first, second = kept("1", "a", blocks=(((0, 3),),)), kept("2", "b", blocks=(((3, 3),),))
        for handle in (first, second):
            await store.put(handle)
        renewed = first.renewed(first.params, Held(0.0, 2000.0, 4000.0, Pace()))
        await store.renew(renewed)

        given_up = await store.put(kept("3", "c", blocks=(((6, 3),),)), max_blocks=6)

        assert given_up == (GivenUp(renewed, Why.BUDGET),)

    async def test_blocks_that_handles_share_count_once(self, store: HandleStore) -> None:
        for number in range(4):
            handle = kept(f"{number}", f"{number}", blocks=(((0, 50), (100 + number, 1)),))
            assert await store.put(handle, max_blocks=54) == ()

        assert await blocks(store, "uid-0") == 54
        await store.withdraw("engine/0")
        assert await blocks(store, "uid-0") == 53

    async def test_what_one_process_retains_can_be_given_up_but_for_what_is_taken(self, store: HandleStore) -> None:
        first, second, other = kept("1", "a"), kept("2", "b"), kept("3", "c", process="uid-1")
        for each in (first, second, other):
            await store.put(each)
        await store.take(first.ident)

        assert await store.give_up("uid-0") == (second,)
        assert await store.give_up("uid-2") == ()
        assert await held(store) == 2

    async def test_handles_of_a_process_that_is_gone_are_dropped(self, store: HandleStore) -> None:
        await store.put(kept("one", "a"))
        taken = kept("two", "b")
        await store.put(taken)
        await store.take(taken.ident)
        await store.put(kept("three", "c", process="uid-1"))

        assert await store.orphan("uid-0") == 2
        assert await absence(store, "a") is Absence.ENGINE_GONE
        assert await absence(store, "b") is Absence.ENGINE_GONE
        assert await names(store, "c") == ["three"]

    async def test_a_turn_without_a_handle_is_remembered(self, store: HandleStore) -> None:
        await store.note_absent(query("a"), Absence.NO_HANDLE)

        assert await absence(store, "a") is Absence.NO_HANDLE
        await store.put(kept("one", "a"))
        await store.take("engine/one")
        assert await absence(store, "a") is Absence.TAKEN

    async def test_ending_a_conversation_gives_its_handles_back(self, store: HandleStore) -> None:
        mine = kept("one", "a", conversation="c")
        await store.put(mine)
        await store.put(kept("two", "b", conversation="d"))

        assert await store.end(b"another scope", "c") == ()
        assert await store.end(mine.tenant_scope, "c") == (mine,)
        assert await held(store) == 1

    async def test_a_search_gives_a_short_list(self, store: HandleStore) -> None:
        for index in range(2 * SHORTLIST):
            await store.put(kept(f"{index}", "a"))

        assert len(await names(store, "a")) == SHORTLIST

    async def test_what_is_retained_is_counted_by_process(self, store: HandleStore, clock: Clock) -> None:
        await store.put(kept("one", "a"))
        clock.now += 10
        await store.put(kept("two", "b", deadline=1460.0))
        await store.put(kept("three", "c", deadline=1460.0, process="uid-1"))

        assert await store.retained() == {"uid-0": Retention(2, 3, 1460.0), "uid-1": Retention(1, 3, 1460.0)}

    async def test_a_kept_handle_is_the_engines_own(self, store: HandleStore) -> None:
        handle = kept("one", "a", blocks=(((4, 2), (9, 1)),)).handle

        assert handle.block_ids == ((4, 5, 9),)
        assert handle.num_tokens == 40
