"""What an assessment reads and what it gives: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.errors import Fault
from kvloop_operator.facts import Facts
from kvloop_operator.live import Live, Object, entries
from kvloop_operator.reports import PairReport
from kvloop_operator.rollout.facts import Step
from kvloop_operator.status.reasons import ConditionType, Reason


@dataclass(frozen=True, slots=True)
class Problem:
    """A write that the API server refused; ``message`` names the object and why."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that is known of a resource.

    previous: its status as it is now; empty where it has none.
    resource: None where it could not be parsed. facts: None where they could not be had.
    wanted_revision: the KV revision that its engines should have; empty where it is not known.
    step: what the planner answered: None where all is at rest.
    pairs: newest report on each pair of engines, by the UIDs of its pods; older polls' too.
    unreachable: routers that should have reported and did not, with why.
    unschedulable_seconds: how long a pod may find no node before waiting is no longer expected to help.
    """

    name: str
    namespace: str
    generation: int
    previous: Object
    resource: DisaggregatedInference | None
    facts: Facts | None
    faults: tuple[Fault, ...] = ()
    wanted_revision: str = ""
    live: Live = field(default_factory=Live)
    step: Step | None = None
    pairs: Mapping[tuple[str, str], PairReport] = field(default_factory=dict)
    unreachable: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    unschedulable_seconds: float = 600.0
    now: float


@dataclass(frozen=True, slots=True)
class Transition:
    """Something worth an Event."""

    type: Literal["Normal", "Warning"]
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Assessment:
    """The status, ready to be applied; when to assess again even if nothing changes; what to tell."""

    status: dict[str, Any]
    again_at: float | None = None
    transitions: tuple[Transition, ...] = ()


def previous_condition(status: Object, kind: ConditionType) -> Object:
    """A condition of a status; empty where it has none of this type."""
    return next((each for each in entries(status, "conditions") if each.get("type") == kind), {})
