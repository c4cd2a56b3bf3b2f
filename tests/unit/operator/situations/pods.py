"""What becomes of pods."""

from __future__ import annotations

from dataclasses import replace

from kvloop_operator import names
from kvloop_operator.live import Refusal
from kvloop_operator.status.findings import CRASH_SLACK_SECONDS, TERMINATION_SLACK_SECONDS
from tests.unit.operator.scenes import (
    NOW,
    START_SECONDS,
    crashing,
    ended,
    ending,
    pod,
    running,
    scene,
    unschedulable,
    waiting,
)
from tests.unit.operator.situations.cases import (
    PULL,
    Row,
    after_serving,
    evicted_router,
    starting,
    stuck_in_termination,
)

ROWS = (
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
)
