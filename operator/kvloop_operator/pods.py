"""Questions about pods that decide what has to be asked for. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.live import Live, Object, Refusal, count, entries, part, text
from kvloop_operator.observe import condition, engine_status, is_ready, is_terminating, seconds
from kvloop_operator.reports import PairReport, Verdict

_NAMED_BY_PODS = ("ServiceAccount", "ResourceClaimTemplate")

STUCK_SECONDS = 20.0
"""A pod usually has its volumes and its network by then."""


def role_of(pod: Object) -> str:
    """``prefill``, ``decode`` or ``router``; empty where the label is gone."""
    return str(pod["metadata"].get("labels", {}).get(names.LABEL_ROLE, ""))


def router_pods(pods: Iterable[Object]) -> list[Object]:
    """The routers that may have turns running: leaving ones too, as long as their container runs."""
    return [pod for pod in pods if role_of(pod) == names.ROUTER and pod.get("status", {}).get("podIP") and _runs(pod)]


def unverified_pairs(pods: Sequence[Object], known: Mapping[tuple[str, str], PairReport]) -> bool:
    """Whether KV was not seen to move yet between some ready prefill and decode pods of one KV revision."""
    engines = [pod for pod in pods if is_ready(pod) and not is_terminating(pod)]
    prefills = [pod for pod in engines if role_of(pod) == Role.PREFILL]
    decodes = [pod for pod in engines if role_of(pod) == Role.DECODE]
    for prefill in prefills:
        for decode in decodes:
            if _revision(prefill) != _revision(decode):
                continue
            pair = known.get((prefill["metadata"]["uid"], decode["metadata"]["uid"]))
            if pair is None or pair.verdict is not Verdict.VERIFIED:
                return True
    return False


def engine_processes(pods: Iterable[Object], known: Mapping[str, str]) -> dict[str, str]:
    """Each pod's engine container, by the pod's UID: another one after a restart. What was ``known`` of a pod holds
    while its status names none."""
    found = {}
    for pod in pods:
        uid = pod["metadata"]["uid"]
        found[uid] = text(engine_status(pod), "containerID") or known.get(uid, "")
    return found


def unexplained(live: Live, deployment: str, now: float) -> list[tuple[str, str]]:
    """What only events explain, as (kind, name): StatefulSets that have fewer pods than they should, and pods that have
    a node and do not get as far as a container."""
    found = []
    for role in Role:
        name = names.engine_name(deployment, role)
        statefulset = live.children.get(("StatefulSet", name))
        if statefulset is None:
            continue
        there = sum(role_of(pod) == role for pod in live.pods)
        if there < statefulset["spec"].get("replicas", 1):
            found.append(("StatefulSet", name))
    return found + [("Pod", text(pod, "metadata", "name")) for pod in live.pods if _is_stuck(pod, now)]


def replica_failure(live: Live, deployment: str) -> Refusal | None:
    """Why the routers' pods are not made, as their Deployment says."""
    name = names.router_name(deployment)
    router = live.children.get(("Deployment", name), {})
    failure = condition(router, "ReplicaFailure")
    return Refusal("ReplicaSet", f"{name}-", text(failure, "message")) if failure.get("status") == "True" else None


def stuck_at(pods: Iterable[Object], now: float) -> float | None:
    """When the next pod will count as stuck, if nothing changes: no watch tells of that."""
    moments = [moment for pod in pods if (moment := _stuck_at(pod)) is not None and moment >= now]
    return min(moments, default=None)


def still_needed(live: Live, kind: str, name: str) -> bool:
    """Whether an engine of an earlier template has, or may get back, a pod that needs this object: without it a pod
    that is lost in mid-rollout could not be made anew."""
    if kind not in _NAMED_BY_PODS:
        return False
    statefulsets = [child for (child_kind, _), child in live.children.items() if child_kind == "StatefulSet"]
    specs = [part(pod, "spec") for pod in live.pods]
    specs += [part(statefulset, "spec", "template", "spec") for statefulset in statefulsets]
    return any(_names(spec, kind, name) for spec in specs) or any(map(_may_bring_back_the_old, statefulsets))


def _names(spec: Object, kind: str, name: str) -> bool:
    if kind == "ServiceAccount":
        return text(spec, "serviceAccountName") == name
    return any(text(claim, "resourceClaimTemplateName") == name for claim in entries(spec, "resourceClaims"))


def _may_bring_back_the_old(statefulset: Object) -> bool:
    """A pod that is gone comes back at the current revision below the partition."""
    status = part(statefulset, "status")
    if status.get("observedGeneration") != part(statefulset, "metadata").get("generation"):
        return True
    partition = count(statefulset, "spec", "updateStrategy", "rollingUpdate", "partition")
    return partition > 0 and text(status, "currentRevision") != text(status, "updateRevision")


def _is_stuck(pod: Object, now: float) -> bool:
    moment = _stuck_at(pod)
    return moment is not None and now > moment


def _stuck_at(pod: Object) -> float | None:
    """Until when a pod that has a node and no container yet may be on its way to one."""
    if is_terminating(pod) or text(pod, "status", "phase") != "Pending":
        return None
    placed = condition(pod, "PodScheduled")
    since = seconds(text(placed, "lastTransitionTime"))
    waiting = [text(status, "state", "waiting", "reason") for status in entries(pod, "status", "containerStatuses")]
    not_begun = all(reason in ("ContainerCreating", "PodInitializing") for reason in waiting)
    return since + STUCK_SECONDS if placed.get("status") == "True" and not_begun and since is not None else None


def _runs(pod: Object) -> bool:
    statuses = pod["status"].get("containerStatuses", ())
    return any(status["name"] == names.ROUTER_CONTAINER and "running" in status["state"] for status in statuses)


def _revision(pod: Object) -> str:
    return str(pod["metadata"].get("labels", {}).get(names.LABEL_KV_REVISION, ""))
