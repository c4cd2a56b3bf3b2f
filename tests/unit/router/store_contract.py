"""What every place for handles does: each is used once, in time, and by its own conversation only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvloop_router.history import trail
from kvloop_router.kept import SHORTLIST, STRANGERS, THREADS, Absence, GivenUp, HandleStore, Kept, Retention, Why
from kvloop_router.leases import Held, Pace
from kvloop_router.request import Api, Request
from tests.unit.router.kept_handles import KEY, Clock, kept, next_turn, query


async def names(store: HandleStore, *contents: str, **facts: Any) -> list[str]:
    found = await store.find(next_turn(*contents, **facts))
    return [match.kept.params["remote_request_id"] for match in found.matches]


async def absence(store: HandleStore, *contents: str, **facts: Any) -> Absence:
    found = await store.find(next_turn(*contents, **facts))
    assert found.matches == ()
    return found.absence


async def held(store: HandleStore) -> int:
    """How many handles there are."""
    count = sum(each.handles for each in (await store.retained()).values())
    assert len(store) == count
    return count


async def blocks(store: HandleStore, process: str) -> int:
    """How many blocks the process retains."""
    known = (await store.retained()).get(process)
    assert store.retained_blocks(process) == (known.blocks if known else 0)
    return store.retained_blocks(process)


class StoreContract:
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

    async def test_the_longest_history_comes_first_and_of_equal_ones_the_newest(self, store: HandleStore) -> None:
        await store.put(kept("short", "a"))
        await store.put(kept("longer", "a", "b", "c", "d", "e"))
        await store.put(kept("long", "a", "b", "c"))
        await store.put(kept("same", "a", "b", "c"))

        assert await names(store, "a", "b", "c") == ["same", "long", "short", "longer"]

    async def test_an_edited_history_finds_its_handle_uncertainly(self, store: HandleStore) -> None:
        await store.put(kept("one", "a", "b", "c"))

        found = await store.find(query("a", "b", "C"))

        assert [(match.kept.ident, match.certain) for match in found.matches] == [("engine/one", False)]

    async def test_a_shared_system_prompt_finds_nothing(self, store: HandleStore) -> None:
        await store.put(kept("one", "a"))

        assert await absence(store, "another question") is Absence.MISS

    async def test_no_scope_finds_anothers_handles(self, store: HandleStore) -> None:
        await store.put(kept("one", "a", conversation="c"))

        assert await absence(store, "a", conversation="c", scope=b"another") is Absence.MISS

    async def test_a_conversation_id_selects_whatever_the_history_is(self, store: HandleStore) -> None:
        await store.put(kept("mine", "a", conversation="c"))

        assert await names(store, "quite", "another", "history", conversation="c") == ["mine"]

    async def test_a_history_is_known_under_a_wrong_id_but_not_for_certain(self, store: HandleStore) -> None:
        await store.put(kept("one", "a", conversation="c"))

        found = await store.find(next_turn("a", conversation="d"))

        assert [(match.kept.ident, match.certain) for match in found.matches] == [("engine/one", False)]
        assert await absence(store, "other", conversation="d") is Absence.MISS
        assert (await store.find(query("b", "B", conversation="d"))).matches == ()

    async def test_a_fork_under_another_id_finds_what_it_shares_nearly_all_of(self, store: HandleStore) -> None:
        await store.put(kept("one", "a", "b", "c", "d", "e", conversation="c"))

        found = await store.find(query("a", "b", "c", "d", "E", conversation="d"))

        assert [(match.kept.ident, match.certain) for match in found.matches] == [("engine/one", False)]
        assert (await store.find(query("a", "b", "C", conversation="d"))).matches == ()

    async def test_a_history_goes_before_an_id(self, store: HandleStore) -> None:
        await store.put(kept("named", "b", conversation="d"))
        await store.put(kept("one", "a", conversation="c"))

        assert await names(store, "a", conversation="d") == ["one", "named"]

    async def test_conversations_with_other_ids_do_not_fill_a_search(self, store: HandleStore) -> None:
        await store.put(kept("mine", "b", conversation="mine"))
        for number in range(SHORTLIST):
            await store.put(kept(f"of-{number}", "a", conversation=f"c-{number}"))

        found = await names(store, "a", conversation="mine")

        assert found == [*(f"of-{SHORTLIST - 1 - number}" for number in range(STRANGERS)), "mine"]

    async def test_a_first_question_that_is_asked_again_finds_its_handle_uncertainly(self, store: HandleStore) -> None:
        await store.put(kept("one", "a"))
        await store.put(kept("another", "b", conversation="c"))

        for again, certain in ((query("a"), False), (query("b", conversation="c"), True)):
            found = await store.find(again)
            assert [match.certain for match in found.matches] == [certain]

    async def test_an_answer_that_is_made_anew_finds_its_handle_for_certain(self, store: HandleStore) -> None:
        await store.put(kept("one", "a", "b", "c"))

        assert [match.certain for match in (await store.find(query("a", "b", "c"))).matches] == [True]

    async def test_another_conversations_equal_beginning_is_no_reason_to_take_its_handle(
        self, store: HandleStore
    ) -> None:
        await store.put(kept("one", "a", "b", "c"))

        assert (await store.find(query("a"))).matches == ()

    async def test_threads_that_share_an_id_keep_their_handles_but_not_any_number(self, store: HandleStore) -> None:
        threads = [kept(f"of-{number}", f"question {number}", conversation="c") for number in range(THREADS + 1)]

        given_up = [await store.put(each) for each in threads]

        assert given_up == [*([()] * THREADS), (GivenUp(threads[0], Why.SUPERSEDED),)]

    async def test_threads_whose_time_is_over_do_not_count(self, store: HandleStore, clock: Clock) -> None:
        for number in range(THREADS):
            await store.put(kept(f"of-{number}", f"question {number}", conversation="c", deadline=1001.0 + number))
        clock.now = 1001.5

        assert await store.put(kept("new", "new", conversation="c")) == ()

    async def test_an_edit_under_an_id_leaves_the_handle_of_what_was_there_before(self, store: HandleStore) -> None:
        await store.put(kept("old", "a", "b", "c", conversation="c"))

        assert await store.put(kept("edited", "a", "b", "C", conversation="c")) == ()
        assert await names(store, "a", "b", "c", conversation="c") == ["old", "edited"]

    async def test_an_answer_made_anew_under_an_id_supersedes_the_first_one(self, store: HandleStore) -> None:
        old = kept("old", "a", conversation="c")
        await store.put(old)

        assert await store.put(kept("new", "a", conversation="c")) == (GivenUp(old, Why.SUPERSEDED),)

    async def test_a_new_handle_of_a_conversation_id_supersedes_the_old_one(self, store: HandleStore) -> None:
        old = kept("old", "a", conversation="c")
        await store.put(old)

        assert await store.put(kept("new", "a", "b", "c", conversation="c")) == (GivenUp(old, Why.SUPERSEDED),)
        assert await names(store, "a", "b", "c", conversation="c") == ["new"]

    async def test_a_taken_handle_is_superseded_only_once_it_comes_back_unread(self, store: HandleStore) -> None:
        old = kept("old", "a", conversation="c")
        await store.put(old)
        grant = await store.take(old.ident)
        assert grant is not None

        assert await store.put(kept("new", "a", "b", "c", conversation="c")) == ()
        assert not await store.withdraw(old.ident)
        assert await store.put_back(old.ident, grant) == old
        assert await names(store, "a", "b", "c", conversation="c") == ["new"]

    async def test_a_taken_handle_of_a_conversation_that_ends_stays_with_its_reader(self, store: HandleStore) -> None:
        read, unread = kept("read", "a", conversation="c"), kept("unread", "b", conversation="d")
        grants = []
        for each in (read, unread):
            await store.put(each)
            grants.append(await store.take(each.ident))
        assert None not in grants

        assert await store.end(read.tenant_scope, "c") == await store.end(unread.tenant_scope, "d") == ()
        await store.spend(read.ident, grants[0] or 0)
        assert await store.put_back(unread.ident, grants[1] or 0) == unread
        assert await held(store) == 0

    async def test_the_newer_handle_supersedes(self, store: HandleStore) -> None:
        old, other = kept("old", "a", "b", "c"), kept("other", "a", "b", "C")
        await store.put(old)
        await store.put(other)

        assert await store.put(kept("new", "a", "b", "c", "d", "e")) == (GivenUp(old, Why.SUPERSEDED),)
        assert await held(store) == 2

    async def test_equal_questions_are_not_yet_one_conversation(self, store: HandleStore) -> None:
        await store.put(kept("mine", "a"))

        assert await store.put(kept("theirs", "a", "b", "c")) == ()

    async def test_another_id_is_another_conversation(self, store: HandleStore) -> None:
        await store.put(kept("mine", "a", "b", "c", conversation="mine"))

        assert await store.put(kept("theirs", "a", "b", "c", "d", "e", conversation="theirs")) == ()

    async def test_a_completions_prompt_that_grows_is_no_conversation(self, store: HandleStore) -> None:
        prompts = ["few shots " * 80, "few shots " * 80 + "and a question " * 80]
        trails = [trail(KEY, Request(Api.COMPLETIONS, {"prompt": prompt}, "tiny", None, False)) for prompt in prompts]
        await store.put(kept("first", trail=trails[0]))

        assert await store.put(kept("second", trail=trails[1])) == ()

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
