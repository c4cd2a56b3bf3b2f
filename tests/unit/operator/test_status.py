"""What is said of a resource, situation by situation; every reason comes about in one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvloop_operator import names
from kvloop_operator.errors import Fault
from kvloop_operator.facts import OperatorSettings
from kvloop_operator.live import Refusal
from kvloop_operator.reports import Verdict
from kvloop_operator.rollout import DrainReport
from kvloop_operator.status import Assessment, ConditionType, Problem, Reason, Situation, assess
from kvloop_operator.status.findings import CRASH_SLACK_SECONDS, TERMINATION_SLACK_SECONDS
from kvloop_operator.status.transfer import ENOUGH_BYTES, FAILED_ATTEMPTS
from tests.unit.operator.scenes import (
    NOW,
    START_SECONDS,
    Scene,
    crashing,
    ended,
    ending,
    pod,
    running,
    scene,
    unschedulable,
    waiting,
)
from tests.unit.operator.stored import replaced

Status = Mapping[str, Any]

PULL = "rpc error: code = NotFound desc = not found"
QUOTA = 'create Pod demo-decode-0 in StatefulSet demo-decode failed error: pods "demo-decode-0" is forbidden: exceeded'


def conditions(status: Status) -> dict[str, tuple[str, str]]:
    """Status and reason of every condition."""
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def message(status: Status, kind: str = "Ready") -> str:
    (found,) = [each["message"] for each in status["conditions"] if each["type"] == kind]
    return str(found)


def said(shown: Scene, **changes: Any) -> Status:
    return assess(shown.situation(**changes)).status


def served(shown: Scene) -> Status:
    """What was said while all served at its generation."""
    return {
        **said(scene()),
        "observedGeneration": shown.resource.metadata.generation,
        "kvTransfer": {"verifiedRevision": shown.revision},
    }


def after_serving(shown: Scene) -> Scene:
    return replace(shown, previous=served(shown))


def starting(*containers: Any, role: str = "decode", **details: Any) -> Scene:
    """A deployment on its first way up, whose engine of one role is in this state; the router waits for it."""
    shown = scene()
    details = {"ready_since": NOW - 200, **details}
    router = pod("demo-router-0", names.ROUTER, running("router", ready=False, since=NOW - 50), ready_since=NOW - 60)
    return replace(shown.with_pods(shown.engine(role, 0, *containers, **details), router), pairs={})


def router_is(*containers: Any, **details: Any) -> Scene:
    return scene().with_pods(pod("demo-router-0", names.ROUTER, *containers, ready_since=NOW - 60, **details))


def with_numbers(shown: Scene, role: str, replicas: int, partition: int) -> Scene:
    place = "StatefulSet", f"demo-{role}"
    child = replaced(shown.children[place], ("spec", "replicas"), replicas)
    child = replaced(child, ("spec", "updateStrategy", "rollingUpdate", "partition"), partition)
    return replace(shown, children={**shown.children, place: child})


def without_child(shown: Scene, kind: str, name: str) -> Scene:
    return replace(shown, children={key: child for key, child in shown.children.items() if key != (kind, name)})


def rolling(*updated: Any, draining: bool = False, partition: int = 2) -> Scene:
    """Two engines a role at the previous revision, of which the upper ones are as ``updated`` says."""
    shown = scene(generation=2, prefill__replicas=2, decode__replicas=2)
    label = str(int(NOW) - 5) if draining else None
    for role in ("prefill", "decode"):
        old = [
            shown.engine(role, each, revision="old", kv="previous", draining=label if each == 1 else None)
            for each in (0, 1)
        ]
        shown = shown.with_pods(*old).with_child("StatefulSet", f"demo-{role}", currentRevision="old")
        shown = with_numbers(shown, role, 2, partition)
        if updated:
            shown = shown.with_pods(shown.engine(role, 1, *updated, ready_since=NOW - 60))
    return replace(shown, pairs={}, previous=said(scene(prefill__replicas=2, decode__replicas=2)))


def scaling_down(*, draining: bool = True) -> Scene:
    shown = scene(generation=2)
    label = str(int(NOW) - 5) if draining else None
    return after_serving(
        with_numbers(shown, "decode", 2, 2).with_pods(shown.engine("decode", 1, draining=label)).verified()
    )


def stuck_in_termination(deleted: float, *finalizers: str) -> Scene:
    shown = scene()
    pod = shown.engine("decode", 0, deleted=deleted)
    return after_serving(shown.with_pods(replaced(pod, ("metadata", "finalizers"), list(finalizers))))


def evicted_router() -> dict[str, Any]:
    return pod("demo-router-gone", names.ROUTER, ready=False, phase="Failed", reason="Evicted")


def unsettled(shown: Scene) -> Scene:
    return shown.with_child("StatefulSet", "demo-decode", observedGeneration=0)


def changed_while_paused() -> Scene:
    shown = scene(paused=True, generation=2)
    place = "StatefulSet", "demo-decode"
    path = ("spec", "template", "spec", "containers", 0, "image")
    return replace(shown, children={**shown.children, place: replaced(shown.children[place], path, "another")})


def pair_failed() -> Scene:
    shown = scene(decode__replicas=2)
    (bad,) = [pair for pair in shown.pairs.values() if pair.decode == "demo-decode-1"]
    return replace(shown, pairs={**shown.pairs, bad.key: replace(bad, verdict=Verdict.FAILED, detail="no KV moved")})


def pair_wrong() -> Scene:
    shown = pair_failed()
    (bad,) = [pair for pair in shown.pairs.values() if pair.verdict is Verdict.FAILED]
    wrong = replace(bad, verdict=Verdict.WRONG, detail="2.10 nats apart")
    return replace(shown, pairs={**shown.pairs, bad.key: wrong})


def pair_left() -> Scene:
    shown = pair_failed()
    return shown.with_pods(shown.engine("decode", 0, running(ready=False), ready_since=NOW - 10))


def slow(shown: Scene, moved: int = ENOUGH_BYTES) -> Scene:
    return shown.verified(to_decode_bytes=moved, to_prefill_bytes=0, to_decode_seconds=1.0, to_prefill_seconds=0.0)


def newer_template(monkeypatch: pytest.MonkeyPatch) -> Scene:
    for module in ("kvloop_operator.facts", "kvloop_operator.status.assessment"):
        monkeypatch.setattr(f"{module}.ENGINE_TEMPLATE_VERSIONS", ("1", "2"))
    return scene(settings=OperatorSettings(live_template_version="1"))


def fault(shown: Scene) -> Situation:
    wrong = Fault("spec.engine.image", '"vllm"', "no vLLM version in the tag", "set engine.version")
    return shown.situation(faults=(wrong,), step=None, wanted_revision="")


def problem(reason: Reason, shown: Scene | None = None) -> Situation:
    return (shown or scene()).situation(
        problems=(Problem(reason, "Secret demo-router: why it was refused"),), step=None
    )


@dataclass(frozen=True)
class Row:
    """A situation, and what is said of it. ``ready``, ``reconciling``, ``stalled``: status and reason, or absent.

    others: further conditions. words: what the message of Ready names.
    """

    name: str
    of: Callable[[], Scene | Situation]
    ready: str
    reconciling: str = ""
    stalled: str = ""
    others: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


ROWS = (
    Row("new", lambda: replace(scene(), children={}, pods=(), pairs={}), "Unknown Starting", "Starting"),
    Row(
        "everything serves",
        scene,
        "True Serving",
        others={
            "PrefillReady": "True AllReady",
            "DecodeReady": "True AllReady",
            "RouterReady": "True AllReady",
            "KVTransferVerified": "True Verified",
            "Degraded": "False AsExpected",
            "UpdateAvailable": "False UpToDate",
        },
        words=("1 prefill and 1 decode engines serve",),
    ),
    # What the spec says.
    Row(
        "the spec cannot be deployed",
        lambda: fault(scene()),
        "False InvalidSpec",
        stalled="InvalidSpec",
        words=("spec.engine.image", "set engine.version", "the previous engines go on serving"),
    ),
    Row(
        "the spec cannot be read",
        lambda: replace(scene(), pods=()).situation(resource=None, facts=None, step=None, wanted_revision=""),
        "False InvalidSpec",
        stalled="InvalidSpec",
        words=("compare the installed CRD",),
    ),
    Row(
        "suspended",
        lambda: scene(suspend=True),
        "True Suspended",
        others={
            "PrefillReady": "True Suspended",
            "KVTransferVerified": "Unknown Suspended",
            "Degraded": "False AsExpected",
        },
        words=("spec.suspend is true",),
    ),
    Row(
        "a role at zero",
        lambda: scene(prefill__replicas=0),
        "True Suspended",
        others={"PrefillReady": "True Suspended", "DecodeReady": "True AllReady"},
        words=("a role is at zero",),
    ),
    Row(
        "suspended, and the router not ready yet",
        lambda: scene(suspend=True).with_pods(
            pod("demo-router-0", names.ROUTER, running("router", ready=False, since=NOW - 50), ready_since=NOW - 60)
        ),
        "Unknown RouterNotReady",
        "RouterNotReady",
        others={"RouterReady": "False RouterNotReady"},
    ),
    Row(
        "suspended, and the router has no image",
        lambda: scene(suspend=True).with_pods(
            pod("demo-router-0", names.ROUTER, waiting("ImagePullBackOff", PULL, name="router"), ready_since=NOW - 60)
        ),
        "False ImagePullFailed",
        stalled="ImagePullFailed",
    ),
    Row(
        "suspended from the start, and the router not made yet",
        lambda: without_child(scene(suspend=True), "Deployment", "demo-router"),
        "Unknown Starting",
        "Starting",
    ),
    Row(
        "suspended from the start, and a StatefulSet not made yet",
        lambda: without_child(scene(suspend=True), "StatefulSet", "demo-decode"),
        "Unknown Starting",
        "Starting",
    ),
    Row("paused as it should be", lambda: scene(paused=True), "True Serving", others={"Paused": "True Paused"}),
    Row(
        "paused, and changed since",
        changed_while_paused,
        "Unknown Paused",
        others={"Paused": "True Paused"},
        words=("set it to false",),
    ),
    Row(
        "paused, and a child is missing",
        lambda: without_child(scene(paused=True), "PodDisruptionBudget", "demo-router"),
        "Unknown Paused",
    ),
    # What the API server says.
    Row("forbidden", lambda: problem(Reason.FORBIDDEN), "False Forbidden", stalled="Forbidden", words=("Secret",)),
    Row("a name is taken", lambda: problem(Reason.NAME_TAKEN), "False NameTaken", stalled="NameTaken"),
    Row("a write is refused", lambda: problem(Reason.APPLY_FAILED), "False ApplyFailed", stalled="ApplyFailed"),
    Row(
        "a write is refused, and there are no pods yet",
        lambda: problem(Reason.APPLY_FAILED, replace(scene(), pods=())),
        "False ApplyFailed",
        stalled="ApplyFailed",
        others={"PrefillReady": "False ApplyFailed", "RouterReady": "False ApplyFailed"},
    ),
    Row(
        "the spec cannot be deployed, and never was",
        lambda: fault(replace(scene(), children={}, pods=())),
        "False InvalidSpec",
        stalled="InvalidSpec",
        others={"PrefillReady": "False InvalidSpec", "RouterReady": "False InvalidSpec"},
    ),
    Row(
        "paused from the start",
        lambda: replace(scene(paused=True), children={}, pods=()),
        "Unknown Paused",
        others={"DecodeReady": "False Paused", "RouterReady": "False Paused"},
    ),
    Row(
        "pods are refused",
        lambda: replace(
            scene().without_pods("demo-decode-0"), refusals=(Refusal("StatefulSet", "demo-decode", QUOTA),)
        ),
        "False PodsRefused",
        stalled="PodsRefused",
        others={"DecodeReady": "False PodsRefused"},
        words=("exceeded", "raise the quota"),
    ),
    Row(
        "the router's pods are refused",
        lambda: replace(
            scene().without_pods("demo-router-0"), refusals=(Refusal("ReplicaSet", "demo-router-6bd9", QUOTA),)
        ),
        "False PodsRefused",
        stalled="PodsRefused",
        others={"RouterReady": "False PodsRefused"},
    ),
    # What becomes of pods.
    Row(
        "a container is being made",
        lambda: starting(waiting("ContainerCreating")),
        "Unknown Starting",
        "Starting",
        words=("demo-decode-0 is starting",),
    ),
    Row(
        "a volume is not there",
        lambda: replace(
            starting(waiting("ContainerCreating")),
            refusals=(Refusal("Pod", "demo-decode-0", 'MountVolume.SetUp failed: secret "keys" not found'),),
        ),
        "Unknown Starting",
        "Starting",
        words=('secret "keys" not found',),
    ),
    Row(
        "an init container runs",
        lambda: starting(waiting("PodInitializing"), init=[running("download", ready=False)]),
        "Unknown Starting",
        "Starting",
        words=("its container download runs first",),
    ),
    Row(
        "the kubelet has not seen the pod",
        lambda: starting(ready=False, scheduled={"status": "True"}),
        "Unknown Starting",
        "Starting",
        words=("is being prepared",),
    ),
    Row(
        "no scheduler has seen the pod",
        lambda: starting(scheduled={}),
        "Unknown Starting",
        "Starting",
        words=("waits for a scheduler",),
    ),
    Row(
        "held by a scheduling gate",
        lambda: starting(scheduled={"status": "False", "reason": "SchedulingGated"}),
        "Unknown Starting",
        "Starting",
        words=("scheduling gates",),
    ),
    Row(
        "the model loads",
        lambda: starting(running(ready=False, since=NOW - 50)),
        "Unknown LoadingModel",
        "LoadingModel",
        others={"DecodeReady": "False LoadingModel", "RouterReady": "False RouterNotReady"},
        words=("demo-decode-0 loads the model",),
    ),
    Row(
        "a container beside the engine is not ready",
        lambda: starting(running(), running("sidecar", ready=False, since=NOW - 50)),
        "Unknown Starting",
        "Starting",
        words=("waits for its container sidecar",),
    ),
    Row(
        "the first try to pull",
        lambda: starting(waiting("ErrImagePull", PULL)),
        "Unknown ImagePullFailed",
        "ImagePullFailed",
        words=("container engine of demo-decode-0", "not found", "correct the image"),
    ),
    Row(
        "no image",
        lambda: starting(waiting("ImagePullBackOff", f'Back-off pulling image "x": ErrImagePull: {PULL}')),
        "False ImagePullFailed",
        stalled="ImagePullFailed",
        words=(f"engine-image: {PULL};",),
    ),
    Row(
        "no image of an init container",
        lambda: starting(waiting("PodInitializing"), init=[waiting("InvalidImageName", "bad", name="download")]),
        "False ImagePullFailed",
        stalled="ImagePullFailed",
        words=("container download of demo-decode-0",),
    ),
    Row(
        "a Secret is missing",
        lambda: starting(waiting("CreateContainerConfigError", 'secret "hugging-face" not found')),
        "False ContainerNotCreated",
        stalled="ContainerNotCreated",
        words=('secret "hugging-face" not found', "create what the message names"),
    ),
    Row(
        "crashing",
        lambda: starting(crashing(1, message="Traceback\n  …\nRuntimeError: no CUDA device\n\n")),
        "False Crashing",
        stalled="Crashing",
        words=("exit code 1: RuntimeError: no CUDA device", "kubectl logs demo-decode-0 --container=engine --previous"),
    ),
    Row(
        "ended once",
        lambda: starting(ended(ending(3))),
        "Unknown Crashing",
        "Crashing",
        words=("has ended: exit code 3",),
    ),
    Row("ended again", lambda: starting(ended(ending(3), restarts=1)), "False Crashing", stalled="Crashing"),
    Row(
        "running again between crashes",
        lambda: starting(running(ready=False, since=NOW - 20, restarts=3, last=ending())),
        "False Crashing",
        stalled="Crashing",
        words=("ends again and again",),
    ),
    Row(
        "running for longer than before",
        lambda: starting(
            running(ready=False, since=NOW - 40 - CRASH_SLACK_SECONDS, restarts=3, last=ending()), ready_since=NOW - 200
        ),
        "Unknown LoadingModel",
        "LoadingModel",
    ),
    Row(
        "restarted after it had served",
        lambda: starting(
            running(ready=False, since=NOW - 20, restarts=3, last=ending(begun=NOW - 90_000, at=NOW - 30)),
            ready_since=NOW - 30,
        ),
        "Unknown LoadingModel",
        "LoadingModel",
    ),
    Row(
        "out of memory",
        lambda: starting(crashing(137, "OOMKilled")),
        "False OutOfMemory",
        stalled="OutOfMemory",
        words=("raise its memory limit",),
    ),
    Row(
        "no node yet",
        lambda: starting(scheduled=unschedulable(NOW - 599)),
        "Unknown Unschedulable",
        "Unschedulable",
        words=("Insufficient nvidia.com/gpu", "add nodes"),
    ),
    Row(
        "no node",
        lambda: starting(scheduled=unschedulable(NOW - 600)),
        "False Unschedulable",
        stalled="Unschedulable",
    ),
    Row(
        "evicted",
        lambda: starting(phase="Failed", reason="Evicted", message="The node was low on memory.", ready=False),
        "Unknown PodFailed",
        "PodFailed",
        words=("Evicted: The node was low on memory",),
    ),
    Row(
        "does not end",
        lambda: stuck_in_termination(NOW - TERMINATION_SLACK_SECONDS),
        "False StuckTerminating",
        stalled="StuckTerminating",
        others={"Degraded": "True StuckTerminating"},
        words=("on node node-1", "--force"),
    ),
    Row(
        "does not end because of a finalizer",
        lambda: stuck_in_termination(NOW - TERMINATION_SLACK_SECONDS, "example.com/held"),
        "False StuckTerminating",
        stalled="StuckTerminating",
        words=("held by example.com/held", "remove it"),
    ),
    Row(
        "a router was evicted, and there is another in its place",
        lambda: after_serving(scene().with_pods(evicted_router())),
        "True Serving",
        others={"RouterReady": "True AllReady", "Degraded": "False AsExpected"},
    ),
    Row(
        "a router was evicted, and there is no other yet",
        lambda: after_serving(scene().without_pods("demo-router-0").with_pods(evicted_router())),
        "Unknown PodFailed",
        "PodFailed",
        words=("demo-router-gone has failed: Evicted",),
    ),
    Row("ends", lambda: stuck_in_termination(NOW + 30), "Unknown Starting", "Starting"),
    Row(
        "takes too long",
        lambda: starting(waiting("ContainerCreating"), ready_since=NOW - START_SECONDS),
        "False StartTimedOut",
        stalled="StartTimedOut",
        words=("demo-decode-0", "does not become ready", "engine.startupTimeoutSeconds"),
    ),
    Row(
        "fails its probe",
        lambda: after_serving(starting(running(ready=False), ready_since=NOW - 10)),
        "Unknown Unhealthy",
        "Unhealthy",
        others={"Degraded": "True Unhealthy"},
    ),
    Row(
        "the router fails its probe since the engine does",
        lambda: after_serving(
            starting(running(ready=False), ready_since=NOW - 10).with_pods(
                pod("demo-router-0", names.ROUTER, running("router", ready=False), ready_since=NOW - 9)
            )
        ),
        "Unknown Unhealthy",
        "Unhealthy",
        others={"RouterReady": "False RouterNotReady", "Degraded": "True Unhealthy"},
    ),
    Row(
        "its node no longer reports",
        lambda: after_serving(starting(running(), ready=False)),
        "Unknown Unhealthy",
        "Unhealthy",
        words=("node-1 may no longer report", "kubectl describe node node-1"),
    ),
    # Fewer serve than should.
    Row(
        "one of two is on its first way up",
        lambda: scene(decode__replicas=2).with_pods(
            scene(decode__replicas=2).engine("decode", 1, running(ready=False, since=NOW - 50), ready_since=NOW - 60)
        ),
        "True Serving",
        "LoadingModel",
        others={"DecodeReady": "True PartlyReady", "Degraded": "False AsExpected"},
        words=("1 prefill and 1 of 2 decode engines serve",),
    ),
    Row(
        "one of two has never come up",
        lambda: scene(decode__replicas=2).with_pods(scene(decode__replicas=2).engine("decode", 1, crashing())),
        "True Serving",
        others={"DecodeReady": "True PartlyReady", "Degraded": "True PartlyReady"},
    ),
    Row(
        "one of two is lost",
        lambda: after_serving(scene(decode__replicas=2).without_pods("demo-decode-1")),
        "True Serving",
        others={"DecodeReady": "True PartlyReady", "Degraded": "True PartlyReady"},
    ),
    Row(
        "the only one is lost",
        lambda: after_serving(starting(running(ready=False, since=NOW - 50))),
        "Unknown LoadingModel",
        "LoadingModel",
        others={"KVTransferVerified": "True Verified", "Degraded": "True LoadingModel"},
    ),
    Row(
        "the only one is lost for good",
        lambda: after_serving(starting(crashing())),
        "False Crashing",
        stalled="Crashing",
        others={"Degraded": "True Crashing"},
    ),
    # The router.
    Row(
        "the router starts",
        lambda: router_is(running("router", ready=False, since=NOW - 50)),
        "Unknown RouterNotReady",
        "RouterNotReady",
    ),
    Row("the router has no pods yet", lambda: scene().without_pods("demo-router-0"), "Unknown Starting", "Starting"),
    Row(
        "the router crashes",
        lambda: router_is(crashing(name="router")),
        "False Crashing",
        stalled="Crashing",
        words=("--container=router",),
    ),
    Row(
        "the router is lost",
        lambda: after_serving(router_is(crashing(name="router"))),
        "False Crashing",
        stalled="Crashing",
        others={"RouterReady": "False Crashing", "Degraded": "True Crashing"},
    ),
    Row(
        "one of two routers is lost",
        lambda: scene(router__replicas=2).with_pods(
            pod("demo-router-1", names.ROUTER, crashing(name="router"), ready_since=NOW - 60)
        ),
        "True Serving",
        others={"RouterReady": "True PartlyReady", "Degraded": "True PartlyReady"},
    ),
    Row(
        "routers are replaced",
        lambda: scene(generation=2).with_child("Deployment", "demo-router", replicas=2, updatedReplicas=1),
        "Unknown RollingOut",
        "RollingOut",
    ),
    Row(
        "a new router has no image",
        lambda: (
            scene()
            .with_child("Deployment", "demo-router", replicas=2, updatedReplicas=1)
            .with_pods(pod("demo-router-1", names.ROUTER, waiting("ImagePullBackOff", PULL, name="router")))
        ),
        "False RolloutBlocked",
        stalled="RolloutBlocked",
        words=("container router of demo-router-1", "the previous engines go on serving"),
    ),
    # Rollouts and scaling.
    Row(
        "rolling out",
        lambda: rolling(running(ready=False, since=NOW - 50), partition=1),
        "Unknown RollingOut",
        "RollingOut",
        others={"Degraded": "False AsExpected"},
        words=("loads the model",),
    ),
    Row(
        "draining for a rollout",
        lambda: rolling(draining=True),
        "Unknown Draining",
        "Draining",
        words=("demo-prefill-1, demo-decode-1 to be replaced",),
    ),
    Row(
        "the template is not applied yet",
        lambda: replace(changed_while_paused(), resource=scene(generation=2).resource),
        "Unknown RollingOut",
        "RollingOut",
    ),
    Row(
        "a rollout that cannot go on",
        lambda: rolling(waiting("ImagePullBackOff", PULL), partition=1),
        "False RolloutBlocked",
        stalled="RolloutBlocked",
        words=("not found", "correct the image", "the previous engines go on serving"),
    ),
    Row(
        "a rollout whose first pull failed",
        lambda: rolling(waiting("ErrImagePull", PULL), partition=1),
        "Unknown RollingOut",
        "RollingOut",
        words=("not found",),
    ),
    Row(
        "a rollout whose pods are refused",
        lambda: replace(
            rolling(partition=1).without_pods("demo-decode-1"), refusals=(Refusal("StatefulSet", "demo-decode", QUOTA),)
        ),
        "False RolloutBlocked",
        stalled="RolloutBlocked",
    ),
    Row(
        "a rollout whose engines take too long",
        lambda: rolling(running(ready=False, since=NOW - 50), partition=1).with_pods(
            scene(prefill__replicas=2, decode__replicas=2).engine(
                "decode", 1, running(ready=False, since=NOW - 50), ready_since=NOW - START_SECONDS
            )
        ),
        "False RolloutBlocked",
        stalled="RolloutBlocked",
        words=("does not become ready",),
    ),
    Row(
        "scaling down",
        scaling_down,
        "True Serving",
        "Draining",
        others={"Degraded": "False AsExpected", "DecodeReady": "True AllReady"},
        words=("1 prefill and 2 decode engines serve",),
    ),
    Row("scaling down, before it drains", lambda: scaling_down(draining=False), "True Serving", "ScalingDown"),
    Row(
        "suspending",
        lambda: with_numbers(scene(suspend=True), "decode", 1, 1).with_pods(scene().engine("decode", 0)),
        "Unknown ScalingDown",
        "ScalingDown",
        others={"DecodeReady": "True ScalingDown"},
    ),
    Row(
        "scaling up",
        lambda: replace(scene(generation=2, decode__replicas=3).without_pods("demo-decode-2"), previous=said(scene())),
        "True Serving",
        "ScalingUp",
        others={"DecodeReady": "True PartlyReady", "Degraded": "False AsExpected"},
    ),
    Row(
        "the StatefulSet controller has not seen a change of numbers",
        lambda: after_serving(unsettled(scene())),
        "True Serving",
        "RollingOut",
    ),
    Row(
        "the StatefulSet controller has not seen that more are wanted",
        lambda: after_serving(unsettled(scene(decode__replicas=2).without_pods("demo-decode-1"))),
        "True Serving",
        "ScalingUp",
    ),
    Row(
        "the StatefulSet controller has not seen that fewer are wanted",
        lambda: after_serving(unsettled(scene().with_pods(scene().engine("decode", 1)))),
        "True Serving",
        "ScalingDown",
    ),
    Row(
        "the StatefulSet controller has not seen another template of the same KV revision",
        lambda: replace(unsettled(scene()), previous=said(rolling(draining=True))),
        "Unknown Draining",
        "Draining",
    ),
    Row(
        "the StatefulSet controller has not seen another template of another KV revision",
        lambda: after_serving(unsettled(scene().with_pods(scene().engine("decode", 0, kv="previous")))),
        "Unknown RollingOut",
        "RollingOut",
    ),
    Row(
        "the StatefulSet controller sees nothing, and nothing serves",
        lambda: after_serving(unsettled(starting(crashing()))),
        "False Crashing",
        stalled="Crashing",
    ),
    # Whether KV moves.
    Row(
        "not verified yet",
        lambda: replace(scene(), pairs={}),
        "Unknown VerifyingKVTransfer",
        "VerifyingKVTransfer",
        others={"KVTransferVerified": "Unknown VerifyingKVTransfer"},
    ),
    Row(
        "KV does not move, so far",
        lambda: scene().verified(Verdict.FAILED, attempts=FAILED_ATTEMPTS - 1, detail="no KV moved"),
        "Unknown TransferFailed",
        "TransferFailed",
        others={"KVTransferVerified": "False TransferFailed"},
    ),
    Row(
        "KV does not move",
        lambda: scene().verified(Verdict.FAILED, attempts=FAILED_ATTEMPTS, detail="no KV moved"),
        "False TransferFailed",
        stalled="TransferFailed",
        others={"KVTransferVerified": "False TransferFailed"},
        words=("between demo-prefill-0 and demo-decode-0: no KV moved", "security groups"),
    ),
    Row(
        "KV no longer moves",
        lambda: after_serving(scene().verified(Verdict.FAILED, attempts=FAILED_ATTEMPTS)),
        "False TransferFailed",
        stalled="TransferFailed",
        others={"Degraded": "True TransferFailed"},
    ),
    Row(
        "KV does not move in one pair",
        pair_failed,
        "True Serving",
        others={"KVTransferVerified": "True Verified", "Degraded": "True PairFailed"},
    ),
    Row(
        "KV does not move in the one pair that is left",
        lambda: after_serving(pair_left()),
        "Unknown TransferFailed",
        "TransferFailed",
        others={"KVTransferVerified": "False TransferFailed"},
        words=("between demo-prefill-0 and demo-decode-1",),
    ),
    Row(
        "what one pair reuses is wrong",
        pair_wrong,
        "False WrongReuse",
        stalled="WrongReuse",
        others={"KVTransferVerified": "False WrongReuse", "Degraded": "False AsExpected"},
        words=("between demo-prefill-0 and demo-decode-1 was wrong: 2.10 nats apart", "delete both pods"),
    ),
    Row(
        "what one pair reuses is wrong, after all of it served",
        lambda: after_serving(pair_wrong()),
        "False WrongReuse",
        stalled="WrongReuse",
        others={"KVTransferVerified": "False WrongReuse", "Degraded": "True WrongReuse"},
    ),
    Row(
        "what a pair reuses is wrong, one of which is not ready at the moment",
        lambda: after_serving(
            (shown := pair_wrong()).with_pods(shown.engine("decode", 1, running(ready=False), ready_since=NOW - 10))
        ),
        "False WrongReuse",
        stalled="WrongReuse",
    ),
    Row(
        "what a pair reuses is wrong, and there is no canary",
        lambda: scene(router__canary__enabled=False).verified(Verdict.WRONG),
        "False WrongReuse",
        stalled="WrongReuse",
    ),
    Row(
        "KV moves slowly",
        lambda: slow(scene()),
        "True Serving",
        others={"KVTransferVerified": "True SlowTransport", "Degraded": "True SlowTransport"},
    ),
    Row("too little KV to judge", lambda: slow(scene(), ENOUGH_BYTES - 1), "True Serving"),
    Row(
        "slow where no EFA was asked for",
        lambda: slow(scene(network__efa__mode="Disabled")),
        "True Serving",
        others={"KVTransferVerified": "True Verified"},
    ),
    Row(
        "the router does not answer the operator",
        lambda: replace(scene(), pairs={}).situation(unreachable=("demo-router-0: timed out",)),
        "Unknown RouterUnreachable",
        "RouterUnreachable",
        words=("demo-router-0: timed out",),
    ),
    Row(
        "verified before, and the router does not answer",
        lambda: after_serving(replace(scene(), pairs={})).situation(unreachable=("demo-router-0: timed out",)),
        "True Serving",
        others={"KVTransferVerified": "True Verified"},
    ),
    Row(
        "a router that does not answer since it starts",
        lambda: replace(router_is(running("router", ready=False, since=NOW - 50)), pairs={}).situation(
            unreachable=("demo-router-0: refused",)
        ),
        "Unknown RouterNotReady",
        "RouterNotReady",
        others={"KVTransferVerified": "Unknown VerifyingKVTransfer"},
    ),
    Row(
        "no canary",
        lambda: replace(scene(router__canary__enabled=False), pairs={}),
        "Unknown CanaryDisabled",
        others={"KVTransferVerified": "Unknown CanaryDisabled"},
        words=("set router.canary.enabled",),
    ),
    Row(
        "no canary, verified before",
        lambda: after_serving(replace(scene(router__canary__enabled=False), pairs={})),
        "True Serving",
    ),
)


def assessed(row: Row) -> Assessment:
    found = row.of()
    return assess(found.situation() if isinstance(found, Scene) else found)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_situation(row: Row) -> None:
    status = assessed(row).status
    found = {kind: " ".join(each) for kind, each in conditions(status).items()}
    assert found["Ready"] == row.ready
    assert found.get("Reconciling", "") == (f"True {row.reconciling}" if row.reconciling else "")
    assert found.get("Stalled", "") == (f"True {row.stalled}" if row.stalled else "")
    assert {kind: found.get(kind) for kind in row.others} == row.others
    for words in row.words:
        assert words in message(status)


def test_every_reason_comes_about(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {reason for row in ROWS for _, reason in conditions(assessed(row).status).values()}
    reasons |= {reason for _, reason in conditions(said(newer_template(monkeypatch))).values()}
    assert reasons == {reason.value for reason in Reason}


def test_conditions_stand_in_one_order() -> None:
    orders = [list(conditions(assessed(row).status)) for row in ROWS]
    assert all(order == [kind.value for kind in ConditionType if kind.value in order] for order in orders)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_pod_s_trouble_says_what_to_do(row: Row) -> None:
    status = assessed(row).status
    if row.stalled and row.stalled not in ("Forbidden", "NameTaken", "ApplyFailed"):
        assert ";" in message(status, "Stalled")


def test_counts_of_a_role() -> None:
    shown = scene(decode__replicas=3).without_pods("demo-decode-2")
    shown = shown.with_pods(shown.engine("decode", 1, revision="old", ready_since=NOW - 60))
    shown = shown.with_pods(shown.engine("decode", 0, running(ready=False, since=NOW - 50), ready_since=NOW - 60))
    assert said(shown)["decode"] == {
        "replicas": 2,
        "desired": 3,
        "ready": 1,
        "updated": 1,
        "revision": shown.revision,
        "selector": "kvloop.io/deployment=demo,kvloop.io/role=decode",
        "summary": "1/3",
    }


def test_pods_that_end_are_no_longer_counted() -> None:
    shown = scene(decode__replicas=2)
    counted = said(shown.with_pods(shown.engine("decode", 1, deleted=NOW + 30)))["decode"]
    assert (counted["replicas"], counted["ready"], counted["updated"]) == (1, 1, 1)


def test_nothing_is_updated_before_the_template_is_applied() -> None:
    assert said(replace(changed_while_paused(), resource=scene().resource))["decode"]["updated"] == 0


def test_the_count_of_updated_pods_waits_for_the_statefulset_controller() -> None:
    shown = unsettled(scene(decode__replicas=2))
    assert said(replace(shown, previous={"decode": {"updated": 1}}))["decode"]["updated"] == 1


def test_clients_are_told_where_to_call() -> None:
    assert said(scene())["url"] == "http://demo-router.team.svc:8000"
    assert said(scene(router__service__port=80))["url"] == "http://demo-router.team.svc:80"
    encrypted = scene(security__tls__router__secretName="mine")
    assert said(encrypted)["url"] == "https://demo-router.team.svc:8000"


def test_a_newer_engine_template_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    status = said(newer_template(monkeypatch))
    assert status["engineTemplate"] == {"current": "1", "offered": "2"}
    assert conditions(status)["UpdateAvailable"] == ("True", "NewEngineTemplate")
    assert "set rollout.engineTemplateVersion to 2" in message(status, "UpdateAvailable")


def test_the_newest_engine_template_is_offered_to_nobody() -> None:
    assert said(scene())["engineTemplate"] == {"current": "1", "offered": ""}


def test_verification_is_kept_by_kv_revision() -> None:
    shown = scene()
    assert said(shown)["kvTransfer"]["verifiedRevision"] == shown.revision
    other = replace(shown, pairs={}, previous={"kvTransfer": {"verifiedRevision": "another"}})
    assert conditions(said(other))["KVTransferVerified"] == ("Unknown", "VerifyingKVTransfer")
    assert said(other)["kvTransfer"]["verifiedRevision"] == "another"


def test_the_connector_that_was_left_to_kvloop_is_told_and_why_it_is_not_kvloops() -> None:
    def transfer(**changes: Any) -> Any:
        return said(scene(**changes))["kvTransfer"]

    assert transfer(kvTransfer__connector="NixlConnector")["connector"] == "NixlConnector"
    assert transfer(kvTransfer__connector="NixlConnector")["connectorMessage"] == ""
    assert transfer(engine__version="0.33.0")["connector"] == "NixlConnector"
    assert "0.32.0 only" in transfer(engine__version="0.33.0")["connectorMessage"]
    assert transfer(engine__version="0.32.0")["connector"] == "KvloopConnector"
    assert transfer(engine__version="0.32.0")["connectorMessage"] == ""


def test_the_connector_stays_told_while_the_spec_cannot_be_read() -> None:
    told = said(scene())["kvTransfer"]
    unread = said(scene(), resource=None, facts=None, previous={"kvTransfer": told})["kvTransfer"]
    assert unread == told


def test_pairs_of_another_revision_or_of_pods_that_are_gone_prove_nothing() -> None:
    shown = scene()
    (pair,) = shown.pairs.values()
    for wrong in (replace(pair, kv_revision="another"), replace(pair, decode_uid="gone")):
        status = said(replace(shown, pairs={wrong.key: wrong}))
        assert conditions(status)["KVTransferVerified"] == ("Unknown", "VerifyingKVTransfer")


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (lambda: slow(scene()), ("True", "SlowTransport")),
        (lambda: scene().verified(Verdict.FAILED, attempts=FAILED_ATTEMPTS), ("False", "TransferFailed")),
        (lambda: after_serving(scene().verified(Verdict.WRONG)), ("False", "WrongReuse")),
        (scene, ("True", "Verified")),
    ],
)
def test_an_operator_that_was_restarted_says_the_same(before: Callable[[], Scene], reason: tuple[str, str]) -> None:
    """It has forgotten every report, until the routers are asked again."""
    earlier = said(before())
    later = assess(replace(scene(), pairs={}, previous=earlier).situation())
    assert conditions(later.status)["KVTransferVerified"] == reason
    assert later.status == earlier
    assert later.transitions == ()


def test_an_engine_that_was_restarted_takes_nothing_away() -> None:
    shown = scene()
    restarted = shown.engine("decode", 0)
    restarted["metadata"]["uid"] = "another"
    status = said(after_serving(shown.with_pods(restarted)))
    assert conditions(status)["Ready"] == ("True", "Serving")
    failed = after_serving(shown.with_pods(restarted)).verified(Verdict.FAILED, attempts=FAILED_ATTEMPTS)
    assert conditions(said(failed))["Ready"] == ("False", "TransferFailed")


def test_wrong_reuse_is_over_with_the_engines_that_it_was_between() -> None:
    shown = after_serving(scene()).verified(Verdict.WRONG)
    status = said(shown)
    assert conditions(status)["Ready"] == ("False", "WrongReuse")
    restarted = shown.engine("decode", 0)
    restarted["metadata"]["uid"] = "another"
    unknown = replace(shown.with_pods(restarted), previous=status)
    assert conditions(said(unknown))["Ready"] == ("False", "WrongReuse")
    assert conditions(said(unknown.verified()))["Ready"] == ("True", "Serving")


def test_where_kv_goes_one_way_only_that_is_said() -> None:
    assert message(said(scene(kvTransfer__bidirectionalKvXfer=False)), "KVTransferVerified") == (
        "KV was seen to move from prefill to decode"
    )


def test_pull_failures_that_alternate_change_nothing() -> None:
    """The kubelet says one thing while it tries and another while it waits."""
    back_off = starting(waiting("ImagePullBackOff", f'Back-off pulling image "x": ErrImagePull: {PULL}'))
    first = said(back_off)
    again = assess(replace(starting(waiting("ErrImagePull", PULL)), previous=first).situation())
    assert again.status == first
    assert again.transitions == ()


def pulling(shown: Scene, *trying: str) -> Scene:
    """No image for any engine that is not ready. Pods in ``trying`` are at their next try, the others wait for it."""
    for each in shown.pods:
        name = each["metadata"]["name"]
        if each["status"]["containerStatuses"][0]["state"].get("waiting"):
            back_off = waiting("ImagePullBackOff", f'Back-off pulling image "x": ErrImagePull: {PULL}')
            state = waiting("ErrImagePull", PULL) if name in trying else back_off
            shown = shown.with_pods(replaced(each, ("status", "containerStatuses"), [state]))
    return shown


def nothing_pulled() -> Scene:
    shown, state = scene(prefill__replicas=2), waiting("ErrImagePull", PULL)
    places = (("prefill", 0), ("prefill", 1), ("decode", 0))
    return shown.with_pods(*(shown.engine(*place, state, ready_since=NOW - 60) for place in places))


@pytest.mark.parametrize(
    "shown", [nothing_pulled(), rolling(waiting("ErrImagePull", PULL), partition=1)], ids=["new", "rolling"]
)
def test_failures_of_several_pods_to_pull_that_alternate_change_nothing(shown: Scene) -> None:
    names = {each["metadata"]["name"] for each in shown.pods}
    for first in sorted(names):
        began = said(pulling(shown, *names - {first}))
        settled = said(replace(pulling(shown), previous=began))
        assert conditions(settled)["Ready"][0] == "False"
        for trying in (*({each} for each in sorted(names)), names - {first}, names):
            assert said(replace(pulling(shown, *trying), previous=settled)) == settled


def test_of_several_pods_that_get_no_image_the_first_is_told_whichever_was_first_to_fail() -> None:
    shown = nothing_pulled()
    began = said(pulling(shown, "demo-prefill-0", "demo-prefill-1"))
    assert "demo-decode-0" in message(began)
    assert "demo-prefill-0" in message(said(replace(pulling(shown), previous=began)))


def test_crashes_that_alternate_with_runs_change_nothing() -> None:
    first = said(starting(crashing()))
    last = ending()
    for container in (running(ready=False, since=NOW - 20, restarts=5, last=last), ended(last, restarts=5)):
        again = assess(replace(starting(container), previous=first).situation())
        assert again.status == first


def test_while_pods_drain_nothing_changes_with_their_turns() -> None:
    first = said(scaling_down())
    for turns in (3, 2, 0):
        report = DrainReport(running_turns=turns, live_handles=turns)
        drains = {each["metadata"]["uid"]: report for each in scaling_down().pods}
        assert said(replace(scaling_down(), drains=drains, previous=first)) == first


def test_a_transition_has_the_time_of_its_status_and_not_of_its_reason() -> None:
    loading = starting(running(ready=False, since=NOW - 50))
    earlier = said(starting(waiting("ContainerCreating")))
    later = said(replace(loading, previous=earlier, now=NOW + 100))
    ready = {each["type"]: each["lastTransitionTime"] for each in later["conditions"]}
    assert ready["Ready"] == ready["Reconciling"] == "2027-01-15T08:00:00Z"
    done = said(replace(scene(), previous=later, now=NOW + 200))
    times = {each["type"]: each["lastTransitionTime"] for each in done["conditions"]}
    assert times["Ready"] == "2027-01-15T08:03:20Z"
    assert times["PrefillReady"] == "2027-01-15T08:00:00Z"


@pytest.mark.parametrize(
    ("shown", "again_at"),
    [
        (lambda: starting(scheduled=unschedulable(NOW - 100)), NOW + 500),
        (lambda: stuck_in_termination(NOW - 10), NOW - 10 + TERMINATION_SLACK_SECONDS),
        (
            lambda: starting(running(ready=False, since=NOW - 20, restarts=3, last=ending())),
            NOW - 20 + 40 + CRASH_SLACK_SECONDS,
        ),
        (scene, None),
    ],
)
def test_what_time_alone_changes_is_assessed_again_then(shown: Callable[[], Scene], again_at: float | None) -> None:
    assert assess(shown().situation()).again_at == again_at


def test_events_tell_what_has_changed_and_only_that() -> None:
    first = assess(replace(scene(), pairs={}).situation())
    assert [(each.type, each.reason) for each in first.transitions] == [("Normal", "VerifyingKVTransfer")]
    second = assess(replace(scene(), previous=first.status).situation())
    assert [(each.type, each.reason) for each in second.transitions] == [("Normal", "Serving"), ("Normal", "Verified")]
    lost = replace(scene(decode__replicas=2).without_pods("demo-decode-1"), previous=second.status)
    third = assess(lost.situation())
    assert [(each.type, each.reason) for each in third.transitions] == [("Warning", "PartlyReady")]
    assert assess(replace(lost, previous=third.status).situation()).transitions == ()


def test_a_long_message_is_cut() -> None:
    told = 'no "' + "x" * 5000
    status = said(scene(), problems=(Problem(Reason.APPLY_FAILED, told),), step=None)
    assert len(message(status)) == 1000
    assert message(status).endswith("…")


def test_what_cannot_be_judged_for_now_stays_as_it_was() -> None:
    earlier = said(slow(scene()))
    status = assess(fault(replace(slow(scene()), previous=earlier))).status
    assert conditions(status)["KVTransferVerified"] == ("True", "SlowTransport")
    assert conditions(status)["Degraded"] == ("True", "SlowTransport")
    assert status["decode"]["revision"] == earlier["decode"]["revision"]
    unread = scene().situation(resource=None, facts=None, step=None, wanted_revision="", previous=earlier)
    status = assess(unread).status
    assert status["url"] == earlier["url"]
    assert status["engineTemplate"] == earlier["engineTemplate"]
    assert status["decode"]["desired"] == 1
