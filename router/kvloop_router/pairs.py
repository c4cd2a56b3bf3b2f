"""What is known of KV transfer between each prefill and each decode engine, and of the engines' tokenizer. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

import orjson

from kvloop_connector.settings import Role
from kvloop_router.engine_spec import EngineSpec

_SHAPES = 4096


class Verdict(StrEnum):
    """Whether KV was seen to move between two engines."""

    UNKNOWN = "unknown"
    VERIFIED = "verified"
    FAILED = "failed"
    WRONG = "wrong"
    """It moved, and what was computed with it was not what computing everything gives."""


@dataclass(frozen=True, slots=True)
class PairReport:
    """The last canary of a pair, and whether what it moved has been found wrong since.

    to_decode_bytes, to_prefill_bytes, to_decode_seconds, to_prefill_seconds: what the engines counted, and how long
    they say that the transfers took; 0 where it was not tried or they do not say.
    streams: whether a streamed answer carried the handle; None where it was not tried. attempts: canaries played.
    detail: what was wrong, or not tried; empty where nothing was.
    """

    prefill: EngineSpec
    decode: EngineSpec
    verdict: Verdict = Verdict.UNKNOWN
    to_decode_bytes: int = 0
    to_prefill_bytes: int = 0
    to_decode_seconds: float = 0.0
    to_prefill_seconds: float = 0.0
    streams: bool | None = None
    attempts: int = 0
    detail: str = ""

    def is_of(self, prefill: EngineSpec, decode: EngineSpec) -> bool:
        """Whether it is about these very processes."""
        return self.prefill.is_same(prefill) and self.decode.is_same(decode)


class Pairs:
    """The reports on all pairs of engines with the same KV revision, and the same model."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str], PairReport] = {}
        self._changes = 0

    @property
    def changes(self) -> int:
        """Another one whenever a report may be another."""
        return self._changes

    def update(self, specs: Iterable[EngineSpec]) -> None:
        """Take over what discovery says; a pair of which either process is new is unknown again."""
        specs = tuple(specs)
        reports: dict[tuple[str, str], PairReport] = {}
        for prefill in specs:
            for decode in specs:
                if (prefill.role, decode.role) != (Role.PREFILL, Role.DECODE):
                    continue
                if (prefill.kv_revision, prefill.model) != (decode.kv_revision, decode.model):
                    continue
                key = (prefill.name, decode.name)
                known = self._reports.get(key)
                if known is not None and known.is_of(prefill, decode):
                    reports[key] = replace(known, prefill=prefill, decode=decode)
                else:
                    reports[key] = PairReport(prefill, decode)
        self._reports = reports
        self._changes += 1

    def reports(self) -> tuple[PairReport, ...]:
        """All reports."""
        return tuple(self._reports.values())

    def record(self, report: PairReport) -> None:
        """Take over a canary's report, unless one of its engines has changed since."""
        key = (report.prefill.name, report.decode.name)
        known = self._reports.get(key)
        if known is None or known.verdict is Verdict.WRONG:
            return
        if known.is_of(report.prefill, report.decode):
            attempts = known.attempts + 1
            self._put(key, replace(report, prefill=known.prefill, decode=known.decode, attempts=attempts))

    def adopt(self, report: PairReport) -> None:
        """Take over what another worker of this router knows, unless one of the engines has changed since."""
        key = (report.prefill.name, report.decode.name)
        known = self._reports.get(key)
        if known is not None and known.is_of(report.prefill, report.decode):
            self._put(key, replace(report, prefill=known.prefill, decode=known.decode))

    def record_wrong(self, prefill: str, decode: str, detail: str) -> None:
        """What was reused between these processes was wrong: nothing is any more, as long as both of them live.

        No canary says otherwise: it sees that KV moves, and not that it is the right one.
        """
        for key, known in self._reports.items():
            if (known.prefill.process, known.decode.process) == (prefill, decode):
                self._put(key, replace(known, verdict=Verdict.WRONG, detail=detail))

    def usable(self, prefill: str, decode: str) -> bool:
        """Whether a handle may go between these two: all but those that are known to fail."""
        report = self._reports.get((prefill, decode))
        return report is not None and report.verdict not in (Verdict.FAILED, Verdict.WRONG)

    def _put(self, key: tuple[str, str], report: PairReport) -> None:
        self._reports[key] = report
        self._changes += 1


class Templates:
    """Whether the engines' ``/tokenize`` renders a request as its API does, by the request's shape.

    Learnt from a cold prefill leg that says which ids it rendered. Until then, and where it does not, no ids are sent
    and nothing is reused: a prompt of other tokens than the engine's own would be another prompt.

    Clients choose the shapes, so that only so many are known. An agreement can be forgotten, since it is learnt again;
    a disagreement cannot, since a prompt that does not show it could take its place.
    """

    def __init__(self, *, most: int = _SHAPES) -> None:
        self._most = most
        self._agreeing: OrderedDict[bytes, None] = OrderedDict()
        self._disagreeing: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._agreeing) + len(self._disagreeing)

    def agrees(self, shape: tuple[str, ...]) -> bool | None:
        """What is known of this shape; None: nothing yet."""
        key = _shape_key(shape)
        if key in self._disagreeing:
            return False
        if key not in self._agreeing:
            return None
        self._agreeing.move_to_end(key)
        return True

    def learn(self, shape: tuple[str, ...], tokenized: Sequence[int], rendered: Sequence[int]) -> bool:
        """Record whether the two are equal."""
        agrees = list(tokenized) == list(rendered)
        key = _shape_key(shape)
        room = len(self._disagreeing) < self._most
        if not agrees:
            self._agreeing.pop(key, None)
            if room:
                # A disagreement once seen stays: it can depend on what the shape leaves out.
                self._disagreeing.add(key)
        elif room and key not in self._disagreeing:
            self._agreeing[key] = None
            if len(self._agreeing) > self._most:
                self._agreeing.popitem(last=False)
        return agrees


def _shape_key(shape: tuple[str, ...]) -> bytes:
    """Stands for a shape, in which there can be long names that a client chose."""
    return blake2b(orjson.dumps(shape), digest_size=16).digest()
