"""What the rollout planner reads, from the objects of the API server."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.compare import template_wanted
from kvloop_operator.facts import LiveConnector
from kvloop_operator.live import Live, Object, count, entries, part, text
from kvloop_operator.rollout.facts import Breakage, DrainReport, Fault, Observed, Pod, RoleState, StatefulSet

_INDEX_LABEL = "apps.kubernetes.io/pod-index"
_REVISION_LABEL = "controller-revision-hash"
_LAST_NUMBER = re.compile(r"-([0-9]+)$")

IMAGE_REASONS = frozenset(
    {
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "SignatureValidationFailed",
    }
)
"""Why a container waits whose image is not there."""
CREATION_REASONS = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "PostStartHookError",
        "PreCreateHookError",
        "PreStartHookError",
        "RunContainerError",
    }
)
"""Why a container waits that cannot be made from what the pod says."""
BACK_OFF = "CrashLoopBackOff"


def observed(live: Live, wanted: Mapping[Role, Object], reports: Mapping[str, DrainReport]) -> Observed:
    """The roles as they are; ``wanted`` are the desired manifests of their StatefulSets."""
    return Observed({role: _role(live, wanted[role]) for role in Role}, reports)


def pods_of(live: Live, statefulset: str) -> list[Object]:
    """The pods that a StatefulSet has made, in no order."""
    return [pod for pod in live.pods if _is_of(pod, statefulset) and ordinal(pod) is not None]


def pod_of(pod: Object) -> Pod:
    """An engine pod as the planner sees it."""
    draining = part(pod, "metadata", "labels").get(names.LABEL_DRAINING)
    return Pod(
        name=text(pod, "metadata", "name"),
        uid=text(pod, "metadata", "uid"),
        ordinal=ordinal(pod) or 0,
        template_revision=text(pod, "metadata", "labels", _REVISION_LABEL),
        kv_revision=text(pod, "metadata", "labels", names.LABEL_KV_REVISION),
        ready=is_ready(pod),
        not_ready_since=not_ready_since(pod),
        terminating=is_terminating(pod),
        draining_since=None if draining is None else _since(draining),
        broken=breakage(pod),
    )


def breakage(pod: Object) -> Breakage | None:
    """Why the engine of a pod does not run and will not by waiting; None where it runs, or may yet."""
    engine = engine_status(pod)
    # In place of a pod that has ended as a whole its StatefulSet makes another.
    if part(engine, "state", "running") or text(pod, "status", "phase") == "Failed":
        return None
    for status in (*entries(pod, "status", "initContainerStatuses"), engine):
        fault = _fault(status)
        if fault is not None:
            return fault
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return Breakage(Fault.UNSCHEDULABLE, f"Unschedulable: {text(scheduled, 'message')}")
    return None


def ordinal(pod: Object) -> int | None:
    """The pod's place in its StatefulSet."""
    label = part(pod, "metadata", "labels").get(_INDEX_LABEL)
    if isinstance(label, str) and label.isdecimal():
        return int(label)
    found = _LAST_NUMBER.search(text(pod, "metadata", "name"))
    return int(found[1]) if found is not None else None


def is_ready(pod: Object) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def is_terminating(pod: Object) -> bool:
    return part(pod, "metadata").get("deletionTimestamp") is not None


def not_ready_since(pod: Object) -> float:
    """When the pod stopped being ready; its creation where it never was."""
    moment = seconds(text(condition(pod, "Ready"), "lastTransitionTime"))
    return moment if moment is not None else seconds(text(pod, "metadata", "creationTimestamp")) or 0.0


def condition(pod: Object, kind: str) -> Object:
    """One condition of an object; empty where it has none of this type."""
    return next((each for each in entries(pod, "status", "conditions") if each.get("type") == kind), {})


def engine_status(pod: Object) -> Object:
    """The status of the engine's container; empty before the kubelet has seen the pod."""
    statuses = entries(pod, "status", "containerStatuses")
    return next((each for each in statuses if each.get("name") == names.ENGINE_CONTAINER), {})


