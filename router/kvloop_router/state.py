"""What the whole process is at: running turns, and whether it is shutting down."""

from __future__ import annotations

import asyncio
from random import Random

_COUNT_BYTES = 4


class State:
    """Shared by all handlers. ``started``: Unix time. salt_epoch: as in ``scope.scope``."""

    def __init__(self, started: float, random: Random) -> None:
        self.started = started
        self.random = random
        self.draining = False
        self.salt_epoch = b""
        self._turns = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin_epoch(self) -> None:
        """Leave behind what prefix caches hold. Epochs are ordered: of those that workers know the greatest counts."""
        count = int.from_bytes(self.salt_epoch[:_COUNT_BYTES]) + 1
        self.salt_epoch = count.to_bytes(_COUNT_BYTES) + self.random.randbytes(16)

    @property
    def turns(self) -> int:
        """Turns that are running."""
        return self._turns

    def begins(self) -> None:
        """A turn runs."""
        self._turns += 1
        self._idle.clear()

    def ends(self) -> None:
        """It does not any more."""
        self._turns -= 1
        if self._turns == 0:
            self._idle.set()

    async def drained(self) -> None:
        """Wait until no turn runs."""
        await self._idle.wait()
