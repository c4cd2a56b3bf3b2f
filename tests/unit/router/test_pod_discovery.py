"""Engines from pods: which pod is one, and that list and watch end in what is there, however they were interrupted."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.settings import Role
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.pod_discovery import (
    Pods,
    WatchExpired,
    WatchFailed,
    engine_of,
    listed,
    observed,
    selector,
)

READY = {"type": "Ready", "status": "True"}
UNREADY = {"type": "Ready", "status": "False"}
RUNNING = {"name": "engine", "state": {"running": {}}, "started": True, "containerID": "containerd://1"}
SIDECAR = {"name": "sidecar", "state": {"running": {}}, "started": True, "containerID": "containerd://2"}


def pod(name: str = "demo-decode-0", **changes: Any) -> dict[str, Any]:
    """A pod that serves; ``labels``, ``meta`` and ``status`` are merged."""
    labels = {"kvloop.io/deployment": "demo", "kvloop.io/role": "decode", "kvloop.io/kv-revision": "abc"}
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [READY], "containerStatuses": [SIDECAR, RUNNING]}
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "labels": merged(labels, changes.get("labels", {})),
            **changes.get("meta", {}),
        },
        "status": merged(status, changes.get("status", {})),
    }


def merged(defaults: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Without what is None."""
    return {key: value for key, value in (defaults | changes).items() if value is not None}


def container(**changes: Any) -> list[dict[str, Any]]:
    return [{**RUNNING, **changes}]


def test_a_ready_pod_is_an_engine() -> None:
    assert engine_of(pod(labels={"topology.kubernetes.io/zone": "eu-1a"})) == EngineSpec(
        name="demo-decode-0",
        role=Role.DECODE,
        url="http://10.0.0.1:8000",
        pod_uid="uid-demo-decode-0",
        process="uid-demo-decode-0/containerd://1",
        kv_revision="abc",
        zone="eu-1a",
        checked=True,
    )


def with_probe(name: str, scheme: str | None) -> dict[str, Any]:
    """A pod whose engine is probed so, beside a container that is probed otherwise."""
    probe = {"httpGet": {"path": "/health", "port": "http", **({} if scheme is None else {"scheme": scheme})}}
    other = {"name": "sidecar", "readinessProbe": {"httpGet": {"path": "/", "port": 1, "scheme": "HTTPS"}}}
    return {**pod(name), "spec": {"containers": [other, {"name": "engine", "readinessProbe": probe}]}}


def test_each_engine_is_spoken_to_as_its_own_pod_is_probed() -> None:
    # In a rollout some have certificates already and others not yet.
    pods = [with_probe("before", None), with_probe("written-out", "HTTP"), with_probe("after", "HTTPS")]
    found = listed({"metadata": {"resourceVersion": "1"}, "items": pods})
    assert {engine.name: engine.url for engine in found.engines} == {
        "before": "http://10.0.0.1:8000",
        "written-out": "http://10.0.0.1:8000",
        "after": "https://10.0.0.1:8000",
    }


