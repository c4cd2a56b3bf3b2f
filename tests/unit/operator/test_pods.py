"""Which pods have to be asked about."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_operator import names
from kvloop_operator.live import Live, Object
from kvloop_operator.pods import (
    STUCK_SECONDS,
    engine_processes,
    replica_failure,
    router_pods,
    still_needed,
    stuck_at,
    unexplained,
    unverified_pairs,
)
from kvloop_operator.reports import PairReport, Verdict

_PLACED = "2026-11-30T00:00:00Z"
_PLACED_AT = 1795996800.0


def _pod(
    name: str, role: str, *, revision: str = "r1", ready: bool = True, going: bool = False, **status: Any
) -> Object:
    metadata: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "labels": {names.LABEL_ROLE: role, names.LABEL_KV_REVISION: revision},
    }
    if going:
        metadata["deletionTimestamp"] = _PLACED
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {"metadata": metadata, "status": {"conditions": [condition], "phase": "Running", **status}}


def _pair(verdict: Verdict) -> PairReport:
    return PairReport(
        prefill="p",
        decode="d",
        prefill_uid="uid-p",
        decode_uid="uid-d",
        kv_revision="r1",
        verdict=verdict,
        to_decode_bytes=1,
        to_prefill_bytes=1,
        to_decode_seconds=0.0,
        to_prefill_seconds=0.0,
        attempts=1,
        detail="",
    )


_P, _D = _pod("p", "prefill"), _pod("d", "decode")


@pytest.mark.parametrize(
    ("pods", "known", "expected"),
    [
        ([_P, _D], None, True),
        ([_P, _D], Verdict.UNKNOWN, True),
        ([_P, _D], Verdict.FAILED, True),
        ([_P, _D], Verdict.WRONG, True),
        ([_P, _D], Verdict.VERIFIED, False),
        ([_P], None, False),
        ([_P, _pod("d", "decode", revision="r2")], None, False),
        ([_P, _pod("d", "decode", ready=False)], None, False),
        ([_P, _pod("d", "decode", going=True)], None, False),
    ],
    ids=["new", "unknown", "failed", "wrong", "verified", "alone", "other-revision", "not-ready", "going"],
)
def test_a_pair_is_asked_about_until_it_is_verified(pods: list[Object], known: Verdict | None, expected: bool) -> None:
    reports = {} if known is None else {("uid-p", "uid-d"): _pair(known)}
    assert unverified_pairs(pods, reports) is expected


def test_a_router_that_leaves_is_asked_as_long_as_it_runs() -> None:
    running: dict[str, Any] = {"podIP": "10.0.0.1", "containerStatuses": [{"name": "router", "state": {"running": {}}}]}
    ended: dict[str, Any] = {
        "podIP": "10.0.0.1",
        "containerStatuses": [{"name": "router", "state": {"terminated": {}}}],
    }
    pods = [
        _pod("serving", "router", **running),
        _pod("leaving", "router", going=True, ready=False, **running),
        _pod("ended", "router", going=True, **ended),
        _pod("new", "router", ready=False),
        _pod("engine", "prefill", **running),
    ]
    assert [pod["metadata"]["name"] for pod in router_pods(pods)] == ["serving", "leaving"]


def _waiting(reason: str | None, *, placed: str = "True") -> Object:
    statuses = [] if reason is None else [{"name": "engine", "state": {"waiting": {"reason": reason}}}]
    scheduled = {"type": "PodScheduled", "status": placed, "lastTransitionTime": _PLACED}
    return _pod("p", "prefill", phase="Pending", conditions=[scheduled], containerStatuses=statuses)


@pytest.mark.parametrize(
    ("pod", "after", "expected"),
    [
        (_waiting("ContainerCreating"), STUCK_SECONDS + 1, True),
        (_waiting(None), STUCK_SECONDS + 1, True),
        (_waiting("ContainerCreating"), STUCK_SECONDS - 1, False),
        (_waiting("ImagePullBackOff"), STUCK_SECONDS + 1, False),
        (_waiting(None, placed="False"), STUCK_SECONDS + 1, False),
        (_P, STUCK_SECONDS + 1, False),
    ],
    ids=["creating", "no-container", "not-long", "says-why", "no-node", "runs"],
)
def test_events_are_read_of_a_pod_that_gets_no_further_and_does_not_say_why(
    pod: Object, after: float, expected: bool
) -> None:
    found = unexplained(Live(pods=(pod,)), "demo", _PLACED_AT + after)
    assert found == ([("Pod", "p")] if expected else [])


def test_events_are_read_of_a_statefulset_that_lacks_pods() -> None:
    children = {("StatefulSet", f"demo-{role}"): {"spec": {"replicas": 1}} for role in ("prefill", "decode")}
    assert unexplained(Live(children=children, pods=(_P,)), "demo", 0.0) == [("StatefulSet", "demo-decode")]


def test_a_deployment_says_itself_why_its_pods_are_refused() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    live = Live(children={("Deployment", "demo-router"): {"status": {"conditions": [failure]}}})
    refusal = replica_failure(live, "demo")
    assert refusal is not None
    assert (refusal.kind, refusal.name, refusal.message) == ("ReplicaSet", "demo-router-", "exceeded quota")
    assert replica_failure(Live(), "demo") is None


def test_the_next_look_is_when_a_pod_gets_stuck() -> None:
    moment = _PLACED_AT + STUCK_SECONDS
    going = _pod("p", "prefill", going=True, phase="Pending")
    assert stuck_at([_waiting(None, placed="False"), _P, going, _waiting("ImagePullBackOff")], _PLACED_AT) is None
    assert stuck_at([_waiting("ContainerCreating"), _P], _PLACED_AT) == moment
    assert stuck_at([_waiting(None)], moment) == moment
    assert stuck_at([_waiting(None)], moment + 0.1) is None


def test_an_engine_that_was_started_again_is_another_process() -> None:
    first = {"name": names.ENGINE_CONTAINER, "containerID": "containerd://1"}
    sidecar = {"name": "sidecar", "containerID": "containerd://9"}
    known = engine_processes([_pod("d", "decode", containerStatuses=[sidecar, first])], {})
    assert known == {"uid-d": "containerd://1"}
    unnamed = {"name": names.ENGINE_CONTAINER, "state": {"waiting": {"reason": "ContainerCreating"}}}
    assert engine_processes([_pod("d", "decode", containerStatuses=[unnamed])], known) == known
    second = {**first, "containerID": "containerd://2"}
    assert engine_processes([_pod("d", "decode", containerStatuses=[second])], known) == {"uid-d": "containerd://2"}
    assert engine_processes([_pod("p", "prefill")], known) == {"uid-p": ""}


_ACCOUNT, _CLAIM = ("ServiceAccount", "models"), ("ResourceClaimTemplate", "demo-decode-efa")
_FORMER = {
    "serviceAccountName": "models",
    "resourceClaims": [{"name": "efa", "resourceClaimTemplateName": "demo-decode-efa"}],
}


def _statefulset(
    *, template: Object | None = None, partition: int = 0, current: str = "new", seen: int = 3
) -> dict[tuple[str, str], Object]:
    spec = {
        "template": {"spec": template or {}},
        "updateStrategy": {"rollingUpdate": {"partition": partition}},
    }
    status = {"observedGeneration": seen, "currentRevision": current, "updateRevision": "new"}
    return {("StatefulSet", "demo-decode"): {"metadata": {"generation": 3}, "spec": spec, "status": status}}


@pytest.mark.parametrize("place", [_ACCOUNT, _CLAIM], ids=["account", "claim"])
@pytest.mark.parametrize(
    ("live", "expected"),
    [
        (Live(children=_statefulset(), pods=(_D,)), False),
        (Live(children=_statefulset(), pods=({**_D, "spec": _FORMER},)), True),
        (Live(children=_statefulset(template=_FORMER)), True),
        (Live(children=_statefulset(partition=1, current="old")), True),
        (Live(children=_statefulset(partition=0, current="old")), False),
        (Live(children=_statefulset(partition=1)), False),
        (Live(children=_statefulset(seen=2)), True),
        (Live(), False),
    ],
    ids=["all-new", "old-pod", "old-template", "old-comes-back", "new-comes-back", "at-rest", "unseen", "no-engines"],
)
def test_what_engines_of_the_former_template_need_stays_until_none_can_come_back(
    live: Live, place: tuple[str, str], expected: bool
) -> None:
    assert still_needed(live, *place) is expected


def test_what_no_pod_names_is_never_kept_for_one() -> None:
    live = Live(children=_statefulset(template=_FORMER, partition=1, current="old"))
    assert not still_needed(live, "NetworkPolicy", "models")
