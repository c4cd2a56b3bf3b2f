"""What the operator says about a resource, as a pure function of what it knows. Start with ``assess``."""

from __future__ import annotations

from kvloop_operator.status.assessment import assess
from kvloop_operator.status.reasons import ConditionType, Reason
from kvloop_operator.status.situation import Assessment, Problem, Situation, Transition

__all__ = ["Assessment", "ConditionType", "Problem", "Reason", "Situation", "Transition", "assess"]
