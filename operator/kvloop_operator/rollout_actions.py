"""Carrying out what the rollout planner says: plan, act, and plan again until there is nothing to do but to wait."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.apply import Children
from kvloop_operator.cluster.errors import NotFound
from kvloop_operator.cluster.kinds import POD, STATEFULSET
from kvloop_operator.compare import statefulset_needs_apply, template_differences
from kvloop_operator.live import Live, Object
from kvloop_operator.manifests.common import Manifest
from kvloop_operator.observe import observed
from kvloop_operator.rollout import (
    Action,
    ApplyStatefulSet,
    DeletePod,
    Desired,
    DrainReport,
    MarkDraining,
    Observed,
    Step,
    UnmarkDraining,
    plan,
)

_log = logging.getLogger(__name__)

_STEPS: Final = 10
"""More than a state of the cluster ever asks for at once."""


async def carry_out(
    desired: Desired,
    wanted: Mapping[Role, Manifest],
    *,
    children: Children,
    live: Callable[[], Live],
    drains: Callable[[], Mapping[str, DrainReport]],
    clock: Callable[[], float],
) -> Step | None:
    """Do what can be done now; gives the step that is waited for then, None where all is as desired.

    wanted: the manifest of each role's StatefulSet. live, drains: as they are at the moment of asking.
    Raises ApiError; a Conflict where the cluster is not as the store knows it.
    """
    step = None
    for _ in range(_STEPS):
        step = plan(desired, _observed(live(), wanted, drains(), children), clock())
        if step is None or not step.actions:
            break
        _log.info("rollout", extra={"resource": str(children.key), "step": step.reason, "phase": str(step.phase)})
        for action in step.actions:
            await _do(action, wanted, children, live())
        if children.problems:
            break
    if not desired.paused and not children.problems:
        await _repair(wanted, children, live())
    return step


def _observed(
    live: Live, wanted: Mapping[Role, Manifest], drains: Mapping[str, DrainReport], children: Children
) -> Observed:
    """As the planner reads it; a template that something in the API server will not have otherwise counts as wanted."""
    found = observed(live, wanted, drains)
    roles = dict(found.roles)
    for role, state in roles.items():
        statefulset = live.children.get(("StatefulSet", wanted[role]["metadata"]["name"]))
        if state.statefulset is None or state.statefulset.template_wanted or statefulset is None:
            continue
        if children.resists(wanted[role], template_differences(statefulset, wanted[role])):
            roles[role] = replace(state, statefulset=replace(state.statefulset, template_wanted=True))
    return replace(found, roles=roles)


async def _do(action: Action, wanted: Mapping[Role, Manifest], children: Children, live: Live) -> None:
    match action:
        case ApplyStatefulSet(role, replicas, partition):
            place = "StatefulSet", wanted[role]["metadata"]["name"]
            there = live.children.get(place)
            if there is None and not await children.free(STATEFULSET, place[1]):
                return
            paths = [f"spec.replicas={replicas}", f"partition={partition}"]
            await children.write(STATEFULSET, _numbered(wanted[role], replicas, partition), paths, live=there)
        case MarkDraining(_, name, uid, since):
            await _label(children, _pod(live, name, uid), str(since))
        case UnmarkDraining(_, name, uid):
            await _label(children, _pod(live, name, uid), None)
        case DeletePod(_, name, uid):
            await _delete(children, name, uid)


async def _label(children: Children, pod: Object, value: str | None) -> None:
    children.store.put(await children.api.label_pod(pod, names.LABEL_DRAINING, value))


async def _delete(children: Children, name: str, uid: str) -> None:
    deleted = await children.api.delete(POD, children.key.namespace, name, uid)
    if deleted is not None:
        children.store.put(deleted)


async def _repair(wanted: Mapping[Role, Manifest], children: Children, live: Live) -> None:
    """Put right what is neither the template nor the numbers, such as a label that somebody removed."""
    for manifest in wanted.values():
        statefulset = live.children.get(("StatefulSet", manifest["metadata"]["name"]))
        if statefulset is None:
            continue
        paths = statefulset_needs_apply(statefulset, manifest)
        if paths and not children.resists(manifest, paths):
            spec = statefulset["spec"]
            partition = spec["updateStrategy"].get("rollingUpdate", {}).get("partition", 0)
            await children.write(STATEFULSET, _numbered(manifest, spec["replicas"], partition), paths, live=statefulset)


def _numbered(manifest: Manifest, replicas: int, partition: int) -> Manifest:
    numbered = copy.deepcopy(manifest)
    numbered["spec"]["replicas"] = replicas
    numbered["spec"]["updateStrategy"]["rollingUpdate"]["partition"] = partition
    return numbered


def _pod(live: Live, name: str, uid: str) -> Object:
    for pod in live.pods:
        if (pod["metadata"]["name"], pod["metadata"]["uid"]) == (name, uid):
            return pod
    raise NotFound(f"pod {name}", status=404, message="it is not the pod that it was")
