"""Leases against a model that knows which reads run, what each turn's blocks are and how long it has been idle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvloop_connector.leases import Freed, Leases, LeaseTerms, Renewal, most_blocks
from tests.unit.connector.lease_mutants import MUTANTS

TERMS = LeaseTerms(seconds=10, longest=25, margin=2, most_blocks=6)


@dataclass(slots=True)
class Turn:
    """What the model knows of one turn."""

    blocks: frozenset[int]
    since: int
    ends: float
    deadline: float
    freed: bool = False
    wanted: bool = True
    reading: int | None = None
    granted: list[int] = field(default_factory=list)
    renewals: int = 0


class AgainstModel(RuleBasedStateMachine):
    """All that can befall the leases of an engine, in any order."""

    kind: type[Leases] = Leases
    terms = TERMS

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self.leases = self.kind(self.terms)
        self.turns: dict[str, Turn] = {}

    def step(self) -> int:
        self.steps += 1
        return self.steps

    def held(self) -> dict[str, Turn]:
        return {name: turn for name, turn in self.turns.items() if not turn.freed}

    def union(self, turns: dict[str, Turn]) -> frozenset[int]:
        return frozenset[int]().union(*(turn.blocks for turn in turns.values()))

    def take_in(self, freed: Freed, *, allowed: set[str]) -> None:
        """Check that each of ``freed`` may be freed now."""
        assert len(set(freed)) == len(freed)
        for name in freed:
            turn = self.turns[name]
            assert not turn.freed, "freed twice"
            due = self.now >= turn.deadline
            assert due or name in allowed, "freed without a reason"
            assert due or turn.reading is None, "freed while it is read"
            turn.freed = True

    @rule(blocks=st.frozensets(st.integers(0, 9), min_size=1, max_size=7))
    def retain(self, blocks: frozenset[int]) -> None:
        name = f"turn-{len(self.turns)}"
        before = {other: turn for other, turn in self.held().items() if self.now < turn.deadline}
        idle = {other for other, turn in before.items() if turn.reading is None}
        deadline, freed = self.leases.retain(name, blocks, self.now)
        given_up = [other for other in freed if other in before]
        cap = self.terms.most_blocks
        self.take_in(freed, allowed=idle)
        if deadline is None:
            assert cap is not None
            reading = {other: turn for other, turn in before.items() if turn.reading is not None}
            assert len(self.union(reading) | blocks) > cap, "refused although there was room"
            assert not given_up, "given up for nothing"
            return
        for other in given_up:
            assert all(turn.since > self.turns[other].since for left, turn in self.held().items() if left in idle)
        if given_up and cap is not None:
            spared = {**self.held(), given_up[-1]: self.turns[given_up[-1]]}
            assert len(self.union(spared) | blocks) > cap, "given up without need"
        assert deadline == self.now + self.terms.seconds
        self.turns[name] = Turn(blocks, self.step(), self.now + self.terms.longest, deadline)

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), seconds=st.integers(0, 30))
    def renew(self, data: st.DataObject, seconds: int) -> None:
        name, turn = self.draw(data)
        renewal = self.leases.renew(name, seconds, self.now)
        if turn.freed or not turn.wanted or turn.reading is not None or self.now >= turn.deadline:
            assert renewal is None, "renewed what has ended"
            return
        turn.renewals += 1
        turn.deadline = max(turn.deadline, min(self.now + seconds, turn.ends))
        turn.since = self.step()
        assert renewal == Renewal(turn.deadline, turn.renewals)

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        self.claims(self.draw(data)[0])

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def claim_again_after_a_put_back(self, data: st.DataObject) -> None:
        name, turn = self.draw(data)
        self.claims(name)
        if turn.reading is not None:
            self.ends(name, turn.reading, happened=False)
            self.claims(name)

    def claims(self, name: str) -> None:
        turn = self.turns[name]
        grant, freed = self.leases.claim(name, self.now)
        self.take_in(freed, allowed=set())
        may = not turn.freed and turn.wanted and turn.reading is None and self.now + self.terms.margin < turn.deadline
        assert (grant is not None) == may
        if grant is not None:
            assert grant not in turn.granted, "a number was given twice"
            turn.granted.append(grant)
            turn.reading = grant

    @precondition(lambda self: any(turn.granted for turn in self.turns.values()))
    @rule(data=st.data(), happened=st.booleans())
    def read_ends_or_never_was(self, data: st.DataObject, happened: bool) -> None:
        granted = [name for name, turn in self.turns.items() if turn.granted]
        name = data.draw(st.sampled_from([*(name for name in granted if not self.turns[name].freed), granted[-1]]))
        self.ends(name, data.draw(st.sampled_from(self.turns[name].granted)), happened=happened)

    def ends(self, name: str, grant: int, *, happened: bool) -> None:
        turn = self.turns[name]
        freed = (self.leases.read if happened else self.leases.put_back)(name, grant, self.now)
        if turn.freed or grant != turn.reading:
            self.take_in(freed, allowed=set())
            return
        turn.reading = None
        gone = happened or not turn.wanted or self.now >= turn.deadline
        self.take_in(freed, allowed={name} if gone else set())
        assert turn.freed == gone

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name, turn = self.draw(data)
        freed = self.leases.release(name, self.now)
        turn.wanted = False
        self.take_in(freed, allowed={name})
        assert turn.freed or (turn.reading is not None and self.now < turn.deadline)

    @rule(seconds=st.sampled_from([1, 2, 3, 9]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def somebody_looks(self) -> None:
        self.take_in(self.leases.expire(self.now), allowed=set())
        assert all(self.now < turn.deadline for turn in self.held().values()), "retained past its deadline"

    @invariant()
    def what_is_retained_is_what_was_not_freed(self) -> None:
        held = self.held()
        assert set(self.leases.turns) == held.keys()
        assert self.leases.blocks == len(self.union(held))

    @invariant()
    def the_cap_is_kept(self) -> None:
        assert self.terms.most_blocks is None or self.leases.blocks <= self.terms.most_blocks

    def teardown(self) -> None:
        self.now += self.terms.longest
        self.take_in(self.leases.expire(self.now), allowed=set())
        assert not self.held(), "retained for ever"

    def draw(self, data: st.DataObject) -> tuple[str, Turn]:
        # Mostly those that something can still happen to.
        name = data.draw(st.sampled_from([*self.held(), *list(self.turns)[-2:]]))
        return name, self.turns[name]


class WithoutCap(AgainstModel):
    terms = replace(TERMS, most_blocks=None)


MANY = settings(
    max_examples=80,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("machine", [AgainstModel, WithoutCap], ids=["with a cap", "without"])
def test_leases_do_what_the_model_does(machine: type[AgainstModel]) -> None:
    run_state_machine_as_test(machine, settings=MANY)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_fault_is_found(mutant: type[Leases]) -> None:
    class Faulty(AgainstModel):
        kind = mutant

    # A fault may show as a wrong answer or as an error in what follows from it.
    with pytest.raises((AssertionError, LookupError, ValueError)):
        run_state_machine_as_test(
            Faulty, settings=settings(MANY, max_examples=800, stateful_step_count=60, phases=[Phase.generate])
        )


@pytest.mark.parametrize(("share", "blocks"), [(0.3, 300), (0, 0), (1, 1000), (0.0009, 0)])
def test_a_share_is_whole_blocks(share: float, blocks: int) -> None:
    assert most_blocks(share, 1000) == blocks


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="no share"):
        most_blocks(share, 1000)


@pytest.mark.parametrize("change", [{"margin": 10}, {"margin": -1}, {"longest": 9}])
def test_terms_that_leave_no_time_to_read_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a lease needs"):
        replace(TERMS, **change)


def test_a_turn_is_retained_once() -> None:
    leases = Leases(TERMS)
    leases.retain("turn", [1], 0)

    with pytest.raises(ValueError, match="already"):
        leases.retain("turn", [2], 1)