def test_an_engine_that_comes_back_with_a_certificate_is_another_one() -> None:
    before = listed({"metadata": {"resourceVersion": "1"}, "items": [with_probe("demo-decode-0", None)]})
    after = with_probe("demo-decode-0", "HTTPS")
    after["metadata"] |= {"uid": "another", "resourceVersion": "2"}
    (engine,) = observed(before, {"type": "ADDED", "object": after}).engines
    assert engine.url == "https://10.0.0.1:8000"
    assert not engine.is_same(before.engines[0])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"labels": {"kvloop.io/role": "router"}}, id="of another role"),
        pytest.param({"labels": {"kvloop.io/role": None}}, id="of no role"),
        pytest.param({"labels": {"kvloop.io/kv-revision": None}}, id="of no revision"),
        pytest.param({"status": {"podIP": None}}, id="without an address"),
        pytest.param({"status": {"phase": "Failed"}}, id="that failed"),
        pytest.param(
            {"status": {"conditions": [UNREADY], "containerStatuses": container(started=False)}}, id="that starts"
        ),
        pytest.param({"status": {"conditions": [UNREADY], "containerStatuses": None}}, id="of which nothing is known"),
        pytest.param({"status": {"containerStatuses": container(state={"waiting": {}})}}, id="that waits"),
        pytest.param(
            {
                "meta": {"deletionTimestamp": "now"},
                "status": {"containerStatuses": container(state={"terminated": {}})},
            },
            id="whose process has ended",
        ),
    ],
)
def test_no_engine_is_in_a_pod(changes: dict[str, Any]) -> None:
    assert engine_of(pod(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "ready", "draining"),
    [
        pytest.param({}, True, False, id="serving"),
        pytest.param({"labels": {"kvloop.io/draining": "1764460800"}}, True, True, id="labelled"),
        pytest.param({"labels": {"kvloop.io/draining": ""}}, True, True, id="labelled without a time"),
        pytest.param({"meta": {"deletionTimestamp": "2026-11-30T00:00:00Z"}}, True, True, id="terminating"),
        pytest.param(
            {"meta": {"deletionTimestamp": "2026-11-30T00:00:00Z"}, "status": {"conditions": [UNREADY]}},
            False,
            True,
            id="terminating and no longer ready",
        ),
        pytest.param({"status": {"conditions": [UNREADY]}}, False, False, id="up, and not ready now"),
        pytest.param({"status": {"conditions": None}}, False, False, id="up, and nothing said of it"),
    ],
)
def test_what_is_to_be_done_with_an_engine(changes: dict[str, Any], ready: bool, draining: bool) -> None:
    engine = engine_of(pod(**changes))
    assert engine is not None
    assert (engine.ready, engine.checked, engine.draining) == (ready, ready, draining)


