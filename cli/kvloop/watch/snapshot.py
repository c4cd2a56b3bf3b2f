"""What routers say at one moment, added up over all of them, and what happened between two moments. Pure but for
``read``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvloop.watch.access import RouterAdmin

_PREFIX = "kvloop_router_"
_WORST_FIRST = ("wrong", "failed", "unknown", "verified")

Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """at: seconds on any clock. samples: counters and histograms of the metrics, without their prefix."""

    at: float
    routers: int
    running_turns: int
    draining: int
    engines: tuple[Mapping[str, Any], ...]
    pairs: tuple[Mapping[str, Any], ...]
    templates: tuple[Mapping[str, Any], ...]
    samples: Mapping[Series, float]


@dataclass(frozen=True, slots=True)
class PathRow:
    """Turns of one path: how many, and what share of the time to first token and between two pieces is below; None
    where nothing was measured."""

    path: str
    turns: int
    ttft_median: float | None
    ttft_p95: float | None
    gap_median: float | None


@dataclass(frozen=True, slots=True)
class View:
    """What is shown. seconds: how long the interval is; None: since the routers' start."""

    now: Snapshot
    seconds: float | None
    paths: tuple[PathRow, ...]
    reasons: tuple[tuple[str, int], ...]
    reused_tokens: int
    computed_tokens: int


def read(routers: Sequence[RouterAdmin], at: float) -> Snapshot:
    """Ask all of them. Raises AccessError."""
    return merged([_read(router, at) for router in routers])


def _read(router: RouterAdmin, at: float) -> Snapshot:
    engines = router.json("/admin/v1/engines")
    return Snapshot(
        at=at,
        routers=1,
        running_turns=engines["runningTurns"],
        draining=int(engines["draining"]),
        engines=tuple(engines["engines"]),
        pairs=tuple(router.json("/admin/v1/pairs")["pairs"]),
        templates=tuple(router.json("/admin/v1/templates")["templates"]),
        samples=samples(router.text("/metrics")),
    )


def samples(text: str) -> dict[Series, float]:
    """Every counter and histogram in a Prometheus text of a router."""
    found: dict[Series, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type not in ("counter", "histogram") or not family.name.startswith(_PREFIX):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                name = sample.name.removeprefix(_PREFIX)
                found[name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def merged(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The sum of what several routers say; of each pair the worst verdict."""
    total: Counter[Series] = Counter()
    for snapshot in snapshots:
        total.update(snapshot.samples)
    engines: dict[str, dict[str, Any]] = {}
    for engine in (engine for snapshot in snapshots for engine in snapshot.engines):
        known = engines.setdefault(engine["name"], {**engine, **dict.fromkeys(_SUMMED, 0), "healthy": True})
        for field in _SUMMED:
            known[field] += engine[field]
        known["healthy"] = known["healthy"] and engine["healthy"]
    pairs: dict[tuple[str, str], Mapping[str, Any]] = {}
    for pair in (pair for snapshot in snapshots for pair in snapshot.pairs):
        key = (pair["prefill"], pair["decode"])
        pairs[key] = min(pairs.get(key, pair), pair, key=_badness)
    templates = {found["model"]: found for snapshot in snapshots for found in snapshot.templates}
    return Snapshot(
        at=max(snapshot.at for snapshot in snapshots),
        routers=sum(snapshot.routers for snapshot in snapshots),
        running_turns=sum(snapshot.running_turns for snapshot in snapshots),
        draining=sum(snapshot.draining for snapshot in snapshots),
        engines=tuple(engines[name] for name in sorted(engines)),
        pairs=tuple(pairs[key] for key in sorted(pairs)),
        templates=tuple(templates[model] for model in sorted(templates)),
        samples=dict(total),
    )


_SUMMED = ("load", "runningTurns", "liveHandles", "retainedBlocks")


def view(before: Snapshot | None, now: Snapshot) -> View:
    """What happened since ``before``, or since the routers' start. A router that was started anew counts from its
    start."""
    since = _since(before, now)
    turns = _by(since, "turns_total", "path")
    reasons = _by(since, "turns_total", "reason")
    paths = tuple(
        PathRow(
            path=path,
            turns=int(count),
            ttft_median=quantile(_buckets(since, "time_to_first_token_seconds", path), 0.5),
            ttft_p95=quantile(_buckets(since, "time_to_first_token_seconds", path), 0.95),
            gap_median=quantile(_buckets(since, "inter_token_seconds", path), 0.5),
        )
        for path, count in sorted(turns.items())
    )
    return View(
        now=now,
        seconds=None if before is None else now.at - before.at,
        paths=paths,
        reasons=tuple((reason, int(count)) for reason, count in reasons.most_common() if reason and count),
        reused_tokens=int(sum(_by(since, "reused_tokens_total", "path").values())),
        computed_tokens=int(sum(_by(since, "recomputed_tokens_total", "path").values())),
    )


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """The value below which this share lies, by interpolation within a bucket as Prometheus does.

    buckets: upper bounds and how many are below, in their order, the last bound infinite.
    """
    if not buckets or not buckets[-1][1]:
        return None
    wanted = share * buckets[-1][1]
    for (low, below), (high, up_to) in pairwise([(0.0, 0.0), *buckets]):
        if up_to >= wanted:
            if high == float("inf"):
                return low
            return low + (high - low) * (wanted - below) / (up_to - below)
    return None


def _since(before: Snapshot | None, now: Snapshot) -> dict[Series, float]:
    if before is None:
        return dict(now.samples)
    grown = {series: value - before.samples.get(series, 0.0) for series, value in now.samples.items()}
    return dict(now.samples) if any(value < 0 for value in grown.values()) else grown


def _by(since: Mapping[Series, float], name: str, label: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for (series, labels), value in since.items():
        if series == name and value:
            found[dict(labels).get(label, "")] += value  # type: ignore[assignment]  # a float that counts
    return found


def _buckets(since: Mapping[Series, float], name: str, path: str) -> list[tuple[float, float]]:
    found: dict[float, float] = {}
    for (series, labels), value in since.items():
        told = dict(labels)
        if series == name + "_bucket" and told["path"] == path:
            found[float(told["le"])] = value
    return sorted(found.items())


def _badness(pair: Mapping[str, Any]) -> int:
    return _WORST_FIRST.index(pair["verdict"]) if pair["verdict"] in _WORST_FIRST else len(_WORST_FIRST)


def document(shown: View) -> dict[str, Any]:
    """A view as JSON."""
    now = shown.now
    return {
        "routers": now.routers,
        "runningTurns": now.running_turns,
        "intervalSeconds": shown.seconds,
        "engines": [dict(engine) for engine in now.engines],
        "pairs": [dict(pair) for pair in now.pairs],
        "templates": [dict(found) for found in now.templates],
        "paths": [
            {
                "path": row.path,
                "turns": row.turns,
                "ttftMedianSeconds": row.ttft_median,
                "ttftP95Seconds": row.ttft_p95,
                "interTokenMedianSeconds": row.gap_median,
            }
            for row in shown.paths
        ],
        "reasons": dict(shown.reasons),
        "reusedTokens": shown.reused_tokens,
        "computedTokens": shown.computed_tokens,
    }


def failing(pairs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The pairs that are not verified."""
    return [pair for pair in pairs if pair["verdict"] != "verified"]
