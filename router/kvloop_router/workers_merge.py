"""What the workers of a router say on their admin APIs, as what the router says. Pure.

Workers share their handles, so that each tells of all; turns and requests are each worker's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvloop_router.findings import BADNESS
from kvloop_router.pairs import Verdict

Answer = Mapping[str, Any]

_Rule = Callable[[Sequence[Any]], Any]


def _known(values: Sequence[Any]) -> Any:
    """What one says who knows it."""
    return next((value for value in values if value is not None), None)


def _least(values: Sequence[Any]) -> Any:
    return min((value for value in values if value is not None), default=None)


_OF_ENGINES: Mapping[str, _Rule] = {
    "load": sum,
    "loadTokens": sum,
    "runningTurns": sum,
    "liveHandles": max,
    "lastDeadlineSeconds": max,
    "retainedBlocks": max,
    "retainedBlocksLimit": _least,
    "ranks": max,
    # Of the same pod each says the same, but not at the same moment. An engine drains once all know it.
    "draining": all,
    "ready": all,
    "healthy": all,
    "suspect": any,
}
"""All else is the same wherever it is known."""


def engines(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of ``/admin/v1/engines``."""
    found: dict[tuple[str, str], list[Answer]] = {}
    for engine in (engine for answer in answers for engine in answer["engines"]):
        found.setdefault((engine["name"], engine["podUID"]), []).append(engine)
    return {
        "engines": [_merged(each) for each in found.values()],
        "draining": any(answer["draining"] for answer in answers),
        "runningTurns": sum(answer["runningTurns"] for answer in answers),
    }


def pairs(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of ``/admin/v1/pairs``: each pair's worst verdict, with what was measured then, and not of the others: one
    plays the canaries, and the others have heard of it."""
    worst: dict[tuple[str, ...], Answer] = {}
    for pair in (pair for answer in answers for pair in answer["pairs"]):
        key = tuple(pair[name] for name in ("prefill", "prefillPodUID", "decode", "decodePodUID"))
        worst[key] = max(worst.get(key, pair), pair, key=_weight)
    return {"pairs": list(worst.values())}


def turns(answers: Sequence[Answer], *, most: int) -> dict[str, Any]:
    """Of ``/admin/v1/turns``: the last ones, the last one first."""
    found = [turn for answer in answers for turn in answer["turns"]]
    return {"turns": sorted(found, key=lambda turn: -turn["at"])[:most]}


def templates(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of ``/admin/v1/templates``: of each model once."""
    found: dict[str, Answer] = {}
    for template in (template for answer in answers for template in answer["templates"]):
        found.setdefault(template["model"], template)
    return {"templates": list(found.values())}


def ready(answers: Iterable[tuple[int, str]], *, before: bool) -> tuple[bool, str]:
    """Whether the router is, and if not why, of each worker's status and text at ``/readyz``.

    It becomes ready when all its workers are, since connections come to each. It stays so as long as one is: a worker
    that is away takes no connections, and what one alone sees of the engines is no reason to turn all turns away.
    """
    faults = []
    able = 0
    for status, text in answers:
        if status == 200:
            able += 1
        else:
            faults.append(text.strip())
    if able and (before or not faults):
        return True, "ok"
    return False, faults[0] if faults else "no worker serves"


def _merged(told: Sequence[Answer]) -> dict[str, Any]:
    return {name: _OF_ENGINES.get(name, _known)([each[name] for each in told]) for name in told[0]}


def _weight(pair: Answer) -> tuple[int, int]:
    return BADNESS[Verdict(pair["verdict"])], pair["attempts"]
