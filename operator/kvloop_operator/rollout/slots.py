"""The observed roles as rows of slots, and the question that decides nearly everything: is there a pair?

A slot is an ordinal of a StatefulSet, whether a pod lives there or not. What matters of it is at which revision its
next pod comes back, which is the StatefulSet controller's rule: at the update revision from the partition upwards, at
the current revision below it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvloop_connector.settings import Role
from kvloop_operator.rollout.facts import DrainReport, Pod, RoleState, Settings, StatefulSet

ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Slot:
    """One ordinal below ``replicas``.

    pod: who lives there and is to stay, as far as the StatefulSet is concerned; else None.
    condemned: who lives there and is being replaced: drained, outdated, and no longer protected by the partition.
    outdated: it has, or will get back, a pod of another template than the wanted one.
    heir: KV revision of the pod that comes where ``pod`` is None; None where that is not known.
    """

    ordinal: int
    pod: Pod | None
    condemned: Pod | None
    outdated: bool
    heir: str | None


@dataclass(frozen=True, slots=True)
class Row:
    """A role."""

    role: Role
    statefulset: StatefulSet
    slots: tuple[Slot, ...]
    pods: tuple[Pod, ...]
    """Those of the slots, lowest first."""
    stale: tuple[Slot, ...]
    """The outdated slots, highest first."""
    leftovers: tuple[Pod, ...]
    """Pods at or above ``replicas``, on their way out."""

    def comes_back_updated(self, ordinal: int) -> bool:
        return _comes_back_updated(self.statefulset, ordinal)

    def outdated(self, below: int) -> list[Slot]:
        """Outdated slots under an ordinal, highest first: the order in which a partition can be lowered."""
        return [slot for slot in self.stale if slot.ordinal < below]

    def living(self, start: int) -> list[Pod]:
        return [pod for pod in self.pods if pod.ordinal >= start]


def row(role: Role, state: RoleState, statefulset: StatefulSet, wanted_kv: str) -> Row:
    """Both revisions of the StatefulSet have to be known (settled)."""
    by_ordinal = {pod.ordinal: pod for pod in state.pods}
    current_kv = next(
        (pod.kv_revision for pod in state.pods if pod.template_revision == statefulset.current_revision), None
    )
    slots = tuple(
        _slot(ordinal, by_ordinal.get(ordinal), statefulset, wanted_kv=wanted_kv, current_kv=current_kv)
        for ordinal in range(statefulset.replicas)
    )
    return Row(
        role,
        statefulset,
        slots,
        pods=tuple([slot.pod for slot in slots if slot.pod is not None]),
        stale=tuple([slot for slot in reversed(slots) if slot.outdated]),
        leftovers=tuple([pod for pod in state.pods if pod.ordinal >= statefulset.replicas]),
    )


def _slot(ordinal: int, pod: Pod | None, statefulset: StatefulSet, *, wanted_kv: str, current_kv: str | None) -> Slot:
    if pod is None or pod.terminating:
        updated = _comes_back_updated(statefulset, ordinal)
        return Slot(ordinal, None, None, outdated=not updated, heir=wanted_kv if updated else current_kv)
    if pod.template_revision == statefulset.update_revision:
        return Slot(ordinal, pod, None, outdated=False, heir=None)
    if ordinal >= statefulset.partition and pod.draining_since is not None:
        return Slot(ordinal, None, pod, outdated=False, heir=wanted_kv)
    return Slot(ordinal, pod, None, outdated=True, heir=None)


def _comes_back_updated(statefulset: StatefulSet, ordinal: int) -> bool:
    return ordinal >= statefulset.partition or statefulset.current_revision == statefulset.update_revision


@dataclass(frozen=True, slots=True)
class View:
    """The cluster, arranged, at a moment."""

    rows: Mapping[Role, Row]
    wanted_kv: str
    reports: Mapping[str, DrainReport]
    settings: Settings
    now: float

    def unable(self, pod: Pod) -> bool:
        """Whether waiting will not make the pod ready."""
        return not pod.ready and (
            pod.broken is not None or self.now >= pod.not_ready_since + self.settings.start_seconds
        )

    def recovering(self, pod: Pod) -> bool:
        return not pod.ready and not self.unable(pod)

    def serves(self, leaving: Collection[str] = ()) -> bool:
        """Whether there is a ready pair of one KV revision without the pods whose UIDs are ``leaving``. Draining labels
        do not count: what is not leaving gets its label removed."""
        prefill, decode = (self._ready(role, leaving) for role in ROLES)
        return not prefill.isdisjoint(decode)

    def may_serve(self, leaving: Collection[str] = ()) -> bool:
        """The same, once every pod is ready that waiting can make ready."""
        prefill, decode = (self._ready(role, leaving) | self._coming(role, leaving) for role in ROLES)
        return not prefill.isdisjoint(decode)

    def drained(self, pod: Pod) -> bool:
        """Whether the pod may go. It needs to be labelled, unless its engine does not run."""
        return pod.broken is not None or self.drained_at(pod) <= self.now

    def drained_at(self, pod: Pod) -> float:
        """When the pod is drained if nothing more happens to it: at its bound at the latest."""
        if pod.draining_since is None:
            return float("inf")
        bound = pod.draining_since + self.settings.drain_timeout_seconds
        report = self.reports.get(pod.uid)
        if report is None or not report.acknowledged or report.running_turns > 0:
            return bound
        if report.live_handles == 0:
            return min(bound, pod.draining_since)
        honoured = pod.draining_since + self.settings.honour_handles_seconds
        if report.last_deadline is not None:
            honoured = min(honoured, report.last_deadline)
        return min(bound, honoured)

    def _ready(self, role: Role, leaving: Collection[str]) -> set[str]:
        return {pod.kv_revision for pod in self.rows[role].pods if pod.ready and pod.uid not in leaving}

    def _coming(self, role: Role, leaving: Collection[str]) -> set[str]:
        row = self.rows[role]
        heirs = {slot.heir for slot in row.slots if slot.pod is None and slot.heir is not None}
        return heirs | {pod.kv_revision for pod in row.pods if pod.uid not in leaving and self.recovering(pod)}
