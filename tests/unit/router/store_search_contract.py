"""Which handles every place for them finds for a turn, and which give way to a newer one."""

from __future__ import annotations

from typing import Any

from kvloop_router.history import trail
from kvloop_router.kept import SHORTLIST, STRANGERS, THREADS, Absence, GivenUp, HandleStore, Why
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


class StoreSearchContract:
    """Tests of a ``store`` on a ``clock``."""

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
