"""The cap on what a decode engine retains, as the engine itself can keep to it.

``kvloop_connector.leases`` gives up the longest idle for newer ones, and spares what is being read. A decode engine
under NIXL's pull connector does not see reads: a prefill engine reads its memory past its processor, and says so when
it has ended. Any handle that has left the engine may be being read, so each counts as that from the moment it is
issued: nobody is ever given up, and a turn whose blocks would pass the cap is not retained and has no handle.

That is the bound. Making room below it is up to the router, which knows what it has given to nobody: it takes the
longest idle out of its store and releases them (``kvloop_connector.lease_requests``). What an engine would need to do
it alone is a claim that a prefill engine makes before it reads, and that the decode engine answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvloop_connector.leases import Leases, LeaseTerms

_NOW = 0.0
"""Nothing here depends on time: a lease ends when all workers have said that its blocks are free."""


class RetainedCap:
    """How many blocks one engine retains, at most ``most_blocks``. Those that several turns share count once."""

    def __init__(self, most_blocks: int) -> None:
        self._leases = Leases(LeaseTerms(seconds=math.inf, longest=math.inf, margin=0.0, most_blocks=most_blocks))
        self._grants: dict[str, int | None] = {}

    @property
    def blocks(self) -> int:
        """How many blocks are retained."""
        return self._leases.blocks

    def admit(self, turn: str, blocks: Iterable[int]) -> bool:
        """Whether ``blocks`` may be retained for the turn of this id; they count until ``ended``."""
        if self._leases.retain(turn, blocks, _NOW).deadline is None:
            return False
        self._grants[turn] = self._leases.claim(turn, _NOW).grant
        return True

    def ended(self, turn: str) -> None:
        """The turn's blocks are free: read, released or expired. Does nothing for a turn that was not admitted."""
        grant = self._grants.pop(turn, None)
        if grant is not None:
            self._leases.read(turn, grant, _NOW)