def seconds(timestamp: str) -> float | None:
    """Unix seconds of a timestamp in an object; None where it is none."""
    try:
        moment = datetime.fromisoformat(timestamp)
    except ValueError:
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _role(live: Live, wanted: Object) -> RoleState:
    name = text(wanted, "metadata", "name")
    pods = sorted((pod_of(pod) for pod in pods_of(live, name)), key=lambda pod: (pod.ordinal, pod.uid))
    return RoleState(statefulset_of(live, wanted), tuple(pods))


def statefulset_of(live: Live, wanted: Object) -> StatefulSet | None:
    """The StatefulSet that ``wanted`` asks for, as the planner sees it; None where there is none."""
    found = live.children.get(("StatefulSet", text(wanted, "metadata", "name")))
    return None if found is None else _statefulset(found, wanted)


def live_connector(statefulset: Object) -> LiveConnector | None:
    """What a role's engines have kvloop's package from; None where they do not have it."""
    template = part(statefulset, "spec", "template")
    for container in entries(template, "spec", "initContainers"):
        if container.get("name") == names.CONNECTOR_CONTAINER:
            revision = text(template, "metadata", "labels", names.LABEL_KV_REVISION)
            return LiveConnector(image=text(container, "image"), kv_revision=revision)
    return None


def _statefulset(live: Object, wanted: Object) -> StatefulSet:
    seen = part(live, "status").get("observedGeneration")
    current, update = text(live, "status", "currentRevision"), text(live, "status", "updateRevision")
    return StatefulSet(
        replicas=_replicas(live),
        partition=count(live, "spec", "updateStrategy", "rollingUpdate", "partition"),
        template_wanted=template_wanted(live, wanted),
        settled=bool(update) and seen == part(live, "metadata").get("generation"),
        # A StatefulSet that never had pods has no current revision of its own.
        current_revision=current or update,
        update_revision=update,
    )


def _replicas(statefulset: Object) -> int:
    """One where the field is absent, as the API server has it."""
    return count(statefulset, "spec", "replicas") if "replicas" in part(statefulset, "spec") else 1


def _is_of(pod: Object, statefulset: str) -> bool:
    owners = entries(pod, "metadata", "ownerReferences")
    return any(
        each.get("controller") is True and (each.get("kind"), each.get("name")) == ("StatefulSet", statefulset)
        for each in owners
    )


def _since(label: object) -> float:
    """The start in a draining label. Infinity where it is no number: routers send nothing to such a pod either."""
    return float(label) if isinstance(label, str) and re.fullmatch("[0-9]{1,15}", label) else math.inf


def _fault(status: Object) -> Breakage | None:
    waiting = part(status, "state", "waiting")
    reason = text(waiting, "reason")
    if reason in IMAGE_REASONS or reason in CREATION_REASONS:
        return Breakage(Fault.IMAGE, f"{reason}: {text(waiting, 'message')}")
    ended = part(status, "state", "terminated") or part(status, "lastState", "terminated")
    again = reason == BACK_OFF or (bool(part(status, "state", "terminated")) and count(status, "restartCount") > 0)
    if not again or (reason != BACK_OFF and _is_done(status)):
        return None
    return Breakage(Fault.CRASH, f"{BACK_OFF}: {ending(ended)}")


def _is_done(status: Object) -> bool:
    """Whether this is an init container that has done its work."""
    ended = part(status, "state", "terminated")
    return status.get("name") != names.ENGINE_CONTAINER and ended.get("exitCode") == 0


def ending(ended: Object) -> str:
    """How a container ended, in words; from ``terminated`` of its status."""
    code, reason = ended.get("exitCode"), text(ended, "reason")
    words = f"exit code {code}" if code is not None else "it ended"
    return f"{words} ({reason})" if reason and reason != "Error" else words
