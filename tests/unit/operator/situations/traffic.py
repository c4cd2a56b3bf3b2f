"""Whether routers, rollouts and KV move."""

from __future__ import annotations

from dataclasses import replace

from kvloop_operator import names
from kvloop_operator.live import Refusal
from kvloop_operator.reports import Verdict
from kvloop_operator.status.transfer import ENOUGH_BYTES, FAILED_ATTEMPTS
from tests.unit.operator.scenes import (
    NOW,
    START_SECONDS,
    crashing,
    pod,
    running,
    scene,
    waiting,
)
from tests.unit.operator.situations.cases import (
    PULL,
    QUOTA,
    Row,
    after_serving,
    changed_while_paused,
    pair_failed,
    pair_left,
    pair_wrong,
    rolling,
    router_is,
    said,
    scaling_down,
    slow,
    starting,
    unsettled,
    with_numbers,
)

ROWS = (
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
