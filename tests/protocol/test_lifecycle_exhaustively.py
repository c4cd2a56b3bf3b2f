"""Every state that handles can reach between two routers, two decode engines and a prefill engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloop_connector.lifecycle import transition
from tests.protocol.explore import Exploration, explore
from tests.protocol.model import HandleModel, Invariant, Transition, World
from tests.protocol.mutants import MUTANTS, Mutant
from tests.protocol.system import SystemModel

WORLDS = {
    # vLLM 0.26 and later: a read may wait for ever, since prefill looks at the deadline when it begins.
    "prefill checks the deadline": World(
        ttl=3, handle_ttl=2, handle_margin=0, arrival=0, queue=None, read=1, read_margin=1
    ),
    # Nothing but the router's margin keeps a read inside the time of the blocks: queue and read must fit in it.
    "only the router checks": World(ttl=4, handle_ttl=4, handle_margin=2, arrival=0, queue=1, read=1, read_margin=None),
}


def explored(
    function: Transition, world: World, *, slots: int, enforced: frozenset[Invariant] = frozenset(Invariant)
) -> Exploration:
    return explore(SystemModel(HandleModel(function, world), slots=slots), enforced)


@pytest.mark.parametrize(("world", "at_least"), list(zip(WORLDS, (90_000, 120_000), strict=True)))
def test_no_reachable_state_breaks_an_invariant(
    world: str, at_least: int, record_property: Callable[[str, object], None]
) -> None:
    result = explored(transition, WORLDS[world], slots=2)

    record_property("states", result.states)
    record_property("steps", result.steps)
    print(f"{world}: {result.states} states, {result.steps} steps")
    assert result.counterexample is None, f"\n{result.counterexample}"
    assert result.states >= at_least


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_breaks_what_it_must(mutant: Mutant) -> None:
    found = [
        explored(mutant, world, slots=1, enforced=frozenset({mutant.breaks})).counterexample
        for world in WORLDS.values()
    ]

    assert any(found), "no world shows it"


def test_every_invariant_can_be_broken() -> None:
    assert {mutant.breaks for mutant in MUTANTS} == set(Invariant)
