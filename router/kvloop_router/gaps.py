"""How long the pieces of a streamed answer keep its client waiting, counted for one stream. Pure.

A histogram's own ``observe`` for each piece would cost more than passing the piece on: so each stream counts for
itself, and what it has counted is added up once, at its end.
"""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds of the counted classes; one more class has what is longer."""


class Gaps:
    """The times between two pieces that follow one another.

    counts: how many of them are within each of BOUNDS and above the last. total: their sum in seconds.
    """

    __slots__ = ("_last", "counts", "total")

    def __init__(self) -> None:
        self._last: float | None = None
        self.counts: list[int] | None = None
        self.total = 0.0

    def note(self, now: float) -> None:
        """A piece goes out at ``now``."""
        last = self._last
        self._last = now
        if last is None:
            return
        if self.counts is None:
            self.counts = [0] * (len(BOUNDS) + 1)
        self.counts[bisect_left(BOUNDS, now - last)] += 1
        self.total += now - last
