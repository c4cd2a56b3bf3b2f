"""Whether a router takes turns, as ``/readyz`` tells."""

from __future__ import annotations

from kvloop_router import policy
from kvloop_router.config import Config
from kvloop_router.engines import Engines
from kvloop_router.state import State


def unready(config: Config, state: State, engines: Engines) -> str | None:
    """Why no turn can be played; None where one can."""
    if state.draining:
        return "draining"
    snapshot = engines.snapshot()
    if policy.has_pair(snapshot) or config.suspended:
        return None
    reason, message = policy.why_unavailable(snapshot)
    return f"{reason}: {message}"
