"""The next step of a rollout, a scaling or a repair. Start reading here: ``plan``.

::

    paused? ─▶ templates applied? ─▶ revisions known? ─▶ targets, wave, departures ─▶ the first of
        labels to remove · numbers to write · pods to delete · labels to set · a wait · nothing

The planner has no memory: what goes on is read from pods, labels and StatefulSets, so that an edit, a revert or a new
operator process is nothing special. It relies on these rules of the StatefulSet controller (RollingUpdate, Parallel):

- a pod of another template than the update revision is deleted if its ordinal is at or above the partition;
- a pod that is gone comes back at the update revision at or above the partition, below it at the current revision;
- the current revision becomes the update revision once all replicas are updated and ready.

Hence the partition is never lowered to an ordinal before every outdated pod from there upwards is drained, and the
template is never written without a partition that protects every pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvloop_connector.settings import Role
from kvloop_operator.rollout import counts, waves
from kvloop_operator.rollout.counts import NO_DEPARTURE, Departure
from kvloop_operator.rollout.facts import (
    Action,
    ApplyStatefulSet,
    DeletePod,
    Desired,
    MarkDraining,
    Observed,
    Phase,
    Pod,
    Step,
    UnmarkDraining,
)
from kvloop_operator.rollout.slots import ROLES, Row, View, row
from kvloop_operator.rollout.waves import NO_WAVE, Hindrance, Wave

CLOCK_SLACK_SECONDS = 60
"""A draining label from further in the future than this is written anew: its bound would never come."""


def plan(desired: Desired, observed: Observed, now: float) -> Step | None:
    """The next step; None where everything is as desired and at rest."""
    if desired.paused:
        return Step(Phase.PAUSED, "paused: nothing is changed")
    wanted = {role: 0 if desired.suspend else desired.replicas[role] for role in ROLES}
    rows: dict[Role, Row] = {}
    applies: list[Action] = []
    unsettled = []
    for role in ROLES:
        statefulset = observed.roles[role].statefulset
        if statefulset is None:
            applies.append(ApplyStatefulSet(role, wanted[role], wanted[role]))
        elif not statefulset.template_wanted:
            applies.append(ApplyStatefulSet(role, statefulset.replicas, statefulset.replicas))
        elif not statefulset.settled:
            unsettled.append(role)
        else:
            rows[role] = row(role, observed.roles[role], statefulset, desired.kv_revision)
    if applies:
        return Step(Phase.APPLYING, "the engine template has changed; no pod is touched yet", tuple(applies))
    if unsettled:
        return Step(Phase.APPLYING, f"waiting for the StatefulSet controller to see {' and '.join(unsettled)}")
    return _next(View(rows, desired.kv_revision, observed.reports, desired.settings, now), wanted)


@dataclass(frozen=True, slots=True)
class _Intent:
    """What the present state asks for, before it is put in order."""

    view: View
    wanted: Mapping[Role, int]
    targets: Mapping[Role, int]
    hindrance: Hindrance | None
    wave: Wave
    wave_waits_for: str
    departure: Departure

    def wave_is_drained(self) -> bool:
        drained = all(pod.draining_since is not None and self.view.drained(pod) for _, pod in self.wave.pods())
        return drained and any(self.wave.slots.values())


def _next(view: View, wanted: Mapping[Role, int]) -> Step | None:
    intent = _intent(view, wanted)
    return (
        _remove_labels(intent) or _write_numbers(intent) or _delete_pods(intent) or _set_labels(intent) or _wait(intent)
    )


def _intent(view: View, wanted: Mapping[Role, int]) -> _Intent:
    rolling = counts.is_rolling(view, wanted)
    targets = {role: counts.target(view, view.rows[role], wanted[role], rolling=rolling) for role in ROLES}
    departure = counts.departure(view, targets)
    if departure.hold:
        # What cannot leave yet is part of the rollout: a partition below it would replace it.
        targets = {role: max(targets[role], view.rows[role].statefulset.replicas) for role in ROLES}
    hindrance = waves.hindrance(view, targets, wanted)
    wave, waits_for = NO_WAVE, ""
    started = waves.in_flight(view, targets)
    if departure.pods:
        # One step at a time, and fewer replicas make a shorter rollout.
        pass
    elif hindrance is None:
        wave, waits_for = waves.next_wave(view, targets)
        last_pair_goes = view.serves() and not view.serves(wave.uids())
        surged = counts.surge(view, wanted)
        too_few = any(view.rows[role].statefulset.replicas < surged[role] for role in ROLES)
        if rolling and too_few and (last_pair_goes or not started):
            wave, waits_for = NO_WAVE, ""
            targets = {role: max(targets[role], surged[role]) for role in ROLES}
    elif started and not hindrance.blocked:
        wave = waves.started_wave(view, targets)
    return _Intent(view, wanted, targets, hindrance, wave, waits_for, departure)


def _remove_labels(intent: _Intent) -> Step | None:
    """Whatever drains and need not any more serves again, before anything else."""
    staying = intent.wave.uids() | intent.departure.uids()
    cancelled = [
        (role, pod)
        for role in ROLES
        for pod in intent.view.rows[role].pods
        if pod.draining_since is not None and pod.uid not in staying
    ]
    if not cancelled:
        return None
    actions = tuple(UnmarkDraining(role, pod.name, pod.uid) for role, pod in cancelled)
    return Step(_phase(intent), f"serving again, as they no longer have to go: {_names(cancelled)}", actions)


def _write_numbers(intent: _Intent) -> Step | None:
    """Replicas and partition of both roles, and with them, in the same step, the deletion of a drained wave."""
    view = intent.view
    drained = intent.wave_is_drained()
    actions: list[Action] = []
    reasons = []
    for role in ROLES:
        statefulset = view.rows[role].statefulset
        replicas = _replicas(intent, role, wave_is_drained=drained)
        partition = _partition(intent, role, replicas, wave_is_drained=drained)
        if (replicas, partition) != (statefulset.replicas, statefulset.partition):
            actions.append(ApplyStatefulSet(role, replicas, partition))
            if replicas != statefulset.replicas:
                reasons.append(f"{role} goes from {statefulset.replicas} to {replicas} replicas")
    if drained:
        actions += [
            DeletePod(role, pod.name, pod.uid)
            for role, pod in intent.wave.pods()
            if view.rows[role].statefulset.current_revision == view.rows[role].statefulset.update_revision
        ]
        reasons.append(f"replacing what is drained: {_names(intent.wave.pods())}")
    if not actions:
        return None
    reason = "; ".join(reasons) or "setting the partitions so that every pod is protected"
    return Step(_phase(intent), reason, tuple(actions))


def _replicas(intent: _Intent, role: Role, *, wave_is_drained: bool) -> int:
    replicas = intent.view.rows[role].statefulset.replicas
    if replicas < intent.targets[role]:
        return intent.targets[role]
    while replicas > intent.wanted[role] and _may_drop(intent, role, replicas - 1, wave_is_drained=wave_is_drained):
        replicas -= 1
    return replicas


def _may_drop(intent: _Intent, role: Role, ordinal: int, *, wave_is_drained: bool) -> bool:
    pod = intent.view.rows[role].slots[ordinal].pod
    if ordinal < intent.targets[role]:
        # The accelerators that become free are for the pods that are replaced, not for a surge pod.
        return wave_is_drained and pod is not None and not pod.ready and waves.unschedulable(pod)
    return pod is None or (pod.uid in intent.departure.uids() and intent.view.drained(pod))


def _partition(intent: _Intent, role: Role, replicas: int, *, wave_is_drained: bool) -> int:
    """Where the current revision is the wanted one the partition decides nothing but which pods the controller may
    delete: none. Else it stands just above the highest outdated pod that stays."""
    row = intent.view.rows[role]
    if row.statefulset.current_revision == row.statefulset.update_revision:
        return replicas
    going = intent.wave.ordinals(role) if wave_is_drained else frozenset()
    staying = [slot.ordinal for slot in row.outdated(replicas) if slot.ordinal not in going]
    return max(staying) + 1 if staying else 0


def _delete_pods(intent: _Intent) -> Step | None:
    """Pods that the StatefulSet controller need not get to by itself: it replaces one at a time, and, with its feature
    MaxUnavailableStatefulSet, none while another pod is not ready."""
    view = intent.view
    pods = []
    for role in ROLES:
        for slot in view.rows[role].slots[: intent.targets[role]]:
            pod = slot.condemned or slot.pod
            if pod is None or not (slot.condemned or slot.outdated):
                continue
            comes_back_updated = view.rows[role].comes_back_updated(slot.ordinal)
            if comes_back_updated and (pod.broken is not None or (slot.condemned and view.drained(pod))):
                pods.append((role, pod))
    if not pods:
        return None
    actions = tuple(DeletePod(role, pod.name, pod.uid) for role, pod in pods)
    return Step(
        _phase(intent), f"deleting what is drained, or broken, at an unwanted revision: {_names(pods)}", actions
    )


def _set_labels(intent: _Intent) -> Step | None:
    """A wave's pods and leaving pods start to drain."""
    view = intent.view
    pods = [*intent.wave.pods(), *((role, pod) for role, pods in intent.departure.pods.items() for pod in pods)]
    unmarked = [
        (role, pod)
        for role, pod in pods
        if pod.draining_since is None or pod.draining_since > view.now + CLOCK_SLACK_SECONDS
    ]
    if not unmarked:
        return None
    since = int(view.now)
    actions = tuple(MarkDraining(role, pod.name, pod.uid, since) for role, pod in unmarked)
    why = "to be replaced" if intent.wave.pods() else "as fewer are wanted"
    return Step(_phase(intent), f"draining {_names(unmarked)}, {why}", actions)


