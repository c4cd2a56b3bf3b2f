"""Waiting for a state, with a bound that only a state which never comes reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

DEADLINE_SECONDS: Final = 240

_POLL_SECONDS: Final = 0.05


def wait_until(condition: Callable[[], bool], *, what: str) -> None:
    """Wait until `condition` holds. Raises TimeoutError, with `what`, after DEADLINE_SECONDS."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {DEADLINE_SECONDS} s: {what}")
        time.sleep(_POLL_SECONDS)
