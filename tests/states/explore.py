"""Explores: so many turns, from a seed; where something is wrong, what is left of the steps that show it is printed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hypothesis import HealthCheck, Phase, seed as seeded, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from tests.states.engines import Kind
from tests.states.machine import Tally, machine

KINDS: Final = {
    "stock": Kind(),
    "leases": Kind(leases=True),
    "reasoning": Kind(reasoning=True),
    "kvloop": Kind(verifying=True),
    "local": Kind(verifying=True, path="Local"),
    "auto": Kind(path="Auto"),
}
"""Stock engines, with kvloop's plug-in, with a model that thinks and a template that forgets it; KvloopConnector, also
with turns that decode plays alone; stock engines whose speed is learnt."""

_STEPS: Final = 60
_TURNS_AN_EXAMPLE: Final = 90
_AT_ONCE: Final = 25
"""Examples that are drawn with one seed."""


def explore(kind: Kind, tally: Tally, *, turns: int, seed: int, shrink: bool = True) -> None:
    """Play until ``tally`` has ``turns`` more. Raises what a step or an end found to be wrong.

    shrink: look for the fewest steps that show it, which takes many times as long.
    """
    wanted = tally.turns + turns
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    with _quiet():
        while tally.turns < wanted:
            examples = min(_AT_ONCE, 1 + (wanted - tally.turns) // _TURNS_AN_EXAMPLE)
            try:
                run_state_machine_as_test(
                    seeded(seed)(machine(kind, tally)),
                    settings=settings(
                        max_examples=examples,
                        stateful_step_count=_STEPS,
                        phases=phases,
                        deadline=None,
                        database=None,
                        derandomize=False,
                        suppress_health_check=list(HealthCheck),
                    ),
                )
            except Flaky:
                # Ids are drawn anew each time, and what arrives at the same time does so in any order.
                if tally.faults:
                    raise tally.faults[0] from None
                raise
            seed += 1


@contextmanager
def _quiet() -> Iterator[None]:
    """Engines that are ended and clients that leave are many, and each has its lines in the log."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
