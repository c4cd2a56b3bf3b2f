"""Rolling, scaling and draining engines, as pure functions of what is observed. Start with ``planner.plan``."""

from __future__ import annotations

from kvloop_operator.rollout.facts import (
    Action,
    ApplyStatefulSet,
    Breakage,
    DeletePod,
    Desired,
    DrainReport,
    Fault,
    MarkDraining,
    Observed,
    Phase,
    Pod,
    RoleState,
    Settings,
    StatefulSet,
    Step,
    UnmarkDraining,
)
from kvloop_operator.rollout.planner import plan

__all__ = [
    "Action",
    "ApplyStatefulSet",
    "Breakage",
    "DeletePod",
    "Desired",
    "DrainReport",
    "Fault",
    "MarkDraining",
    "Observed",
    "Phase",
    "Pod",
    "RoleState",
    "Settings",
    "StatefulSet",
    "Step",
    "UnmarkDraining",
    "plan",
]
