"""When a container that ended is started again: Kubernetes' restart policy and crash-loop back-off. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """In seconds. The first restart is immediate, the next waits ``base``, then twice as long each time to ``limit``.

    A container that ran for twice ``limit`` starts over, as in the kubelet.
    """

    base: float = 10
    limit: float = 300

    def delay(self, quick_ends: int) -> float:
        """The pause before the restart after ``quick_ends`` ends in a row (1: the first)."""
        if quick_ends <= 1:
            return 0
        # The exponent is bounded so that a container that fails for weeks does not overflow a float.
        return min(self.limit, self.base * 2.0 ** min(quick_ends - 2, 64))

    def ends_in_a_row(self, quick_ends: int, *, ran: float) -> int:
        """The count after one more end of a container that ``ran`` so long."""
        return 1 if ran >= 2 * self.limit else quick_ends + 1


def is_restarted(policy: str, exit_code: int) -> bool:
    """Whether a container of a pod with this restart policy is started again after it ended with ``exit_code``."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)