def _wait(intent: _Intent) -> Step | None:
    view = intent.view
    draining = [*intent.wave.pods(), *((role, pod) for role, pods in intent.departure.pods.items() for pod in pods)]
    draining += [
        (role, slot.condemned) for role in ROLES for slot in view.rows[role].slots if slot.condemned is not None
    ]
    undrained = [(role, pod) for role, pod in draining if not view.drained(pod)]
    again_at = _again_at(intent, [pod for _, pod in undrained])
    if undrained:
        return Step(_phase(intent), f"waiting for {_draining(view, undrained)}", again_at=again_at)
    if intent.hindrance is not None:
        phase = Phase.BLOCKED if intent.hindrance.blocked else _phase(intent)
        return Step(phase, intent.hindrance.reason, again_at=again_at)
    if intent.departure.hold:
        phase = Phase.BLOCKED if intent.departure.blocked else Phase.SCALING
        return Step(phase, f"waiting for {intent.departure.hold}", again_at=again_at)
    if intent.wave_waits_for:
        return Step(Phase.ROLLING, f"waiting for {intent.wave_waits_for}", again_at=again_at)
    for role in ROLES:
        if view.rows[role].statefulset.current_revision != view.rows[role].statefulset.update_revision:
            return Step(_phase(intent), f"waiting for the StatefulSet controller to complete {role}", again_at=again_at)
    if intent.departure is not NO_DEPARTURE:
        return Step(Phase.SCALING, "waiting for pods to end", again_at=again_at)
    return None


