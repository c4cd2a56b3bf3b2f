"""The choice of paths on simulated engines, in short; ``make bench-paths`` is the long version."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from kvloop_router.path_choice import Path
from tests.paths.world import Chooser, Workload, World, fixed, learned, oracle

IDLE = Workload(
    name="", conversations=12, beginning=(12_000, 0.4), suffix=(200, 0.5), answer=(200, 0.3), pause=10, turns=12
)


def cost(workload: Workload, choose: Chooser) -> float:
    return fmean(turn.first_token + turn.held_up for turn in World(workload, choose, 1).run())


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(IDLE, id="as published"),
        pytest.param(replace(IDLE, conversations=60, decodes=6), id="loaded prefill"),
        pytest.param(replace(IDLE, answer=(1_500, 0.3), conversations=30), id="loaded decode"),
        pytest.param(replace(IDLE, retains=False), id="a local turn leaves no handle"),
    ],
)
def test_it_costs_hardly_more_than_the_best_fixed_path(workload: Workload) -> None:
    best = min(cost(workload, fixed(path)) for path in Path)

    assert cost(workload, learned) < 1.1 * best


def test_over_a_slow_network_it_leaves_what_it_began_with() -> None:
    slow = replace(IDLE, network=0.02)

    assert cost(slow, learned) < (cost(slow, fixed(Path.WARM)) + cost(slow, fixed(Path.COLD))) / 2


def test_who_knows_every_time_is_hard_to_beat() -> None:
    assert cost(IDLE, oracle) < min(cost(IDLE, fixed(path)) for path in Path)
