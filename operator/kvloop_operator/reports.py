"""What routers say about engines and pairs, and what all of them say together.

A router's admin API is read once by each poll; nothing here asks it anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvloop_operator import names
from kvloop_operator.errors import OperatorError
from kvloop_operator.live import Object, part, text
from kvloop_operator.rollout.facts import DrainReport


class InvalidReport(OperatorError):
    """A router's answer that is not what its admin API gives."""


class Verdict(StrEnum):
    """Whether KV was seen to move between two engines, in both directions where that is asked for."""

    UNKNOWN = "unknown"
    VERIFIED = "verified"
    FAILED = "failed"
    WRONG = "wrong"
    """It moved, and what was computed with it was not what computing everything gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What one router says of one engine. ``last_deadline``, in Unix seconds: when the last live handle expires."""

    pod_uid: str
    running_turns: int
    live_handles: int
    last_deadline: float | None
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """The last canary over a pair, and whether what it moved has been found wrong since.

    to_decode_seconds, to_prefill_seconds: what the engines counted as transfer time of these bytes; 0 where they do
        not say.
    attempts: canaries played. detail: what was wrong; empty where nothing was.
    """

    prefill: str
    decode: str
    prefill_uid: str
    decode_uid: str
    kv_revision: str
    verdict: Verdict
    to_decode_bytes: int = 0
    to_prefill_bytes: int = 0
    to_decode_seconds: float = 0.0
    to_prefill_seconds: float = 0.0
    attempts: int = 0
    detail: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.prefill_uid, self.decode_uid


@dataclass(frozen=True, slots=True)
class RouterReport:
    """One router's answer. ``router``: its pod's name."""

    router: str
    engines: tuple[EngineReport, ...]
    pairs: tuple[PairReport, ...]


@dataclass(frozen=True, slots=True)
class Reports:
    """A poll of all routers.

    routers: how many should answer. failures: by router, why it did not and what to do; begins with its name.
    """

    routers: int = 0
    answered: tuple[RouterReport, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.answered) >= self.routers


def parse_report(router: str, engines: Any, pairs: Any, now: float) -> RouterReport:
    """The report in the answers of ``/admin/v1/engines`` and ``/admin/v1/pairs``; raises InvalidReport."""
    return RouterReport(
        router,
        tuple([_engine(each, now) for each in _list(engines, "engines")]),
        tuple([_pair(each) for each in _list(pairs, "pairs")]),
    )


def drain_reports(reports: Reports, pods: Iterable[Object]) -> dict[str, DrainReport]:
    """What all routers together say of those of ``pods`` that drain, by UID.

    Empty unless every router answered. A pod that none of them knows gets no turn from any of them.
    """
    if not reports.complete:
        return {}
    draining = {text(pod, "metadata", "uid") for pod in pods if names.LABEL_DRAINING in part(pod, "metadata", "labels")}
    return {uid: _sum(uid, reports) for uid in draining if uid}


def pair_reports(reports: Reports) -> dict[tuple[str, str], PairReport]:
    """Each pair's worst report over the routers that know it, by the UIDs of its prefill and its decode pod."""
    worst: dict[tuple[str, str], PairReport] = {}
    for router in reports.answered:
        for pair in router.pairs:
            known = worst.get(pair.key)
            if known is None or _BADNESS[pair.verdict] > _BADNESS[known.verdict]:
                worst[pair.key] = pair
    return worst


_BADNESS = {Verdict.VERIFIED: 0, Verdict.UNKNOWN: 1, Verdict.FAILED: 2, Verdict.WRONG: 3}


def _sum(uid: str, reports: Reports) -> DrainReport:
    known = [engine for router in reports.answered for engine in router.engines if engine.pod_uid == uid]
    deadlines = [engine.last_deadline for engine in known if engine.last_deadline is not None]
    return DrainReport(
        running_turns=sum(engine.running_turns for engine in known),
        # Routers share them, and each tells of all.
        live_handles=max((engine.live_handles for engine in known), default=0),
        last_deadline=max(deadlines, default=None),
        acknowledged=all(engine.draining for engine in known),
    )


def _engine(answer: Mapping[str, Any], now: float) -> EngineReport:
    handles = _whole(answer, "liveHandles")
    return EngineReport(
        pod_uid=_text(answer, "podUID"),
        running_turns=_whole(answer, "runningTurns"),
        live_handles=handles,
        last_deadline=now + _seconds(answer, "lastDeadlineSeconds") if handles else None,
        draining=answer.get("draining") is True,
    )


def _pair(answer: Mapping[str, Any]) -> PairReport:
    verdict = _text(answer, "verdict")
    if verdict not in set(Verdict):
        raise InvalidReport(f"verdict: {verdict!r} is none")
    return PairReport(
        prefill=_text(answer, "prefill"),
        decode=_text(answer, "decode"),
        prefill_uid=_text(answer, "prefillPodUID"),
        decode_uid=_text(answer, "decodePodUID"),
        kv_revision=_text(answer, "kvRevision"),
        verdict=Verdict(verdict),
        to_decode_bytes=_whole(answer, "toDecodeBytes"),
        to_prefill_bytes=_whole(answer, "toPrefillBytes"),
        to_decode_seconds=_seconds(answer, "toDecodeSeconds"),
        to_prefill_seconds=_seconds(answer, "toPrefillSeconds"),
        attempts=_whole(answer, "attempts"),
        detail=_text(answer, "detail") if "detail" in answer else "",
    )


def _list(answer: Any, field: str) -> list[Mapping[str, Any]]:
    found = answer.get(field) if isinstance(answer, Mapping) else None
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
        raise InvalidReport(f"{field}: not a list of objects")
    return found


def _text(answer: Mapping[str, Any], field: str) -> str:
    value = answer.get(field)
    if not isinstance(value, str):
        raise InvalidReport(f"{field}: {value!r} is no text")
    return value


def _whole(answer: Mapping[str, Any], field: str) -> int:
    value = answer.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidReport(f"{field}: {value!r} is no count")
    return value


def _seconds(answer: Mapping[str, Any], field: str) -> float:
    """Absent, as from a router of another version, and null are 0."""
    value = answer.get(field)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise InvalidReport(f"{field}: {value!r} is no duration")
    return float(value)
