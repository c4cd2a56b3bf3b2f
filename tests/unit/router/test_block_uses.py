"""Counting which KV blocks are held, and by how many handles."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloop_connector.handle import from_ranges, to_ranges
from kvloop_router.block_uses import BlockUses

# Around the ends of pages, both ways, and block ids that no engine has.
RUNS = st.lists(
    st.tuples(st.sampled_from([0, 3, 4090, 4096, 8191, 2**40]), st.sampled_from([1, 2, 10, 5000])).map(
        lambda run: (run[0], run[1])
    )
    | st.tuples(st.sampled_from([6000, 9000, 2**40]), st.sampled_from([-2, -10, -5000])),
    max_size=3,
)


class Counting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.uses = BlockUses()
        self.held: list[list[tuple[int, int]]] = []
        self.expected: Counter[int] = Counter()

    @rule(runs=RUNS)
    def add(self, runs: list[tuple[int, int]]) -> None:
        self.uses.add(runs)
        self.held.append(runs)
        self.expected.update(set(from_ranges(runs)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        runs = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.uses.remove(runs)
        self.expected.subtract(set(from_ranges(runs)))

    @invariant()
    def each_block_counts_once(self) -> None:
        assert self.uses.distinct == sum(1 for count in self.expected.values() if count)


TestCounting = Counting.TestCase
TestCounting.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)


@given(extra=st.integers(-3, 60))
def test_a_system_prompt_that_hundreds_of_handles_share(extra: int) -> None:
    uses, count = BlockUses(), 255 + extra
    for number in range(count):
        uses.add(((0, 20), (100 + number, 1)))
    assert uses.distinct == 20 + count

    for number in range(count):
        assert uses.distinct == 20 + count - number
        uses.remove(((0, 20), (100 + number, 1)))
    assert uses.distinct == 0


def test_the_order_in_which_they_leave_does_not_matter() -> None:
    uses = BlockUses()
    for _ in range(300):
        uses.add(((5, 1),))
    uses.add(to_ranges([4, 5, 6]))
    for _ in range(300):
        uses.remove(((5, 1),))

    assert uses.distinct == 3
