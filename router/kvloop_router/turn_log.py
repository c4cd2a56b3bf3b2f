"""What happened in each turn: one line in the log, and the recent ones for the admin API. No prompt text."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvloop_router import headers
from kvloop_router.errors import EngineError, EngineRejected, EngineUnreachable, StreamBroken
from kvloop_router.gaps import Gaps
from kvloop_router.logs import Fields
from kvloop_router.outline import Outline
from kvloop_router.trace_context import TraceContext

_log = logging.getLogger(__name__)
_RECENT = 1000
_OUTLINE_BYTES = 16 * 1024 * 1024
_REASONING = re.compile(rb'"reasoning(?:_content)?":\s*"(?!")|<think>')


@dataclass(slots=True)
class LegReport:
    """One request to an engine.

    leg: ``tokenize``, ``prefill`` or ``decode``. began: seconds after the turn did. seconds: None while it runs.
    outcome: ``running``, ``ok``, ``unreachable``, ``rejected``, ``failed`` or ``broken`` by the engine, or ``cut`` from
        this side, since the client left.
    trace: of its own span, where the turn is traced.
    """

    leg: str
    engine: str
    began: float
    seconds: float | None = None
    outcome: str = "running"
    trace: TraceContext | None = None

    def headers(self, of_turn: Mapping[str, str]) -> Mapping[str, str]:
        """The headers that it is sent with: those of its turn, under its own span."""
        return of_turn if self.trace is None else {**of_turn, **self.trace.headers()}

    def told(self) -> dict[str, Any]:
        """For the log and the admin API."""
        return {
            "leg": self.leg,
            "engine": self.engine,
            "began": _rounded(self.began),
            "seconds": _rounded(self.seconds),
            "outcome": self.outcome,
        }


@dataclass(slots=True)
class TurnReport:
    """A turn as it goes, and at its end as it went.

    at: when it began, Unix time. clock, began: the router's clock, and what it said then.
    tenant: the name of its API key, where that has one.
    reason: why it is not warm; empty where it is. reused_tokens: tokens of the prompt that prefill did not compute
    because of the handle. retained_tokens: how many the handle covers that was taken.
    no_handle: why nothing was kept; empty where something was.
    phase: how far it has come: ``queue``, ``prefill``, ``decode``, ``stream``.
    expected: where there was a choice, what each path was expected to cost, in seconds.
    status: of the answer; 499 where the client left. attempts: legs that failed, as ``leg engine error``.
    reasoned: whether the answer begins with reasoning; None where that is not known.
    trace: the context of its span; None where it is not traced. parent: the client's span id; empty without one.
    """

    request_id: str
    api: str
    at: float
    clock: Callable[[], float]
    tenant: str = ""
    model: str = ""
    path: str = "cold"
    reason: str = ""
    prompt_tokens: int | None = None
    retained_tokens: int | None = None
    proven_tokens: int = 0
    reused_tokens: int = 0
    prefill: str = ""
    decode: str = ""
    status: int = 0
    streamed: bool = False
    broken: bool = False
    no_handle: str = ""
    attempts: list[str] = field(default_factory=list)
    expected: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    ttft_seconds: float | None = None
    prefill_seconds: float | None = None
    phase: str = "queue"
    reasoned: bool | None = None
    legs: list[LegReport] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    outline: Outline | None = None
    trace: TraceContext | None = None
    parent: str = ""
    new_span: Callable[[], str] | None = None
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def no_prefill(self) -> str:
        """Why a decode leg had no parameters of a prefill leg."""
        return "local" if self.path == "local" else "none_from_prefill"

    def headers(self) -> dict[str, str]:
        """The headers that tell the client."""
        told = {
            headers.REQUEST_ID: self.request_id,
            headers.PATH: self.path,
            headers.REUSED_TOKENS: str(self.reused_tokens),
            headers.REASON: self.reason,
            headers.PREFILL: self.prefill,
            headers.DECODE: self.decode,
        }
        if self.api.startswith(headers.MESSAGES):
            told[headers.ANTHROPICS_REQUEST_ID] = self.request_id
        return {name: value for name, value in told.items() if value}

    def first_byte(self, now: float, data: bytes) -> None:
        """The answer begins, with ``data``: a model that reasons does so first."""
        self.ttft_seconds = now - self.began
        self.reasoned = _REASONING.search(data) is not None

    def leg(self, leg: str, engine: str) -> _Leg:
        """Record a request to an engine for as long as the context lasts, and how it ended."""
        report = LegReport(leg, engine, self.clock() - self.began)
        if self.trace is not None and self.new_span is not None:
            report.trace = self.trace.child(self.new_span())
        self.legs.append(report)
        return _Leg(report, self)

    def told(self) -> dict[str, Any]:
        """For the log and the admin API: nothing of the prompt, of keys or of other headers than the request id."""
        return {
            "request_id": self.request_id,
            "api": self.api,
            "tenant": self.tenant,
            "model": self.model,
            "path": self.path,
            "reason": self.reason,
            "prompt_tokens": self.prompt_tokens,
            "retained_tokens": self.retained_tokens,
            "proven_tokens": self.proven_tokens,
            "reused_tokens": self.reused_tokens,
            "prefill": self.prefill,
            "decode": self.decode,
            "status": self.status,
            "streamed": self.streamed,
            "broken": self.broken,
            "no_handle": self.no_handle,
            "attempts": self.attempts,
            "expected": self.expected,
            "seconds": _rounded(self.seconds),
            "ttft_seconds": _rounded(self.ttft_seconds),
            "prefill_seconds": _rounded(self.prefill_seconds),
            "phase": self.phase,
            "at": round(self.at, 3),
            "legs": [leg.told() for leg in self.legs],
            "trace_id": self.trace.trace_id if self.trace is not None else "",
        }


class _Leg:
    """A request on its way, as a context."""

    __slots__ = ("_report", "_turn")

    def __init__(self, report: LegReport, turn: TurnReport) -> None:
        self._report = report
        self._turn = turn

    def __enter__(self) -> LegReport:
        return self._report

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        report, turn = self._report, self._turn
        report.outcome = "ok" if error is None else _outcome(error)
        report.seconds = turn.clock() - turn.began - report.began


class Tracing(Protocol):
    """Makes spans of turns."""

    def begin(self, report: TurnReport, incoming: Mapping[str, str]) -> None:
        """A turn begins, at the request of a client that sent these headers."""
        ...

    def end(self, report: TurnReport) -> None:
        """It has ended."""
        ...


class TurnLog:
    """The reports of the last turns, by request id.

    clock: the router's. wall_clock: Unix time. tracing: None where nothing is traced.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        tracing: Tracing | None = None,
        most: int = _RECENT,
        outline_bytes: int = _OUTLINE_BYTES,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._tracing = tracing
        self._recent: OrderedDict[str, TurnReport] = OrderedDict()
        self._most = most
        self._outline_room = outline_bytes

    def begin(self, request_id: str, api: str, incoming: Mapping[str, str]) -> TurnReport:
        """A report on a turn that begins now, at the request of a client that sent these headers."""
        report = TurnReport(request_id=request_id, api=api, at=self._wall_clock(), clock=self._clock)
        if self._tracing is not None:
            self._tracing.begin(report, incoming)
        return report

    def record(self, report: TurnReport) -> None:
        """A turn has ended."""
        before = self._recent.pop(report.request_id, None)
        self._outline_room += _size(before) - _size(report)
        self._recent[report.request_id] = report
        while len(self._recent) > self._most or (self._outline_room < 0 and len(self._recent) > 1):
            _, oldest = self._recent.popitem(last=False)
            self._outline_room += _size(oldest)
        if report.trace is not None and self._tracing is not None:
            self._tracing.end(report)
        if _log.isEnabledFor(logging.INFO):
            _log.handle(Fields(_log.name, "turn", self._wall_clock(), report.told()))

    def get(self, request_id: str) -> TurnReport | None:
        """The report on a recent turn."""
        return self._recent.get(request_id)

    def __iter__(self) -> Iterator[TurnReport]:
        """The recent turns, the last one first."""
        return reversed(self._recent.values())


def _size(report: TurnReport | None) -> int:
    return 0 if report is None or report.outline is None else report.outline.size


def _outcome(error: BaseException) -> str:
    match error:
        case EngineUnreachable():
            return "unreachable"
        case EngineRejected():
            return "rejected"
        case StreamBroken():
            return "broken"
        case EngineError():
            return "failed"
    return "cut"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
