"""Keeping handles: each is used once, in time, and by its own conversation only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloop_connector.lifecycle import State
from kvloop_router.store import SHORTLIST, Absence, Kept, MemoryStore
from tests.unit.router.kept_handles import Clock, kept, next_turn, query


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
    await store.put(kept("long", "a", "b", "c"))
    await store.put(kept("longer", "a", "b", "c", "d", "e"))
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


async def test_two_ids_are_two_conversations_whatever_their_histories(store: MemoryStore) -> None:
    await store.put(kept("one", "a", conversation="c"))

    assert await absence(store, "a", conversation="d") is Absence.MISS
    assert await names(store, "a") == ["one"]


async def test_a_new_handle_of_a_conversation_id_supersedes_the_old_one(store: MemoryStore) -> None:
    old = kept("old", "a", conversation="c")
    await store.put(old)

    assert await store.put(kept("new", "a", "b", "c", conversation="c")) == (old,)
    assert await names(store, "a", "b", "c", conversation="c") == ["new"]


async def test_a_taken_handle_is_never_superseded(store: MemoryStore) -> None:
    old = kept("old", "a", conversation="c")
    await store.put(old)
    await store.take(old.ident)

    assert await store.put(kept("new", "a", "b", "c", conversation="c")) == ()
    assert not await store.withdraw(old.ident)


async def test_a_full_store_gives_up_the_oldest_that_nobody_reads(store: MemoryStore, clock: Clock) -> None:
    handles = [kept(f"{index}", f"question {index}") for index in range(10)]
    for handle in handles:
        await store.put(handle)
    await store.take(handles[0].ident)

    assert await store.put(kept("new", "new")) == (handles[1],)
    assert len(store) == 10
    assert await absence(store, "question 1") is Absence.EVICTED


async def test_an_engine_retains_no_more_blocks_than_it_may(store: MemoryStore) -> None:
    first, second, elsewhere = kept("1", "a"), kept("2", "b"), kept("3", "c", process="uid-1")
    for handle in (first, second, elsewhere):
        assert await store.put(handle, max_blocks=6) == ()

    assert await store.put(kept("4", "d"), max_blocks=6) == (first,)
    await store.take(second.ident)
    assert await store.put(kept("5", "e"), max_blocks=6) == (kept("4", "d"),)
    assert await names(store, "c") == ["3"]


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
        )
        self.made[handle.ident] = handle
        self.over |= {gone.ident for gone in self.run(self.store.put(handle))}

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
            self.run(self.store.put_back(ident, grant))

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ident = data.draw(st.sampled_from(sorted(self.made)))
        if self.run(self.store.withdraw(ident)):
            assert ident not in self.over
            assert ident not in self.granted
            self.over.add(ident)

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
        assert len(self.store) == len(self.made.keys() - self.over)
        assert len(self.ends) == len(self.over)
        assert len(self.store) <= 4 + len(self.granted)


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
