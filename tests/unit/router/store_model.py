"""A model of a place for handles, to be played against a real one."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloop_connector.lifecycle import State
from kvloop_router.kept import THREADS, HandleStore, Kept, Retention, Why
from kvloop_router.leases import Held, Pace
from tests.unit.router.kept_handles import Clock, kept, next_turn

T = TypeVar("T")

RUNS = st.sampled_from([((0, 3),), ((2, 2), (9, 1)), ((5, -3),), ((7, 1), (0, 2))])


class Bookkeeping(RuleBasedStateMachine):
    """Whatever happens in whatever order: single use, no use after the end, bounds, and no index entry left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ends: list[State] = []
        self.store = self.new_store()
        self.granted: dict[str, tuple[Kept, int]] = {}
        self.over: set[str] = set()
        self.made: dict[str, Kept] = {}
        self.revoked: set[str] = set()

    def new_store(self) -> HandleStore:
        """One for 4 handles, on ``clock``, that tells ``ends``."""
        raise NotImplementedError

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    @rule(
        content=st.sampled_from("ab"),
        conversation=st.sampled_from([None, "c"]),
        pod=st.sampled_from(["u0", "u1"]),
        data=st.data(),
        most=st.sampled_from([None, 6]),
    )
    def put(self, content: str, conversation: str | None, pod: str, data: st.DataObject, most: int | None) -> None:
        handle = kept(
            f"{len(self.made)}",
            content,
            conversation=conversation,
            process=pod,
            deadline=self.clock.now + 450,
            blocks=(data.draw(RUNS),),
        )
        superseded = self.superseded_by(handle) if conversation else set()
        self.made[handle.ident] = handle
        gone = self.run(self.store.put(handle, max_blocks=most))
        given_up = {each.kept.ident for each in gone}
        assert not given_up & self.granted.keys()
        assert superseded - self.granted.keys() == {each.kept.ident for each in gone if each.why is Why.SUPERSEDED}
        self.over |= given_up
        self.revoked |= superseded & self.granted.keys()

    def superseded_by(self, handle: Kept) -> set[str]:
        """Those under its id that it holds all of, and of the others the oldest, so that THREADS are left with it."""
        threads = [
            each
            for ident, each in self.made.items()
            if ident not in self.over and each.conversation == handle.conversation
        ]
        others = [each.ident for each in threads if each.trail != handle.trail]
        older = {each.ident for each in threads if each.trail == handle.trail}
        return older | {*others[: max(0, len(others) + 1 - THREADS)]}

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
        retained = self.run(self.store.retained())
        live = [handle for ident, handle in self.made.items() if ident not in self.over]
        for pod in ("u0", "u1"):
            of_pod = [handle for handle in live if handle.process == pod]
            blocks = {block for handle in of_pod for block in handle.retained_blocks}
            last = max((handle.deadline for handle in of_pod), default=0.0)
            assert retained.get(pod, Retention(0, 0, 0.0)) == Retention(len(of_pod), len(blocks), last)
            assert self.store.retained_blocks(pod) == len(blocks)
        assert len(self.store) == len(live)
        assert len(self.ends) == len(self.over)
        assert len(self.store) <= 4 + len(self.granted)
