"""Questions about pods that decide what has to be asked for. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.live import Live, Object
from kvloop_operator.observe import is_ready, is_terminating
from kvloop_operator.reports import PairReport, Verdict


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


def missing_pods(live: Live, deployment: str) -> list[tuple[str, str]]:
    """The StatefulSets that have fewer pods than they should, as (kind, name)."""
    missing = []
    for role in Role:
        name = names.engine_name(deployment, role)
        statefulset = live.children.get(("StatefulSet", name))
        if statefulset is None:
            continue
        there = sum(role_of(pod) == role for pod in live.pods)
        if there < statefulset["spec"].get("replicas", 1):
            missing.append(("StatefulSet", name))
    return missing


def _runs(pod: Object) -> bool:
    statuses = pod["status"].get("containerStatuses", ())
    return any(status["name"] == names.ROUTER_CONTAINER and "running" in status["state"] for status in statuses)


def _revision(pod: Object) -> str:
    return str(pod["metadata"].get("labels", {}).get(names.LABEL_KV_REVISION, ""))
