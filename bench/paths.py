"""Whether the router's choice of paths pays: against always the same one, and against one who knows every time.

Simulated: engines are a timing model with queues (``tests.paths.world``); the router's own models choose. A turn costs
the seconds until its first token and those for which it holds up running answers. Regret is what a turn costs more, in
the mean, than with the choices of one who knows what everything that is there will take. That one does not know what is
still to come, so that a regret can be below zero.

Writes ``bench/results/paths.json`` and prints the table of ``docs/router.md``.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path as File
from statistics import fmean, quantiles
from typing import Any

from kvloop_router.path_choice import Path
from tests.paths.world import Chooser, Played, Workload, World, fixed, learned, oracle

RESULTS = File(__file__).parent / "results" / "paths.json"
SEEDS = range(5)

WORKLOADS = (
    Workload(
        name="short suffix", conversations=20, beginning=(12_000, 0.4), suffix=(150, 0.3), answer=(300, 0.3), pause=10
    ),
    Workload(
        name="long suffix", conversations=20, beginning=(4_000, 0.4), suffix=(3_000, 0.5), answer=(300, 0.3), pause=15
    ),
    Workload(
        name="loaded prefill",
        conversations=90,
        beginning=(12_000, 0.4),
        suffix=(600, 0.8),
        answer=(150, 0.3),
        pause=20,
        decodes=6,
    ),
    Workload(
        name="loaded decode", conversations=60, beginning=(6_000, 0.4), suffix=(150, 0.3), answer=(1_500, 0.3), pause=5
    ),
    Workload(
        name="slow network",
        conversations=20,
        beginning=(12_000, 0.4),
        suffix=(150, 0.3),
        answer=(300, 0.3),
        pause=10,
        network=0.02,
    ),
    Workload(
        name="mixed agents",
        conversations=60,
        beginning=(10_000, 0.8),
        suffix=(400, 1.4),
        answer=(120, 0.8),
        pause=4,
        prefills=2,
        decodes=3,
    ),
    Workload(
        name="short suffix, NixlConnector",
        conversations=20,
        beginning=(12_000, 0.4),
        suffix=(150, 0.3),
        answer=(300, 0.3),
        pause=10,
        retains=False,
    ),
)

CHOOSERS: Mapping[str, Chooser] = {
    "Auto": learned,
    "Cold": fixed(Path.COLD),
    "Warm": fixed(Path.WARM),
    "Local": fixed(Path.LOCAL),
    "oracle": oracle,
}


def main() -> None:
    """Play all of it, print the table and write the results."""
    result = {
        "simulated": "engines are a timing model with queues; the router's own models choose",
        "timing": "kvloop_sim.timing, defaults (published curves of Qwen3-32B on two p5en.48xlarge over EFA)",
        "seeds": len(SEEDS),
        "python": platform.python_version(),
        "workloads": {workload.name: measured(workload, SEEDS) for workload in WORKLOADS},
    }
    print(table(result))
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


def measured(workload: Workload, seeds: Sequence[int]) -> dict[str, Any]:
    """For each way to choose, what turns cost."""
    rows = {
        name: _row([played for seed in seeds for played in World(workload, choose, seed).run()])
        for name, choose in CHOOSERS.items()
    }
    best = rows["oracle"]["cost_ms"]
    for row in rows.values():
        row["regret_ms"] = round(row["cost_ms"] - best, 1)
    return rows


def table(result: Mapping[str, Any]) -> str:
    """The regrets in milliseconds a turn, and how Auto's turns went, as a table in Markdown."""
    lines = [
        "| workload | Auto | always cold | always warm | always local | Auto's turns |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in result["workloads"].items():
        regrets = [f"{rows[mode]['regret_ms']:.0f}" for mode in ("Auto", "Cold", "Warm", "Local")]
        shares = ", ".join(f"{share:.0%} {path}" for path, share in rows["Auto"]["shares"].items() if share)
        lines.append("| " + " | ".join((name, *regrets, shares)) + " |")
    return "\n".join(lines)


def _row(played: Sequence[Played]) -> dict[str, Any]:
    first = [turn.first_token for turn in played]
    held_up = fmean(turn.held_up for turn in played)
    return {
        "turns": len(played),
        "first_token_ms": round(1e3 * fmean(first), 1),
        "first_token_p95_ms": round(1e3 * quantiles(first, n=20)[-1], 1),
        "held_up_ms": round(1e3 * held_up, 1),
        "cost_ms": round(1e3 * (fmean(first) + held_up), 1),
        "shares": {path.value: round(sum(turn.path is path for turn in played) / len(played), 3) for path in Path},
    }


if __name__ == "__main__":
    main()
