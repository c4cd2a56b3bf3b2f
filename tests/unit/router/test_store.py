"""Keeping handles: each is used once, in time, and by its own conversation only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloop_connector.lifecycle import State
from kvloop_router.history import trail
from kvloop_router.kept import Absence, GivenUp, Kept, Why
from kvloop_router.leases import Held, Pace
from kvloop_router.request import Api, Request
from kvloop_router.store import SHORTLIST, THREADS, MemoryStore
from tests.unit.router.kept_handles import KEY, Clock, kept, next_turn, query


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(max_handles=10, clock=clock)


async def names(store: MemoryStore, *contents: str, **facts: Any) -> list[str]:
    found = await store.find(next_turn(*contents, **facts))
    return [match.kept.params["remote_request_id"] for match in found.matches]


async def absence(store: MemoryStore, *contents: str, **facts: Any) -> Absence:
    found = await store.find(next_turn(*contents, **facts))
    assert found.matches == ()
    return found.absence


async def test_a_handle_is_granted_once(store: MemoryStore) -> None:
    handle = kept("one", "hello")
    await store.put(handle)

    grants = await asyncio.gather(*(store.take(handle.ident) for _ in range(5)))

    assert [grant for grant in grants if grant is not None] == [1]
    assert await absence(store, "hello") is Absence.TAKEN


async def test_a_spent_handle_is_gone(store: MemoryStore) -> None:
    handle = kept("one", "hello")
    await store.put(handle)
    grant = await store.take(handle.ident)
    assert grant is not None

    await store.spend(handle.ident, grant)

    assert len(store) == 0
    assert await absence(store, "hello") is Absence.TAKEN
    assert await store.take(handle.ident) is None


async def test_a_handle_that_was_put_back_can_be_taken_until_its_old_deadline(store: MemoryStore, clock: Clock) -> None:
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


async def test_a_handle_ends_at_its_deadline_even_while_taken(store: MemoryStore, clock: Clock) -> None:
    handle = kept("one", "hello")
    await store.put(handle)
    await store.take(handle.ident)

    clock.now = handle.deadline

    assert await absence(store, "hello") is Absence.EXPIRED
    assert len(store) == 0


async def test_the_longest_history_comes_first_and_of_equal_ones_the_newest(store: MemoryStore) -> None:
    await store.put(kept("short", "a"))
    await store.put(kept("longer", "a", "b", "c", "d", "e"))
    await store.put(kept("long", "a", "b", "c"))
    await store.put(kept("same", "a", "b", "c"))

    assert await names(store, "a", "b", "c") == ["same", "long", "short", "longer"]


async def test_an_edited_history_finds_its_handle_uncertainly(store: MemoryStore) -> None:
    await store.put(kept("one", "a", "b", "c"))

    found = await store.find(query("a", "b", "C"))

    assert [(match.kept.ident, match.certain) for match in found.matches] == [("engine/one", False)]


async def test_a_shared_system_prompt_finds_nothing(store: MemoryStore) -> None:
    await store.put(kept("one", "a"))

    assert await absence(store, "another question") is Absence.MISS


async def test_no_scope_finds_anothers_handles(store: MemoryStore) -> None:
    await store.put(kept("one", "a", conversation="c"))

    assert await absence(store, "a", conversation="c", scope=b"another") is Absence.MISS


async def test_a_conversation_id_selects_whatever_the_history_is(store: MemoryStore) -> None:
    await store.put(kept("mine", "a", conversation="c"))

    assert await names(store, "quite", "another", "history", conversation="c") == ["mine"]


async def test_a_history_is_known_under_a_wrong_id_but_not_for_certain(store: MemoryStore) -> None:
    await store.put(kept("one", "a", conversation="c"))

    found = await store.find(next_turn("a", conversation="d"))

    assert [(match.kept.params["remote_request_id"], match.certain) for match in found.matches] == [("one", False)]
    assert await names(store, "other", conversation="d") == []


async def test_a_history_goes_before_an_id(store: MemoryStore) -> None:
    await store.put(kept("named", "b", conversation="d"))
    await store.put(kept("one", "a", conversation="c"))

    assert await names(store, "a", conversation="d") == ["one", "named"]


async def test_threads_that_share_an_id_keep_their_handles_but_not_any_number(store: MemoryStore) -> None:
    threads = [kept(f"of-{number}", f"question {number}", conversation="c") for number in range(THREADS + 1)]

    given_up = [await store.put(each) for each in threads]

    assert given_up == [*([()] * THREADS), (GivenUp(threads[0], Why.SUPERSEDED),)]


async def test_conversations_with_other_ids_do_not_fill_a_search(store: MemoryStore) -> None:
    await store.put(kept("mine", "b", conversation="mine"))
    for number in range(SHORTLIST):
        await store.put(kept(f"of-{number}", "a", conversation=f"c-{number}"))

    assert await names(store, "a", conversation="mine") == ["of-3", "of-2", "mine"]


async def test_a_new_handle_of_a_conversation_id_supersedes_the_old_one(store: MemoryStore) -> None:
    old = kept("old", "a", conversation="c")
    await store.put(old)

    assert await store.put(kept("new", "a", "b", "c", conversation="c")) == (GivenUp(old, Why.SUPERSEDED),)
    assert await names(store, "a", "b", "c", conversation="c") == ["new"]


async def test_a_taken_handle_is_superseded_only_once_it_comes_back_unread(store: MemoryStore) -> None:
    old = kept("old", "a", conversation="c")
    await store.put(old)
    grant = await store.take(old.ident)
    assert grant is not None

    assert await store.put(kept("new", "a", "b", "c", conversation="c")) == ()
    assert not await store.withdraw(old.ident)
    assert await store.put_back(old.ident, grant) == old
    assert await names(store, "a", "b", "c", conversation="c") == ["new"]


async def test_a_taken_handle_of_a_conversation_that_ends_stays_with_its_reader(store: MemoryStore) -> None:
    read, unread = kept("read", "a", conversation="c"), kept("unread", "b", conversation="d")
    grants = []
    for each in (read, unread):
        await store.put(each)
        grants.append(await store.take(each.ident))
    assert None not in grants

    assert await store.end(read.tenant_scope, "c") == await store.end(unread.tenant_scope, "d") == ()
    await store.spend(read.ident, grants[0] or 0)
    assert await store.put_back(unread.ident, grants[1] or 0) == unread
    assert len(store) == 0


class TestGoingOn:
    """Without an id, a conversation goes on where its history, an answer included, is all in a newer one."""

    async def test_the_newer_handle_supersedes(self, store: MemoryStore) -> None:
        old, other = kept("old", "a", "b", "c"), kept("other", "a", "b", "C")
        await store.put(old)
        await store.put(other)

        assert await store.put(kept("new", "a", "b", "c", "d", "e")) == (GivenUp(old, Why.SUPERSEDED),)
        assert len(store) == 2

    async def test_equal_questions_are_not_yet_one_conversation(self, store: MemoryStore) -> None:
        await store.put(kept("mine", "a"))

        assert await store.put(kept("theirs", "a", "b", "c")) == ()

    async def test_another_id_is_another_conversation(self, store: MemoryStore) -> None:
        await store.put(kept("mine", "a", "b", "c", conversation="mine"))

        assert await store.put(kept("theirs", "a", "b", "c", "d", "e", conversation="theirs")) == ()

    async def test_a_completions_prompt_that_grows_is_no_conversation(self, store: MemoryStore) -> None:
        prompts = ["few shots " * 80, "few shots " * 80 + "and a question " * 80]
        trails = [trail(KEY, Request(Api.COMPLETIONS, {"prompt": prompt}, "tiny", None, False)) for prompt in prompts]
        await store.put(kept("first", trail=trails[0]))

        assert await store.put(kept("second", trail=trails[1])) == ()


class TestRenewal:
    LATER = Held(1000.0, 1900.0, 4000.0, Pace())

    def renewed(self, handle: Kept) -> Kept:
        return handle.renewed({**handle.params, "remote_blocks_expiry_time": 99.5}, self.LATER)

    async def test_a_renewed_handle_is_there_after_its_first_deadline(self, store: MemoryStore, clock: Clock) -> None:
        handle = kept("one", "hello")
        await store.put(handle)
        await store.put(kept("another", "other"))

        assert await store.renew(self.renewed(handle))

        clock.now = handle.deadline
        assert (await store.find(next_turn("hello"))).matches[0].kept.params["remote_blocks_expiry_time"] == 99.5
        assert await absence(store, "other") is Absence.EXPIRED
        assert store.retained() == {"uid-0": (1, 1900.0)}
        clock.now = self.LATER.deadline
        assert await absence(store, "hello") is Absence.EXPIRED

    async def test_a_taken_handle_keeps_its_deadline(self, store: MemoryStore, clock: Clock) -> None:
        handle = kept("one", "hello")
        await store.put(handle)
        grant = await store.take(handle.ident)
        assert grant is not None

        assert not await store.renew(self.renewed(handle))

        await store.put_back(handle.ident, grant)
        assert (await store.find(next_turn("hello"))).matches[0].kept == handle

    @pytest.mark.parametrize("end", ["spent", "released", "expired", "orphaned"])
    async def test_what_is_over_does_not_come_back(self, store: MemoryStore, clock: Clock, end: str) -> None:
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
        assert len(store) == 0
        assert await store.take(handle.ident) is None

    async def test_those_that_are_due_and_that_nobody_has_taken_are_told(self, store: MemoryStore) -> None:
        soon, later, taken = kept("soon", "a", deadline=1100.0), kept("later", "b"), kept("taken", "c", deadline=1100.0)
        for each in (soon, later, taken):
            await store.put(each)
        await store.take(taken.ident)

        assert await store.due(1100.0) == (soon,)


async def test_a_full_store_gives_up_the_oldest_that_nobody_reads(store: MemoryStore, clock: Clock) -> None:
    handles = [kept(f"{index}", f"question {index}") for index in range(10)]
    for handle in handles:
        await store.put(handle)
    await store.take(handles[0].ident)

    assert await store.put(kept("new", "new")) == (GivenUp(handles[1], Why.FULL),)
    assert len(store) == 10
    assert await absence(store, "question 1") is Absence.EVICTED


async def test_an_engine_retains_no_more_blocks_than_it_may(store: MemoryStore) -> None:
    first, second = kept("1", "a", blocks=(((0, 3),),)), kept("2", "b", blocks=(((3, 3),),))
    elsewhere = kept("3", "c", process="uid-1")
    for handle in (first, second, elsewhere):
        assert await store.put(handle, max_blocks=6) == ()

    third = kept("4", "d", blocks=(((6, 1), (8, 2)),))
    assert await store.put(third, max_blocks=6) == (GivenUp(first, Why.BUDGET),)
    await store.take(second.ident)
    assert await store.put(kept("5", "e", blocks=(((20, 3),),)), max_blocks=6) == (GivenUp(third, Why.BUDGET),)
    assert await names(store, "c") == ["3"]
    assert store.retained_blocks("uid-0") == 6


async def test_a_renewal_does_not_make_a_conversation_less_idle(store: MemoryStore) -> None:
    first, second = kept("1", "a", blocks=(((0, 3),),)), kept("2", "b", blocks=(((3, 3),),))
    for handle in (first, second):
        await store.put(handle)
    renewed = first.renewed(first.params, Held(0.0, 2000.0, 4000.0, Pace()))
    await store.renew(renewed)

    given_up = await store.put(kept("3", "c", blocks=(((6, 3),),)), max_blocks=6)

    assert given_up == (GivenUp(renewed, Why.BUDGET),)


async def test_blocks_that_handles_share_count_once(store: MemoryStore) -> None:
    for number in range(4):
        handle = kept(f"{number}", f"{number}", blocks=(((0, 50), (100 + number, 1)),))
        assert await store.put(handle, max_blocks=54) == ()

    assert store.retained_blocks("uid-0") == 54
    await store.withdraw("engine/0")
    assert store.retained_blocks("uid-0") == 53


async def test_an_emptied_store_gives_back_all_that_nobody_has_taken(store: MemoryStore) -> None:
    first, second = kept("1", "a"), kept("2", "b")
    await store.put(first)
    await store.put(second)
    await store.take(first.ident)

    assert await store.empty() == (second,)
    assert len(store) == 1


async def test_what_one_process_retains_can_be_given_up_but_for_what_is_taken(store: MemoryStore) -> None:
    first, second, other = kept("1", "a"), kept("2", "b"), kept("3", "c", process="uid-1")
    for each in (first, second, other):
        await store.put(each)
    await store.take(first.ident)

    assert await store.give_up("uid-0") == (second,)
    assert await store.give_up("uid-2") == ()
    assert len(store) == 2


async def test_handles_of_a_process_that_is_gone_are_dropped(store: MemoryStore) -> None:
    await store.put(kept("one", "a"))
    taken = kept("two", "b")
    await store.put(taken)
    await store.take(taken.ident)
    await store.put(kept("three", "c", process="uid-1"))

    assert await store.orphan("uid-0") == 2
    assert await absence(store, "a") is Absence.ENGINE_GONE
    assert await absence(store, "b") is Absence.ENGINE_GONE
    assert await names(store, "c") == ["three"]


async def test_a_turn_without_a_handle_is_remembered(store: MemoryStore) -> None:
    await store.note_absent(query("a"), Absence.NO_HANDLE)

    assert await absence(store, "a") is Absence.NO_HANDLE
    await store.put(kept("one", "a"))
    await store.take("engine/one")
    assert await absence(store, "a") is Absence.TAKEN


async def test_ending_a_conversation_gives_its_handles_back(store: MemoryStore) -> None:
    mine = kept("one", "a", conversation="c")
    await store.put(mine)
    await store.put(kept("two", "b", conversation="d"))

    assert await store.end(b"another scope", "c") == ()
    assert await store.end(mine.tenant_scope, "c") == (mine,)
    assert len(store) == 1


async def test_a_search_gives_a_short_list(store: MemoryStore) -> None:
    for index in range(2 * SHORTLIST):
        await store.put(kept(f"{index}", "a"))

    assert len(await names(store, "a")) == SHORTLIST


async def test_what_is_retained_is_counted_by_process(store: MemoryStore, clock: Clock) -> None:
    await store.put(kept("one", "a"))
    clock.now += 10
    await store.put(kept("two", "b", deadline=1460.0))
    await store.put(kept("three", "c", deadline=1460.0, process="uid-1"))

    assert store.retained() == {"uid-0": (2, 1460.0), "uid-1": (1, 1460.0)}


async def test_a_kept_handle_is_the_engines_own(store: MemoryStore) -> None:
    handle = kept("one", "a", blocks=(((4, 2), (9, 1)),)).handle

    assert handle.block_ids == ((4, 5, 9),)
    assert handle.num_tokens == 40


class Bookkeeping(RuleBasedStateMachine):
    """Whatever happens in whatever order: single use, no use after the end, bounds, and no index entry left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ends: list[State] = []
        self.store = MemoryStore(max_handles=4, clock=self.clock, ended=self.ends.append)
        self.granted: dict[str, tuple[Kept, int]] = {}
        self.over: set[str] = set()
        self.made: dict[str, Kept] = {}
        self.revoked: set[str] = set()

    def run(self, work: Any) -> Any:
        """Without an event loop: in memory nothing waits, which is what makes each step atomic."""
        try:
            work.send(None)
        except StopIteration as ended:
            return ended.value
        raise AssertionError("the store waited")

    @rule(content=st.sampled_from("ab"), conversation=st.sampled_from([None, "c"]), pod=st.sampled_from(["u0", "u1"]))
    def put(self, content: str, conversation: str | None, pod: str) -> None:
        handle = kept(
            f"{len(self.made)}",
            content,
            conversation=conversation,
            process=pod,
            deadline=self.clock.now + 450,
            blocks=(((len(self.made), 3),),),
        )
        self.made[handle.ident] = handle
        given_up = {gone.kept.ident for gone in self.run(self.store.put(handle))}
        assert not given_up & self.granted.keys()
        self.over |= given_up
        if conversation:
            self.revoked |= {ident for ident, (taken, _) in self.granted.items() if taken.conversation == conversation}

    @rule(content=st.sampled_from("ab"), conversation=st.sampled_from([None, "c", "d"]))
    def find_and_take(self, content: str, conversation: str | None) -> None:
        for match in self.run(self.store.find(next_turn(content, conversation=conversation))).matches:
            ident = match.kept.ident
            assert ident not in self.over
            assert ident not in self.granted
            assert match.kept.deadline > self.clock.now
            grant = self.run(self.store.take(ident))
            assert grant is not None
            self.granted[ident] = (match.kept, grant)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), read=st.booleans())
    def settle(self, data: st.DataObject, read: bool) -> None:
        ident = data.draw(st.sampled_from(sorted(self.granted)))
        _, grant = self.granted.pop(ident)
        if read:
            self.run(self.store.spend(ident, grant))
            self.over.add(ident)
        else:
            revoked = self.run(self.store.put_back(ident, grant))
            assert (revoked is not None) == (ident in self.revoked)
            if revoked is not None:
                self.over.add(ident)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ident = data.draw(st.sampled_from(sorted(self.made)))
        if self.run(self.store.withdraw(ident)):
            assert ident not in self.over
            assert ident not in self.granted
            self.over.add(ident)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        ident = data.draw(st.sampled_from(sorted(self.made)))
        handle = self.made[ident]
        later = handle.renewed(handle.params, Held(0.0, handle.deadline + 300, 9000.0, Pace()))
        if self.run(self.store.renew(later)):
            assert ident not in self.over
            assert ident not in self.granted
            self.made[ident] = later

    @rule(seconds=st.sampled_from([1.0, 100.0, 450.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        expired = {ident for ident, handle in self.made.items() if handle.deadline <= self.clock.now}
        self.over |= expired
        for ident in expired:
            self.granted.pop(ident, None)

    @rule(pod=st.sampled_from(["u0", "u1"]))
    def orphan(self, pod: str) -> None:
        self.run(self.store.orphan(pod))
        gone = {ident for ident, handle in self.made.items() if handle.process == pod}
        self.over |= gone
        for ident in gone:
            self.granted.pop(ident, None)

    @invariant()
    def holds_what_is_live(self) -> None:
        self.store.retained()
        live = [handle for ident, handle in self.made.items() if ident not in self.over]
        for pod in ("u0", "u1"):
            blocks = {block for handle in live if handle.process == pod for block in handle.retained_blocks}
            assert self.store.retained_blocks(pod) == len(blocks)
        assert len(self.store) == len(self.made.keys() - self.over)
        assert len(self.ends) == len(self.over)
        assert len(self.store) <= 4 + len(self.granted)


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
