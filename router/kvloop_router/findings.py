"""What the workers of a router tell each other of pairs of engines, so that what one found out counts for all. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvloop_router.pairs import PairReport, Verdict

Pair = tuple[str, str]
"""The processes of a prefill and a decode engine."""

BADNESS = {Verdict.VERIFIED: 0, Verdict.UNKNOWN: 1, Verdict.FAILED: 2, Verdict.WRONG: 3}
"""Of two verdicts the worse one counts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of a pair; see PairReport."""

    verdict: Verdict
    to_decode_bytes: int
    to_prefill_bytes: int
    to_decode_seconds: float
    to_prefill_seconds: float
    streams: bool | None
    attempts: int
    detail: str

    @property
    def weight(self) -> tuple[bool, int, int]:
        """The heavier of two is believed: what was found wrong stays so, else the canary that was played last."""
        return self.verdict is Verdict.WRONG, self.attempts, BADNESS[self.verdict]

    @classmethod
    def of(cls, report: PairReport) -> Finding:
        """What a report says."""
        return cls(**{name: getattr(report, name) for name in _FIELDS})

    def about(self, report: PairReport) -> PairReport:
        """The same, said of the engines of ``report``."""
        return PairReport(report.prefill, report.decode, **{name: getattr(self, name) for name in _FIELDS})


_FIELDS = tuple(each.name for each in fields(Finding))


@dataclass(frozen=True, slots=True)
class Findings:
    """epoch: as in ``scope.scope``; the greatest is the newest."""

    epoch: bytes = b""
    pairs: Mapping[Pair, Finding] = field(default_factory=dict)

    @classmethod
    def of(cls, epoch: bytes, reports: Iterable[PairReport]) -> Findings:
        """What a worker has found out, or heard."""
        return cls(epoch, {(report.prefill.process, report.decode.process): Finding.of(report) for report in reports})

    def told(self) -> dict[str, Any]:
        """As JSON."""
        pairs = [
            {"prefill": prefill, "decode": decode, **{name: getattr(finding, name) for name in _FIELDS}}
            for (prefill, decode), finding in self.pairs.items()
        ]
        return {"epoch": self.epoch.hex(), "pairs": pairs}

    @classmethod
    def heard(cls, told: Mapping[str, Any]) -> Findings:
        """What ``told`` gave."""
        pairs = {}
        for pair in told["pairs"]:
            fields_ = {name: pair[name] for name in _FIELDS} | {"verdict": Verdict(pair["verdict"])}
            pairs[pair["prefill"], pair["decode"]] = Finding(**fields_)
        return cls(bytes.fromhex(told["epoch"]), pairs)


def together(known: Findings, told: Sequence[Findings]) -> Findings:
    """What all know, of the pairs that one of them still has; what was found wrong for ever, since a process that is
    looked for anew may still be there. ``known`` where nobody says anything."""
    if not told:
        return known
    pairs = {pair: finding for pair, finding in known.pairs.items() if finding.verdict is Verdict.WRONG}
    for findings in told:
        for pair, finding in findings.pairs.items():
            before = pairs.get(pair, known.pairs.get(pair, finding))
            pairs[pair] = max(before, finding, key=lambda each: each.weight)
    return Findings(max(known.epoch, *(findings.epoch for findings in told)), pairs)
