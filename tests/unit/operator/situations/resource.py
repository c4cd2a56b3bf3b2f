"""What the spec and the API server say."""

from __future__ import annotations

from dataclasses import replace

from kvloop_operator import names
from kvloop_operator.live import Refusal
from kvloop_operator.status import Reason
from tests.unit.operator.scenes import (
    NOW,
    pod,
    running,
    scene,
    waiting,
)
from tests.unit.operator.situations.cases import (
    PULL,
    QUOTA,
    Row,
    changed_while_paused,
    fault,
    problem,
    without_child,
)

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
)
