"""What the planner reads and what it answers: plain data, filled in by the executor.

Times are Unix seconds. A revision of a template is the StatefulSet controller's own name for it (the pod label
``controller-revision-hash``); a KV revision is the pod label ``kvloop.io/kv-revision``. Two templates may have one KV
revision: then their engines still pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvloop_connector.settings import Role


class Fault(StrEnum):
    """Why a pod's engine does not run and will not by waiting."""

    IMAGE = "image"
    """The image cannot be pulled, or the container cannot be created."""
    CRASH = "crash"
    """The engine ends again and again; at the moment it is not running."""
    UNSCHEDULABLE = "unschedulable"
    """No node has what the pod asks for, such as a free accelerator."""


@dataclass(frozen=True, slots=True)
class Breakage:
    """A fault that the cluster reports for a pod. ``detail`` is for people: ``ImagePullBackOff: …``."""

    fault: Fault
    detail: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One engine pod.

    ready: the condition Ready is true.
    not_ready_since: when Ready became false (the pod's creation where it never was true); ignored while ready.
    terminating: it has a deletionTimestamp.
    draining_since: value of the label ``kvloop.io/draining``; infinity where the value is no number.
    broken: only while the engine's container does not run. It then needs no draining.
    """

    name: str
    uid: str
    ordinal: int
    template_revision: str
    kv_revision: str
    ready: bool
    not_ready_since: float = 0.0
    terminating: bool = False
    draining_since: float | None = None
    broken: Breakage | None = None


@dataclass(frozen=True, slots=True)
class StatefulSet:
    """A role's StatefulSet.

    template_wanted: the live pod template is the desired one (a superset of it, as server-side apply compares).
    settled: status.observedGeneration is metadata.generation; else the two revisions are not known yet.
    """

    replicas: int
    partition: int
    template_wanted: bool
    settled: bool
    current_revision: str
    update_revision: str


@dataclass(frozen=True, slots=True)
class RoleState:
    """A role's StatefulSet, None where there is none yet, and its pods, terminating ones included."""

    statefulset: StatefulSet | None = None
    pods: tuple[Pod, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What all routers together say of one draining pod: the sum of their turns, and the handles that they share.

    acknowledged: every router knows that the pod drains, so that none starts a turn there any more. Without it, a
        router that has not seen the label yet could start one after it has said that there is none.
    last_deadline: when the last of the live handles expires.
    """

    running_turns: int
    live_handles: int
    last_deadline: float | None = None
    acknowledged: bool = True


@dataclass(frozen=True, slots=True)
class Observed:
    """The cluster as it is.

    reports: by pod UID, for pods that drain. A pod is left out where any router did not answer; where all answered
        and none knows the pod, its report is all zeros.
    """

    roles: Mapping[Role, RoleState]
    reports: Mapping[str, DrainReport] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """``spec.rollout``, and how long a pod may take to become ready before it counts as broken."""

    drain_timeout_seconds: float = 600
    honour_handles_seconds: float = 30
    max_surge: int = 0
    start_seconds: float = 3600


@dataclass(frozen=True, slots=True)
class Desired:
    """What the resource asks for. Both roles have one KV revision."""

    replicas: Mapping[Role, int]
    kv_revision: str
    settings: Settings = field(default_factory=Settings)
    paused: bool = False
    suspend: bool = False


@dataclass(frozen=True, slots=True)
class ApplyStatefulSet:
    """Apply the role's desired manifest with these two numbers in it, in one write: never one without the other, and
    never the template without them. Creates the StatefulSet where there is none."""

    role: Role
    replicas: int
    partition: int


@dataclass(frozen=True, slots=True)
class MarkDraining:
    """Set the pod's draining label to ``since``. Precondition: the pod still has this UID."""

    role: Role
    pod: str
    uid: str
    since: int


@dataclass(frozen=True, slots=True)
class UnmarkDraining:
    """Remove the pod's draining label. Precondition: the pod still has this UID."""

    role: Role
    pod: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod, gracefully. Precondition: the pod still has this UID."""

    role: Role
    pod: str
    uid: str


Action = ApplyStatefulSet | MarkDraining | UnmarkDraining | DeletePod


class Phase(StrEnum):
    """What a step is part of, for conditions."""

    PAUSED = "paused"
    APPLYING = "applying"
    """The StatefulSets get the desired template."""
    SCALING = "scaling"
    ROLLING = "rolling"
    STARTING = "starting"
    """Nothing to do but to wait for pods."""
    BLOCKED = "blocked"
    """A pod is broken at the wanted revision. What serves goes on serving; only an edit or a repair helps."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now.

    actions: to be done in this order; empty: wait. It is safe to stop after any of them.
    reason: what is done or waited for, for the status.
    again_at: when to plan again even if nothing changes; None: not before something changes.
    """

    phase: Phase
    reason: str
    actions: tuple[Action, ...] = ()
    again_at: float | None = None
