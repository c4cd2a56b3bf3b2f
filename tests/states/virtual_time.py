"""An event loop whose clock stands still while anything can be done, and else jumps to what is due next.

Whatever waits for time, waits for nothing: ten minutes of patience cost as little as a millisecond. All that talk with
one another have to run in this loop; what another thread or process does takes no time.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Final

_ROUND_SECONDS: Final = 1e-7
"""What a round of the loop takes: timers are called a little early, and who finds it too early asks again."""


class _Jumping(selectors.DefaultSelector):
    """Never waits where something else is due; adds the wait to ``now`` instead. Seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As of a selector; what is on its way through the loopback interface is there already."""
        self.now += _ROUND_SECONDS
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing is left that could happen")
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its time is 0 in the beginning."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds."""
        return self._jumping.now
