"""Whether an engine gets turns, from what its health checks and its legs showed. Pure: now is an argument.

A check asks whether the process is there; so does a refused connection. Legs show more: an engine that answers its
checks and fails its legs is *suspect*, for a time that doubles each time, and is passed over as long as there is
another. A suspect engine is never left out altogether: what looks like its fault can be that of one client's requests,
which would take one engine after the other away from everybody. A 4xx says nothing about an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_LONGEST_SUSPICION_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """check_failures, check_successes: how many in a row change the verdict.

    leg_failures: how many in a row make an engine suspect. suspect_seconds: for how long, the first time.
    """

    check_failures: int = 2
    check_successes: int = 1
    leg_failures: int = 5
    suspect_seconds: float = 10.0


@dataclass(slots=True)
class Health:
    """What is known of one engine process.

    healthy: its last checks succeeded, and no connection was refused since.
    checks_failed, checks_succeeded, legs_failed: in a row. suspicions: without a leg that succeeded between them.
    """

    rules: Rules = Rules()
    healthy: bool = False
    checks_failed: int = 0
    checks_succeeded: int = 0
    legs_failed: int = 0
    suspicions: int = 0
    suspect_until: float = -inf

    def suspect(self, now: float) -> bool:
        """Whether others are to be preferred."""
        return now < self.suspect_until

    def vouched_for(self) -> None:
        """Somebody else has just seen it answer."""
        self.checks_failed = 0
        self.healthy = True

    def check_succeeded(self) -> None:
        """It has answered a check."""
        self.checks_failed = 0
        self.checks_succeeded += 1
        self.healthy = self.healthy or self.checks_succeeded >= self.rules.check_successes

    def check_failed(self) -> None:
        """It has not answered a check well, or not in time."""
        self.checks_succeeded = 0
        self.checks_failed += 1
        self.healthy = self.healthy and self.checks_failed < self.rules.check_failures

    def refused(self) -> None:
        """There was no connection to be had: nothing listens."""
        self.checks_succeeded = 0
        self.healthy = False

    def leg_succeeded(self) -> None:
        """A request was answered to its end."""
        self.legs_failed = self.suspicions = 0
        self.suspect_until = -inf

    def leg_failed(self, now: float) -> None:
        """A 5xx, a reset, a time that ran out, or an answer that broke off."""
        self.legs_failed += 1
        # One that was suspect is on trial: its next failure is enough.
        if self.legs_failed >= self.rules.leg_failures:
            self._suspect(now)

    def drains(self, now: float) -> None:
        """It aborts what is new and says that it is well: vLLM after SIGTERM, until all that runs there has ended.

        It either ends, or turns out to serve at the next try.
        """
        self._suspect(now)

    def _suspect(self, now: float) -> None:
        if self.suspect(now):
            # Legs that were on their way before.
            return
        seconds = self.rules.suspect_seconds * 2.0 ** min(self.suspicions, 16)
        self.suspicions += 1
        self.suspect_until = now + min(seconds, _LONGEST_SUSPICION_SECONDS)
