"""Random turns through the router and simulated engines in one process: ``bench/results/router_states.json``.

    python -m bench.router_states --turns 10000

Each kind of engines gets its share of the turns. Then each planted defect is looked for, with one kind of engines. What
has to hold after each step is told by ``tests.states.machine``; a step that breaks it ends the run with status 1, as a
defect does that is not found and a share of reuse below 0.95 of the oracle's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
from rich.console import Console
from rich.table import Table

from tests.states.defects import DEFECTS, Plant
from tests.states.explore import KINDS, explore
from tests.states.machine import Tally

RESULTS: Final = Path(__file__).parent / "results" / "router_states.json"
LEAST_SHARE: Final = 0.95
_TURNS_UNTIL_FOUND: Final = 4000
_MOST_TOLD: Final = 12
_UNCOUNTED: Final = frozenset({"leases", "local", "auto"})
"""Kinds whose handles live longer than the oracle knows of, or are not read where another path is better."""


def main() -> int:
    """Play, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-defects", action="store_true", help="do not look for planted defects")
    given = parser.parse_args()
    kinds = {name: _played(name, -(-given.turns // len(KINDS)), given.seed) for name in KINDS}
    defects = {} if given.no_defects else {name: _turns_until_found(plant) for name, plant in DEFECTS.items()}
    counted = [told for name, told in kinds.items() if name not in _UNCOUNTED]
    share = sum(told["reused"] + told["had"] for told in counted) / sum(told["reusable"] for told in counted)
    result = {
        "engines": "simulated, in the router's process; time is virtual",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "seed": given.seed,
        "turns": sum(told["turns"] for told in kinds.values()),
        "wrong": sum(told["faults"] for told in kinds.values()),
        "reused_share_of_oracle": round(share, 4),
        "kinds": kinds,
        "turns_until_defect_is_found": defects,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    table = Table("engines", "turns", "warm", "failed", "left", "of the oracle's reuse", "CPU s")
    for name, told in kinds.items():
        cells = (told["turns"], told["warm"], told["failed"], told["left"], told["share"], told["cpu_seconds"])
        table.add_row(name, *map(str, cells))
    Console().print(table, defects)
    return int(share < LEAST_SHARE or None in defects.values())


def _played(name: str, turns: int, seed: int) -> dict[str, Any]:
    tally, began = Tally(), time.process_time()
    explore(KINDS[name], tally, turns=turns, seed=seed)
    sums = {each.name: getattr(tally, each.name) for each in fields(tally) if each.name not in ("templates", "faults")}
    told = {key: _told(value) if isinstance(value, Counter) else value for key, value in sums.items()}
    told["faults"] = len(tally.faults)
    return {**told, "share": round(tally.share, 4), "cpu_seconds": round(time.process_time() - began, 1)}


def _told(counts: Counter[str]) -> dict[str, int]:
    return dict(counts.most_common(_MOST_TOLD))


def _turns_until_found(plant: Plant) -> int | None:
    """After how many turns a defect is found; None where it is not."""
    tally = Tally()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            explore(KINDS["stock"], tally, turns=_TURNS_UNTIL_FOUND, seed=1, shrink=False)
        except (AssertionError, ExceptionGroup):
            return tally.turns
    return None


if __name__ == "__main__":
    raise SystemExit(main())
