"""Adversarial turns whose texts have to be those of a model that reuses nothing: ``bench/results/truth.json``.

    python -m bench.truth --turns 1000                     real vLLM engines on this machine's CPU, in float32
    python -m bench.truth --turns 400 --engines sim        simulated ones, in a minute

The same seeds are played through kvloop's router on engines with KvloopConnector, through kvloop's router on stock
engines, and through a router that carries handles and compares nothing. If the last gives no wrong text, or nothing
was pulled in the first, the run proves nothing, and ends with status 1 as it does for a wrong text in the first two.

A run is played in parts of 250 turns, of three seeds side by side; what a part came to is written when it ends. A run
that was cut off goes on from there with ``--resume``, and ``--minutes`` cuts it off by itself (status 75).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvloop import cpu_engine
from tests.harness.engines import Engine, Kind as EngineKind, start
from tests.truth import stage
from tests.truth.judge import Answered, Tally, faults, tally_of, together
from tests.truth.play import Arm, kvloops_router, naive_router, play
from tests.truth.stage import Stage
from tests.truth.turns import ANSWER_TOKENS, SLOTS

RESULTS: Final = Path(__file__).parent / "results" / "truth.json"
PART: Final = 250
ABREAST: Final = 3
"""Seeds that are played side by side: whoever is wrong then meets blocks that others have used."""

EXPIRIES: Final = 1
"""For each seed."""

RESTART_EVERY: Final = 2
"""How many parts, for one in which an engine is started again."""

LEAST_SHARE: Final = 0.95
NOT_FINISHED: Final = 75


@dataclass(frozen=True, slots=True)
class ArmUnderTest:
    """engines: by the kind that was asked for. past_router: as of `play`. restarts: whether engines are restarted."""

    name: str
    says: str
    router: Callable[[Path, Stage], AbstractAsyncContextManager[Arm]]
    engines: dict[str, EngineKind]
    past_router: bool
    restarts: bool


ARMS: Final = (
    ArmUnderTest(
        "kvloop",
        "kvloop's router, KvloopConnector",
        kvloops_router,
        {"vllm": EngineKind.VLLM_KVLOOP},
        past_router=True,
        restarts=True,
    ),
    ArmUnderTest(
        "proof",
        "kvloop's router with its own proof, stock NixlConnector",
        kvloops_router,
        {"vllm": EngineKind.VLLM, "sim": EngineKind.SIM},
        past_router=False,
        restarts=True,
    ),
    # The last: what it leaves in the stock engines' prefix caches is wrong.
    ArmUnderTest(
        "stock",
        "a router that compares nothing, stock NixlConnector",
        naive_router,
        {"vllm": EngineKind.VLLM, "sim": EngineKind.SIM},
        past_router=True,
        restarts=False,
    ),
)

Parts = dict[str, dict[int, Tally]]
"""By arm and seed."""


def main() -> int:
    """Play what is left of the run, print a table and write the results; 0 where all is right and proves something."""
    given = _arguments()
    arms = [arm for arm in ARMS if given.engines in arm.engines and arm.name in given.arms]
    settings = _settings(given)
    parts_file = given.results.with_suffix(".parts.json")
    parts = _read(parts_file, settings) if given.resume else {}
    deadline = time.monotonic() + 60 * given.minutes if given.minutes else float("inf")
    found = _found(given.results) if given.resume else {}
    for kind in dict.fromkeys(arm.engines[given.engines] for arm in arms):
        of_kind = [arm for arm in arms if arm.engines[given.engines] is kind]
        if all(seed in parts.get(arm.name, {}) for arm in of_kind for seed, _ in _parts(given)):
            continue
        with tempfile.TemporaryDirectory() as folder, start(kind, Path(folder), stage.specs(kind)) as engines:
            place = stage.on(engines)
            found["engines"] = _versions(place.reference)
            for arm in of_kind:
                for _ in _played(arm, place, given, parts, deadline, Path(folder)):
                    _write(parts_file, {"settings": settings, "parts": _as_json(parts)})
                    _write(given.results, _result(parts, given, settings, found))
        if time.monotonic() > deadline:
            break
    _write(given.results, _result(parts, given, settings, found))
    return _told(parts, given)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1000, help="answers in each arm")
    parser.add_argument("--seed", type=int, default=1, help="of the first part; the next have the next")
    parser.add_argument("--engines", choices=["vllm", "sim"], default="vllm")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], default=[arm.name for arm in ARMS])
    parser.add_argument("--resume", action="store_true", help="go on with the parts that are missing")
    parser.add_argument("--minutes", type=float, help="begin no part after so many")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--answers", type=Path, metavar="FILE", help="add every answer to it, one a line")
    return parser.parse_args()


def _parts(given: argparse.Namespace) -> list[tuple[int, int]]:
    """First seed and number of turns of each part."""
    counts = [min(PART, given.turns - begun) for begun in range(0, given.turns, PART)]
    return [(given.seed + ABREAST * index, count) for index, count in enumerate(counts)]


def _played(
    arm: ArmUnderTest, place: Stage, given: argparse.Namespace, parts: Parts, deadline: float, folder: Path
) -> Iterator[None]:
    """Play the parts of an arm that are missing; each time one has been added to ``parts``, it yields."""
    mine = parts.setdefault(arm.name, {})
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(arm.name, total=given.turns, completed=sum(tally.turns for tally in mine.values()))
        for seed, turns in _parts(given):
            if seed in mine or time.monotonic() > deadline:
                continue
            directory = folder / f"{arm.name}-{seed}"
            directory.mkdir()
            mine[seed] = asyncio.run(_part(arm, place, seed, turns, directory, progress, task, given.answers))
            yield


async def _part(
    arm: ArmUnderTest,
    place: Stage,
    seed: int,
    turns: int,
    folder: Path,
    progress: Progress,
    task: TaskID,
    log: Path | None,
) -> Tally:
    wrong = 0

    def judged(answers: Sequence[Answered]) -> None:
        if log is not None:
            with log.open("a") as file:
                file.writelines(json.dumps({"arm": arm.name, **asdict(answer)}) + "\n" for answer in answers)

    def answered(answer: Answered) -> None:
        nonlocal wrong
        wrong += answer.wrong
        progress.update(task, advance=1, description=f"{arm.name}, seeds from {seed}, {wrong} wrong")

    async with arm.router(folder, place) as router:
        return await play(
            place,
            router,
            range(seed, seed + ABREAST),
            turns,
            expiries=EXPIRIES,
            restarts=int(arm.restarts and seed // ABREAST % RESTART_EVERY == 0),
            past_router=arm.past_router,
            answered=answered,
            judged=judged,
        )


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    """What parts of one run have in common."""
    prefill = stage.specs(EngineKind.SIM)[0]
    return {
        "engines": given.engines,
        "turns": given.turns,
        "seeds": [given.seed, given.seed + ABREAST * len(_parts(given)) - 1],
        "seeds_at_once": ABREAST,
        "conversations_of_a_seed": SLOTS,
        "answer_tokens": ANSWER_TOKENS,
        "dtype": "float32",
        "temperature": 0,
        "block_size": cpu_engine.BLOCK_SIZE,
        "kv_blocks": prefill.kv_blocks,
        "kv_recompute_threshold": prefill.settings.kv_recompute_threshold,
        "decoder_kv_blocks_ttl": [stage.TTL_SECONDS, stage.BRIEF_TTL_SECONDS],
        "handle_ttl_seconds": stage.ROUTER_TTL_SECONDS,
        "prefix_caching": "on, off (prefill); on, on (decode); off (reference)",
        "expiries": f"{EXPIRIES} for each seed",
        "restarts": f"one in every {RESTART_EVERY} parts; none with a router that compares nothing",
        "special": dict(stage.SPECIAL),
    }


def _versions(reference: Engine) -> dict[str, str]:
    with urllib.request.urlopen(f"{reference.url}/version", timeout=30) as answer:
        return {"kind": "vLLM" if reference.kind.is_real else "simulator", **json.load(answer)}


def _result(parts: Parts, given: argparse.Namespace, settings: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    sums = {name: together(list(of_arm.values())) for name, of_arm in parts.items()}
    kvloop, proof, stock = (sums.get(name, Tally()) for name in ("kvloop", "proof", "stock"))
    subject = kvloop if "kvloop" in sums else proof
    return {
        "turns": subject.turns,
        "wrong": subject.wrong,
        "stock_wrong": stock.wrong,
        "warm_share": round(subject.warm_share, 4),
        "reused_share": round(subject.reused_share, 4),
        "pulled_bytes": subject.pulled_bytes,
        "finished": _finished(parts, given),
        "engines": found.get("engines", {}),
        "machine": {
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
            "load": [round(load, 1) for load in os.getloadavg()],
        },
        "settings": settings,
        "arms": {arm.name: {"what": arm.says, **sums[arm.name].as_json()} for arm in ARMS if arm.name in sums},
    }


def _finished(parts: Parts, given: argparse.Namespace) -> bool:
    arms = [arm.name for arm in ARMS if given.engines in arm.engines and arm.name in given.arms]
    return all(seed in parts.get(name, {}) for name in arms for seed, _ in _parts(given))


def _told(parts: Parts, given: argparse.Namespace) -> int:
    sums = {name: together(list(of_arm.values())) for name, of_arm in parts.items()}
    console = Console()
    console.print(_table(sums))
    for name, tally in sums.items():
        for wrong in tally.wrongs if name != "stock" else ():
            console.print(f"{name}: {wrong}", style="red")
    if not _finished(parts, given):
        console.print("Not finished: go on with --resume.")
        return NOT_FINISHED
    subjects = [name for name in ("kvloop", "proof") if name in sums]
    found = [
        f"{name}: {fault}"
        for name in subjects
        for fault in faults(sums[name], sums.get("stock", Tally()), least_share=LEAST_SHARE)
    ]
    for fault in found:
        console.print(fault, style="red")
    return 1 if found or not subjects else 0


def _table(sums: dict[str, Tally]) -> Table:
    table = Table("kind of step", *(f"{name}: answers, wrong, failed, warm" for name in sums))
    kinds: Sequence[str] = list(dict.fromkeys(kind for tally in sums.values() for kind in tally.kinds))
    for kind in kinds:
        cells = []
        for tally in sums.values():
            of_kind = tally.kinds.get(kind)
            told = (of_kind.answers, of_kind.wrong, of_kind.failed, of_kind.warm) if of_kind else ()
            cells.append("  ".join(f"{number:>4}" for number in told))
        table.add_row(kind, *cells)
    table.add_section()
    for what in ("turns", "wrong", "failed", "warm_share", "reused_share", "reads", "pulled_bytes", "seconds"):
        values = (getattr(tally, what) for tally in sums.values())
        table.add_row(what, *(f"{value:.3f}" if what.endswith("share") else f"{value:,}" for value in values))
    return table


def _found(path: Path) -> dict[str, Any]:
    return {"engines": json.loads(path.read_text())["engines"]} if path.exists() else {}


def _read(path: Path, settings: dict[str, Any]) -> Parts:
    if not path.exists():
        return {}
    told = json.loads(path.read_text())
    if told["settings"] != settings:
        sys.exit(f"{path} is of a run with other settings; begin anew without --resume")
    return {
        name: {int(seed): tally_of(tally) for seed, tally in of_arm.items()} for name, of_arm in told["parts"].items()
    }


def _as_json(parts: Parts) -> dict[str, Any]:
    return {name: {seed: tally.as_json() for seed, tally in of_arm.items()} for name, of_arm in parts.items()}


def _write(path: Path, what: object) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(what, indent=2) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
