"""What happened in each turn: one line in the log, and the recent ones for the admin API. No prompt text."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any

from kvloop_router import headers

_log = logging.getLogger(__name__)
_RECENT = 1000


@dataclass(slots=True)
class TurnReport:
    """A turn as it goes, and at its end as it went.

    reason: why it is not warm; empty where it is. reused_tokens: tokens of the prompt that prefill did not compute,
    within the prefix that the handle was proven to cover. no_handle: why nothing was kept; empty where something was.
    phase: how far it has come: ``queue``, ``prefill``, ``decode``, ``stream``.
    expected: where there was a choice, what each path was expected to cost, in seconds.
    status: of the answer; 499 where the client left. attempts: legs that failed, as ``leg engine error``.
    """

    request_id: str
    api: str
    model: str = ""
    path: str = "cold"
    reason: str = ""
    prompt_tokens: int | None = None
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
        return {name: value for name, value in told.items() if value}


class TurnLog:
    """The reports of the last turns, by request id."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, TurnReport] = OrderedDict()

    def record(self, report: TurnReport) -> None:
        """A turn has ended."""
        self._recent[report.request_id] = report
        self._recent.move_to_end(report.request_id)
        while len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        _log.info("turn", extra=asdict(report))

    def get(self, request_id: str) -> dict[str, Any] | None:
        """The report on a recent turn."""
        report = self._recent.get(request_id)
        return None if report is None else asdict(report)
