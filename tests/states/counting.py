"""A simulated engine that remembers, for each ask, how many tokens of the prompt it did not compute."""

from __future__ import annotations

import re
from typing import Any, Final

from kvloop_sim.engine import Engine
from kvloop_sim.records import EngineRequest, EngineSettings

_ASK: Final = re.compile(r"\bask-(\d+)\b")


class CountingEngine(Engine):
    """``had``: by the number of the ask."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.had: dict[int, int] = {}

    def _finish(self, request: EngineRequest, reason: str, now: float) -> dict[str, Any] | None:
        ask = ask_of(request.request_id)
        if ask is not None:
            self.had[ask] = request.local_tokens + request.external_tokens
        return super()._finish(request, reason, now)


def ask_of(request_id: str) -> int | None:
    """The number of the ask that an engine's request belongs to."""
    found = _ASK.search(request_id)
    return int(found[1]) if found else None