def _again_at(intent: _Intent, undrained: list[Pod]) -> float | None:
    """When time alone changes the plan: a drain's end, or a pod that has taken too long to become ready."""
    view = intent.view
    moments = [view.drained_at(pod) for pod in undrained]
    moments += [
        pod.not_ready_since + view.settings.start_seconds
        for role in ROLES
        for pod in view.rows[role].pods
        if view.recovering(pod)
    ]
    return min((moment for moment in moments if moment > view.now), default=None)


def _phase(intent: _Intent) -> Phase:
    if counts.is_rolling(intent.view, intent.wanted) or intent.wave.pods():
        return Phase.ROLLING
    if any(intent.view.rows[role].statefulset.replicas != intent.wanted[role] for role in ROLES):
        return Phase.SCALING
    return Phase.STARTING


def _names(pods: list[tuple[Role, Pod]]) -> str:
    return ", ".join(pod.name for _, pod in pods)


def _draining(view: View, pods: list[tuple[Role, Pod]]) -> str:
    words = []
    for _, pod in pods:
        report = view.reports.get(pod.uid)
        if report is None or not report.acknowledged:
            state = "not every router has reported"
        else:
            state = f"running turns: {report.running_turns}, live handles: {report.live_handles}"
        words.append(f"{pod.name} to drain ({state})")
    return ", ".join(words)
