"""Some hundred random turns through a router and simulated engines in one process; ``make test-router-states`` plays
many. What is checked is told by ``tests.states.machine``."""

from __future__ import annotations

import pytest

from tests.states.defects import DEFECTS
from tests.states.explore import KINDS, explore
from tests.states.machine import Tally

TURNS = 100
TURNS_UNTIL_FOUND = 2000
SOON_FOUND = ("the proof is skipped", "a handle is not trimmed to what is proven", "two can take one handle")


@pytest.mark.parametrize("kind", ["stock", "kvloop"])
def test_no_turn_is_wrong_and_nothing_is_left_behind(kind: str) -> None:
    tally = Tally()

    explore(KINDS[kind], tally, turns=TURNS, seed=1)

    assert tally.warm > tally.turns // 5
    assert tally.reused > tally.reusable // 2


@pytest.mark.parametrize("name", SOON_FOUND)
def test_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DEFECTS[name](monkeypatch)

    with pytest.raises((AssertionError, ExceptionGroup)):
        explore(KINDS["stock"], Tally(), turns=TURNS_UNTIL_FOUND, seed=1, shrink=False)
