"""What the planner is told of pods and StatefulSets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.desired import desired
from kvloop_operator.observe import breakage, observed, ordinal, pod_of
from kvloop_operator.rollout import Breakage, Fault, Observed
from tests.unit.operator.scenes import NOW, Scene, crashing, ended, ending, pod, running, scene, unschedulable, waiting
from tests.unit.operator.stored import replaced


def seen(shown: Scene) -> Observed:
    wanted = {
        Role(each["metadata"]["labels"][names.LABEL_ROLE]): each
        for each in desired(shown.resource, shown.facts)
        if each["kind"] == "StatefulSet"
    }
    return observed(shown.live, wanted, {})


def engine(*containers: dict[str, Any], **details: Any) -> dict[str, Any]:
    return pod("demo-decode-0", "decode", *containers, **details)


def test_a_ready_pod_is_what_its_labels_say() -> None:
    found = pod_of(engine(revision="abc", kv="def"))
    assert (found.name, found.uid, found.ordinal) == ("demo-decode-0", "uid-demo-decode-0-abc", 0)
    assert (found.template_revision, found.kv_revision) == ("abc", "def")
    assert found.ready
    assert not found.terminating
    assert found.draining_since is None
    assert found.broken is None


def test_a_pod_that_was_ready_counts_from_when_it_stopped_being_so() -> None:
    assert pod_of(engine(running(ready=False), ready_since=NOW - 50)).not_ready_since == NOW - 50


def test_a_pod_that_the_kubelet_has_not_seen_counts_from_its_creation() -> None:
    assert pod_of(engine(scheduled=unschedulable())).not_ready_since == NOW - 3600


@pytest.mark.parametrize(
    ("label", "since"),
    [
        (str(int(NOW)), NOW),
        ("0", 0.0),
        ("", math.inf),
        ("yes", math.inf),
        ("-1", math.inf),
        ("1e3", math.inf),
        ("nan", math.inf),
        ("9" * 60, math.inf),
    ],
)
def test_a_draining_label_that_is_no_time_never_comes_to_its_bound(label: str, since: float) -> None:
    assert pod_of(engine(draining=label)).draining_since == since


def test_a_pod_with_a_deletion_timestamp_is_terminating() -> None:
    assert pod_of(engine(deleted=NOW + 30)).terminating


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("demo-decode-12", {}, 12),
        ("anything", {"apps.kubernetes.io/pod-index": "3"}, 3),
        ("demo-decode-12", {"apps.kubernetes.io/pod-index": "3"}, 3),
        ("demo-decode-12", {"apps.kubernetes.io/pod-index": "x"}, 12),
        ("anything", {}, None),
    ],
)
def test_the_ordinal_is_in_a_label_or_in_the_name(name: str, labels: dict[str, str], expected: int | None) -> None:
    assert ordinal({"metadata": {"name": name, "labels": labels}}) == expected


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (
            engine(waiting("ImagePullBackOff", "no such image")),
            Breakage(Fault.IMAGE, "ImagePullBackOff: no such image"),
        ),
        (engine(waiting("ErrImagePull", "denied")), Breakage(Fault.IMAGE, "ErrImagePull: denied")),
        (engine(waiting("InvalidImageName", "bad")), Breakage(Fault.IMAGE, "InvalidImageName: bad")),
        (
            engine(waiting("CreateContainerConfigError", 'secret "hf" not found')),
            Breakage(Fault.IMAGE, 'CreateContainerConfigError: secret "hf" not found'),
        ),
        (engine(waiting("RunContainerError", "no vllm")), Breakage(Fault.IMAGE, "RunContainerError: no vllm")),
        (engine(crashing(1)), Breakage(Fault.CRASH, "CrashLoopBackOff: exit code 1")),
        (
            engine(crashing(137, "OOMKilled")),
            Breakage(Fault.CRASH, "CrashLoopBackOff: exit code 137 (OOMKilled)"),
        ),
        (engine(ended(ending(2), restarts=1)), Breakage(Fault.CRASH, "CrashLoopBackOff: exit code 2")),
        (
            engine(waiting("PodInitializing"), init=[crashing(3, name="download")]),
            Breakage(Fault.CRASH, "CrashLoopBackOff: exit code 3"),
        ),
        (
            engine(waiting("PodInitializing"), init=[waiting("ImagePullBackOff", "gone", name="download")]),
            Breakage(Fault.IMAGE, "ImagePullBackOff: gone"),
        ),
        (
            engine(scheduled=unschedulable(message="no gpu")),
            Breakage(Fault.UNSCHEDULABLE, "Unschedulable: no gpu"),
        ),
    ],
)
def test_a_pod_whose_engine_does_not_run_is_broken(broken: Any, expected: Breakage) -> None:
    assert breakage(broken) == expected


@pytest.mark.parametrize(
    "working",
    [
        engine(),
        engine(running(ready=False)),
        # It crashed, and runs again.
        engine(running(ready=False, restarts=5, last=ending(1))),
        # A container beside the engine is not the engine.
        engine(running(), crashing(name="sidecar")),
        engine(running(), waiting("ImagePullBackOff", name="sidecar")),
        # Its first end may be its last.
        engine(ended(ending(1))),
        engine(waiting("ContainerCreating")),
        # Evicted: another pod comes in its place.
        engine(ended(ending(137, "ContainerStatusUnknown"), restarts=1), phase="Failed", reason="Evicted"),
        engine(waiting("PodInitializing"), init=[running("download", ready=False)]),
        engine(waiting("PodInitializing"), init=[ended(ending(0, "Completed"), name="download", restarts=2)]),
        engine(scheduled={"status": "False", "reason": "SchedulingGated"}),
        {"metadata": {"name": "demo-decode-0"}},
        {"metadata": {"name": "demo-decode-0"}, "status": {"containerStatuses": [{"name": "engine"}]}},
    ],
)
def test_a_pod_that_runs_or_may_yet_run_is_not_broken(working: Any) -> None:
    assert breakage(working) is None


def test_a_role_is_its_statefulset_and_that_ones_pods() -> None:
    shown = scene(decode__replicas=3)
    role = seen(shown).roles[Role.DECODE]
    assert [each.name for each in role.pods] == ["demo-decode-0", "demo-decode-1", "demo-decode-2"]
    assert role.statefulset is not None
    assert (role.statefulset.replicas, role.statefulset.partition) == (3, 3)
    assert role.statefulset.template_wanted
    assert role.statefulset.settled
    assert (role.statefulset.current_revision, role.statefulset.update_revision) == ("new", "new")
    assert len(seen(shown).roles[Role.PREFILL].pods) == 1


def test_pods_that_only_look_like_engines_are_left_out() -> None:
    """Such as a copy for debugging, or a pod of another StatefulSet that somebody has labelled."""
    shown = scene()
    orphan = shown.engine("decode", 7)
    orphan["metadata"]["ownerReferences"] = []
    foreign = shown.engine("decode", 8)
    foreign["metadata"]["ownerReferences"][0]["name"] = "demo-prefill"
    owned = shown.engine("decode", 9)
    owned["metadata"]["ownerReferences"][0]["controller"] = False
    role = seen(shown.with_pods(orphan, foreign, owned)).roles[Role.DECODE]
    assert [each.name for each in role.pods] == ["demo-decode-0"]


def test_a_role_without_a_statefulset_may_have_pods_left() -> None:
    shown = scene()
    role = seen(replace(shown, children={})).roles[Role.DECODE]
    assert role.statefulset is None
    assert len(role.pods) == 1


def test_another_template_is_not_the_wanted_one() -> None:
    shown = scene()
    place = "StatefulSet", "demo-decode"
    path = ("spec", "template", "spec", "containers", 0, "image")
    changed = replaced(shown.children[place], path, "another")
    role = seen(replace(shown, children={**shown.children, place: changed})).roles[Role.DECODE]
    assert role.statefulset is not None
    assert not role.statefulset.template_wanted


@pytest.mark.parametrize(
    ("status", "settled"),
    [
        ({"observedGeneration": 1, "updateRevision": "a"}, True),
        ({"observedGeneration": 0, "updateRevision": "a"}, False),
        ({"observedGeneration": 1, "updateRevision": ""}, False),
        ({"observedGeneration": None, "updateRevision": "a"}, False),
    ],
)
def test_a_statefulset_is_settled_once_its_controller_has_seen_it(status: dict[str, Any], settled: bool) -> None:
    role = seen(scene().with_child("StatefulSet", "demo-decode", **status)).roles[Role.DECODE]
    assert role.statefulset is not None
    assert role.statefulset.settled is settled


def test_a_statefulset_that_never_had_pods_has_one_revision() -> None:
    role = seen(scene().with_child("StatefulSet", "demo-decode", currentRevision="")).roles[Role.DECODE]
    assert role.statefulset is not None
    assert role.statefulset.current_revision == "new"
