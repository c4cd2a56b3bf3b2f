"""A worker's part in what the workers of a router tell each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvloop_router.findings import Finding, Findings
from kvloop_router.pairs import Pairs, Verdict
from kvloop_router.state import State


class Exchange:
    """Takes over what other workers found out.

    plays: whether this one plays the canaries. forget: has all released that a decode process retains.
    """

    def __init__(
        self,
        *,
        state: State,
        pairs: Pairs,
        forget: Callable[[str], Awaitable[None]],
        heard: Findings,
        plays: bool,
    ) -> None:
        self.plays = plays
        self._state = state
        self._pairs = pairs
        self._forget = forget
        self._heard = heard
        state.salt_epoch = max(state.salt_epoch, heard.epoch)

    async def hear(self, heard: Findings) -> None:
        """What all workers together know, this one too."""
        self._heard = heard
        # Before anything is released: a turn that runs is then not kept.
        self._state.salt_epoch = max(self._state.salt_epoch, heard.epoch)
        await self.apply()

    async def apply(self) -> None:
        """Take over what was heard of the pairs that there are now."""
        for report in self._pairs.reports():
            finding = self._heard.pairs.get((report.prefill.process, report.decode.process))
            if finding is None or finding.weight <= Finding.of(report).weight:
                continue
            self._pairs.adopt(finding.about(report))
            if finding.verdict is Verdict.WRONG:
                await self._forget(report.decode.process)

    @property
    def state_of_knowledge(self) -> str:
        """Another text whenever what this one knows may be something else."""
        return f"{self._pairs.changes} {self._state.salt_epoch.hex()}"

    def tell(self) -> Findings:
        """What this one knows."""
        return Findings.of(self._state.salt_epoch, self._pairs.reports())