@pytest.mark.parametrize(("labelled", "deleted", "ending"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_an_engine_ends_when_it_is_deleted_after_it_drained(labelled: int, deleted: int, ending: bool) -> None:
    engine = engine_of(
        pod(
            labels={"kvloop.io/draining": "1"} if labelled else {}, meta={"deletionTimestamp": "now"} if deleted else {}
        )
    )
    assert engine is not None
    assert engine.ending is ending


def test_a_container_that_was_restarted_is_another_process_of_the_same_pod() -> None:
    before, after = engine_of(pod()), engine_of(pod(status={"containerStatuses": container(containerID="x://2")}))
    assert before is not None
    assert after is not None
    assert before.pod_uid == after.pod_uid
    assert before.process != after.process
    assert not before.is_same(after)


def test_containers_of_two_pods_are_never_the_same_process() -> None:
    """A runtime that names them alike would have a handle's issuer taken for somebody else."""
    one, other = engine_of(pod("demo-decode-0")), engine_of(pod("demo-decode-1"))
    assert one is not None
    assert other is not None
    assert one.process != other.process


def test_an_address_of_ipv6_is_put_in_brackets() -> None:
    engine = engine_of(pod(status={"podIP": "fd00::1"}))
    assert engine is not None
    assert engine.url == "http://[fd00::1]:8000"


def test_pods_are_selected_by_deployment_and_role() -> None:
    assert selector("demo") == "kvloop.io/deployment=demo,kvloop.io/role in (prefill,decode)"


@pytest.mark.parametrize("answer", [None, [], {"metadata": {}}, {"metadata": {"resourceVersion": "1"}, "items": [1]}])
def test_an_answer_that_is_no_list_ends_the_watch(answer: Any) -> None:
    with pytest.raises(WatchFailed):
        listed(answer)


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        ({"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}, WatchExpired),
        ({"type": "ERROR", "object": {"code": 500, "reason": "InternalError", "message": "no"}}, WatchFailed),
        ({"type": "ERROR"}, WatchFailed),
        ({"type": "ADDED", "object": {}}, WatchFailed),
        ("text", WatchFailed),
    ],
)
def test_an_event_that_ends_the_watch(event: Any, fault: type[Exception]) -> None:
    with pytest.raises(fault):
        observed(Pods("1", {}), event)


class Cluster:
    """A model of the API server: pods, and all that ever happened to them. ``version``: also of what others do."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.made = 0
        self.version = 0

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """What a router should know."""
        found = [engine for name in sorted(self.pods) if (engine := engine_of(self.pods[name])) is not None]
        return tuple(found)

    def list(self) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": str(self.version)}, "items": copy.deepcopy(list(self.pods.values()))}

    def change(self, name: str, how: str) -> None:
        """One thing that can happen to a pod; what is not possible now does not happen."""
        known = self.pods.get(name)
        if how == "make":
            if known is None:
                self.made += 1
                status = {"conditions": [UNREADY], "containerStatuses": None}
                self._happened("ADDED", pod(name, meta={"uid": f"uid-{self.made}"}, status=status))
            return
        if known is None:
            return
        if how == "delete":
            self._happened("DELETED", known)
            return
        changed = copy.deepcopy(known)
        if how == "ready":
            changed["status"] |= {"conditions": [READY], "containerStatuses": container()}
        elif how == "unready":
            changed["status"]["conditions"] = [UNREADY]
        elif how == "restart":
            self.made += 1
            changed["status"]["containerStatuses"] = container(containerID=f"x://{self.made}")
        elif how == "crash":
            changed["status"]["containerStatuses"] = container(state={"terminated": {}})
        elif how == "drain":
            changed["metadata"]["labels"]["kvloop.io/draining"] = "1"
        elif how == "undrain":
            changed["metadata"]["labels"].pop("kvloop.io/draining", None)
        elif how == "terminate":
            changed["metadata"]["deletionTimestamp"] = "now"
        self._happened("MODIFIED", changed)

    def _happened(self, kind: str, thing: dict[str, Any]) -> None:
        thing = copy.deepcopy(thing)
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        self.events.append({"type": kind, "object": thing})
        if kind == "DELETED":
            del self.pods[thing["metadata"]["name"]]
        else:
            self.pods[thing["metadata"]["name"]] = thing


HAPPENINGS = st.tuples(
    st.sampled_from(["demo-decode-0", "demo-decode-1", "demo-prefill-0"]),
    st.sampled_from(["make", "ready", "unready", "restart", "crash", "drain", "undrain", "terminate", "delete"]),
)
BOOKMARK, RELIST = "bookmark", "relist"


@given(st.lists(HAPPENINGS | st.sampled_from([BOOKMARK, RELIST]), max_size=60), st.data())
def test_after_every_event_exactly_what_is_there_is_known(steps: Sequence[Any], data: st.DataObject) -> None:
    """Also where a watch broke, and all that happened until the next list was never seen."""
    cluster = Cluster()
    pods, connected = listed(cluster.list()), True
    for step in steps:
        if step == RELIST:
            pods, connected = listed(cluster.list()), True
        elif step == BOOKMARK:
            cluster.version += 1
            if connected:
                bookmark = {"metadata": {"resourceVersion": str(cluster.version)}}
                pods = observed(pods, {"type": "BOOKMARK", "object": bookmark})
        else:
            seen = len(cluster.events)
            cluster.change(*step)
            connected = connected and data.draw(st.integers(0, 9), label="breaks") > 0
            if connected:
                for event in cluster.events[seen:]:
                    pods = observed(pods, event)
        if connected:
            assert pods.engines == cluster.engines
            assert pods.version == str(cluster.version)
    assert listed(cluster.list()).engines == cluster.engines


@given(st.lists(HAPPENINGS, max_size=40), st.data())
def test_events_that_come_again_or_of_pods_in_another_order_change_nothing(
    steps: Sequence[tuple[str, str]], data: st.DataObject
) -> None:
    """What happened to one pod comes in order; a watch that goes on from an older version tells some of it twice."""
    cluster = Cluster()
    for step in steps:
        cluster.change(*step)
    by_uid: dict[str, list[dict[str, Any]]] = {}
    for event in cluster.events:
        by_uid.setdefault(event["object"]["metadata"]["uid"], []).append(event)
    queues = [queue + queue[-1:] if data.draw(st.booleans(), label="again") else queue for queue in by_uid.values()]
    # A name is made known anew only after the pod that had it before.
    first = [queue[0] for queue in queues]
    pods = Pods("0", {})
    for event in first:
        pods = observed(pods, event)
    rest = [queue[1:] for queue in queues]
    while any(rest):
        index = data.draw(st.sampled_from([index for index, queue in enumerate(rest) if queue]), label="next")
        pods = observed(pods, rest[index].pop(0))
    assert pods.engines == cluster.engines
