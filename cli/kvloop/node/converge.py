"""Which pods of a workload to create or delete next. Pure.

Level-triggered: the answer follows from what is wanted and what is there, and is asked for again after every change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.node.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Existing:
    """A pod that is there. ``ordinal`` is None for a Deployment's pod; ``created`` orders pods by age."""

    name: str
    revision: str
    ready: bool
    terminating: bool
    ordinal: int | None = None
    created: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """A pod to create at ``revision``."""

    revision: str
    ordinal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """A pod to delete, with its grace period."""

    name: str


Step = Create | Delete


def next_steps(workload: Workload, pods: Sequence[Existing], *, current: str) -> tuple[Step, ...]:
    """``current`` is the revision that the workload had before the update in progress; without one, the wanted one."""
    if workload.kind == "StatefulSet":
        return _stateful_set_steps(workload, pods, current)
    return _deployment_steps(workload, pods)


def is_rolled_out(workload: Workload, pods: Sequence[Existing]) -> bool:
    """Every wanted pod is there, ready and at the wanted revision: the wanted revision becomes the current one."""
    good = [pod for pod in pods if pod.ready and not pod.terminating and pod.revision == workload.revision]
    return len(good) == len(pods) == workload.replicas


def _stateful_set_steps(workload: Workload, pods: Sequence[Existing], current: str) -> tuple[Step, ...]:
    by_ordinal = {pod.ordinal: pod for pod in pods}
    missing = [ordinal for ordinal in range(workload.replicas) if ordinal not in by_ordinal]
    steps: list[Step] = [
        Create(ordinal=ordinal, revision=workload.revision if ordinal >= workload.partition else current)
        for ordinal in missing
    ]
    steps += [
        Delete(name=pod.name)
        for pod in pods
        if pod.ordinal is not None and pod.ordinal >= workload.replicas and not pod.terminating
    ]
    if steps or workload.strategy == "OnDelete":
        return tuple(steps)
    # One at a time, highest ordinal first; those already updated must be ready before the next goes.
    for ordinal in reversed(range(workload.partition, workload.replicas)):
        pod = by_ordinal[ordinal]
        if pod.terminating:
            return ()
        if pod.revision != workload.revision:
            return (Delete(name=pod.name),)
        if not pod.ready:
            return ()
    return ()


def _deployment_steps(workload: Workload, pods: Sequence[Existing]) -> tuple[Step, ...]:
    living = [pod for pod in pods if not pod.terminating]
    new = [pod for pod in living if pod.revision == workload.revision]
    # Unready pods go first, then the youngest.
    old = sorted((p for p in living if p.revision != workload.revision), key=lambda p: (p.ready, -p.created))
    if workload.strategy == "Recreate" and (old or any(p.revision != workload.revision for p in pods)):
        return tuple(Delete(name=pod.name) for pod in old)
    surplus = sorted(new, key=lambda p: (p.ready, -p.created))[: max(0, len(new) - workload.replicas)]
    steps: list[Step] = [Delete(name=pod.name) for pod in surplus]
    room = workload.replicas + (workload.max_surge if old else 0) - len(living)
    steps += [Create(revision=workload.revision)] * max(0, min(room, workload.replicas - len(new)))
    ready = sum(pod.ready for pod in living)
    floor = workload.replicas - workload.max_unavailable
    for pod in old:
        if pod.ready and ready <= floor:
            break
        ready -= pod.ready
        steps.append(Delete(name=pod.name))
    return tuple(steps)
