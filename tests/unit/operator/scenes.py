"""A resource in a cluster, for tests of what the operator reads and says: ready and verified, unless told otherwise.

The step is the planner's own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.desired import desired
from kvloop_operator.facts import Facts, OperatorSettings, resolve
from kvloop_operator.live import Live, Object, Refusal
from kvloop_operator.observe import observed
from kvloop_operator.reports import PairReport, Verdict
from kvloop_operator.revision import kv_revision
from kvloop_operator.rollout import Desired, DrainReport, Settings, Step, plan
from kvloop_operator.status import Situation
from tests.unit.operator.documents import document
from tests.unit.operator.stored import stored

NOW = 1_800_000_000.0
START_SECONDS = 5400
OLD, NEW = "old", "new"

Status = dict[str, Any]


def stamp(seconds: float) -> str:
    """A moment as the API server writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def running(
    name: str = names.ENGINE_CONTAINER,
    *,
    ready: bool = True,
    since: float = NOW - 3600,
    restarts: int = 0,
    last: Status | None = None,
) -> Status:
    """A container that runs."""
    return _container(name, {"running": {"startedAt": stamp(since)}}, ready=ready, restarts=restarts, last=last)


def waiting(
    reason: str,
    message: str = "",
    *,
    name: str = names.ENGINE_CONTAINER,
    restarts: int = 0,
    last: Status | None = None,
) -> Status:
    """A container that waits."""
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return _container(name, state, ready=False, restarts=restarts, last=last)


def ended(last: Status, *, name: str = names.ENGINE_CONTAINER, restarts: int = 0, ready: bool = False) -> Status:
    """A container that has ended and was not started again yet."""
    return _container(name, {"terminated": last}, ready=ready, restarts=restarts, last=None)


def ending(
    code: int = 1, reason: str = "Error", message: str = "", *, begun: float = NOW - 100, at: float = NOW - 60
) -> Status:
    """How a container has ended."""
    found = {"exitCode": code, "reason": reason, "startedAt": stamp(begun), "finishedAt": stamp(at)}
    return {**found, "message": message} if message else found


def crashing(code: int = 1, reason: str = "Error", message: str = "", *, name: str = names.ENGINE_CONTAINER) -> Status:
    """A container that the kubelet does not start at once again."""
    back_off = "back-off 5m0s restarting failed container"
    return waiting("CrashLoopBackOff", back_off, name=name, restarts=4, last=ending(code, reason, message))


def _container(name: str, state: Status, *, ready: bool, restarts: int, last: Status | None) -> Status:
    return {
        "name": name,
        "image": f"{name}-image",
        "ready": ready,
        "restartCount": restarts,
        "state": state,
        "lastState": {"terminated": last} if last is not None else {},
    }


def pod(
    name: str,
    role: str,
    *containers: Status,
    revision: str = NEW,
    kv: str = "",
    ready: bool | None = None,
    ready_since: float = NOW - 1800,
    scheduled: Mapping[str, str] | None = None,
    init: Iterable[Status] = (),
    draining: str | None = None,
    deleted: float | None = None,
    phase: str = "Running",
    **status: Any,
) -> dict[str, Any]:
    """A pod of the resource ``demo``. ``ready``: whether all containers are, unless told."""
    statuses = list(containers) or [running(names.ROUTER_CONTAINER if role == names.ROUTER else names.ENGINE_CONTAINER)]
    is_ready = all(each["ready"] for each in statuses) if ready is None else ready
    owner = ("ReplicaSet", "demo-router-abc") if role == names.ROUTER else ("StatefulSet", f"demo-{role}")
    conditions = [{"type": "PodScheduled", "status": "True"} if scheduled is None else {"type": "PodScheduled"}]
    conditions[0] |= dict(scheduled or {})
    if scheduled is None:
        moment = stamp(ready_since)
        conditions.append({"type": "Ready", "status": str(is_ready), "lastTransitionTime": moment})
    labels = {**names.labels("demo", role), "controller-revision-hash": revision, names.LABEL_KV_REVISION: kv}
    if draining is not None:
        labels[names.LABEL_DRAINING] = draining
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-{name}-{revision}",
        "creationTimestamp": stamp(NOW - 3600),
        "labels": labels,
        "ownerReferences": [{"kind": owner[0], "name": owner[1], "uid": "owner", "controller": True}],
    }
    if deleted is not None:
        metadata["deletionTimestamp"] = stamp(deleted)
    return {
        "metadata": metadata,
        "spec": {"nodeName": "node-1"},
        "status": {
            "phase": phase,
            "conditions": conditions,
            "initContainerStatuses": list(init),
            "containerStatuses": [] if scheduled is not None else statuses,
            **status,
        },
    }


def unschedulable(
    since: float = NOW - 5, message: str = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
) -> Any:
    """Why a pod has no node."""
    moment = stamp(since)
    return {"status": "False", "reason": "Unschedulable", "message": message, "lastTransitionTime": moment}


@dataclass(frozen=True, slots=True)
class Scene:
    """The resource ``demo`` of namespace ``team``, and what there is of it."""

    resource: DisaggregatedInference
    facts: Facts
    children: Mapping[tuple[str, str], Object]
    pods: tuple[Object, ...]
    refusals: tuple[Refusal, ...] = ()
    pairs: Mapping[tuple[str, str], PairReport] = field(default_factory=dict)
    previous: Object = field(default_factory=dict)
    drains: Mapping[str, DrainReport] = field(default_factory=dict)
    now: float = NOW

    @property
    def revision(self) -> str:
        return kv_revision(self.resource, self.facts)

    @property
    def live(self) -> Live:
        return Live(self.children, self.pods, self.refusals)

    def step(self) -> Step | None:
        """What the planner says."""
        spec = self.resource.spec
        wanted = Desired(
            replicas={Role.PREFILL: spec.prefill.replicas, Role.DECODE: spec.decode.replicas},
            kv_revision=self.revision,
            settings=Settings(start_seconds=START_SECONDS),
            paused=spec.paused,
            suspend=spec.suspend,
        )
        statefulsets = {
            Role(each["metadata"]["labels"][names.LABEL_ROLE]): each
            for each in desired(self.resource, self.facts)
            if each["kind"] == "StatefulSet"
        }
        return plan(wanted, observed(self.live, statefulsets, self.drains), self.now)

    def situation(self, **changes: Any) -> Situation:
        """What is assessed."""
        known: dict[str, Any] = {
            "name": "demo",
            "namespace": "team",
            "generation": self.resource.metadata.generation,
            "previous": self.previous,
            "resource": self.resource,
            "facts": self.facts,
            "wanted_revision": self.revision,
            "live": self.live,
            "step": self.step(),
            "pairs": self.pairs,
            "unschedulable_seconds": 600.0,
            "now": self.now,
        }
        return Situation(**(known | changes))

    def with_pods(self, *pods: Object) -> Scene:
        """The scene with these pods in the place of those of the same name, or beside the others."""
        changed = {each["metadata"]["name"] for each in pods}
        return replace(self, pods=(*[each for each in self.pods if each["metadata"]["name"] not in changed], *pods))

    def without_pods(self, *gone: str) -> Scene:
        return replace(self, pods=tuple(each for each in self.pods if each["metadata"]["name"] not in gone))

    def with_child(self, kind: str, name: str, **status: Any) -> Scene:
        """The scene with other fields in a child's status."""
        child = self.children[kind, name]
        changed = {**child, "status": {**child["status"], **status}}
        return replace(self, children={**self.children, (kind, name): changed})

    def engine(self, role: str, ordinal: int, *containers: Status, **details: Any) -> dict[str, Any]:
        """An engine of the wanted KV revision."""
        return pod(f"demo-{role}-{ordinal}", role, *containers, **{"kv": self.revision, **details})

    def verified(self, verdict: Verdict = Verdict.VERIFIED, **details: Any) -> Scene:
        """The scene with this verdict on every pair."""
        engines = [each for each in self.pods if each["metadata"]["labels"][names.LABEL_ROLE] != names.ROUTER]
        pairs = {}
        for prefill in engines:
            for decode in engines:
                roles = [each["metadata"]["labels"][names.LABEL_ROLE] for each in (prefill, decode)]
                if roles == ["prefill", "decode"]:
                    report = pair(prefill, decode, verdict, **details)
                    pairs[report.key] = report
        return replace(self, pairs=pairs)


def pair(prefill: Object, decode: Object, verdict: Verdict, **details: Any) -> PairReport:
    """What the routers say of two pods."""
    return PairReport(
        prefill=prefill["metadata"]["name"],
        decode=decode["metadata"]["name"],
        prefill_uid=prefill["metadata"]["uid"],
        decode_uid=decode["metadata"]["uid"],
        kv_revision=decode["metadata"]["labels"][names.LABEL_KV_REVISION],
        verdict=verdict,
        **details,
    )


def scene(*, generation: int = 1, settings: OperatorSettings | None = None, **changes: Any) -> Scene:
    """``document(**changes)``, applied, with every pod ready and every pair verified. Not to be changed in place."""
    if settings is None:
        return _usual(generation, tuple(sorted(changes.items())))
    return _made(generation, settings, changes)


@functools.cache
def _usual(generation: int, changes: tuple[tuple[str, Any], ...]) -> Scene:
    return _made(generation, OperatorSettings(), dict(changes))


def _made(generation: int, settings: OperatorSettings, changes: Mapping[str, Any]) -> Scene:
    written = document(**changes)
    written["metadata"] |= {"namespace": "team", "uid": "uid-demo", "generation": generation}
    resource = DisaggregatedInference.parse(written)
    facts = resolve(resource, settings)
    children = {(each["kind"], each["metadata"]["name"]): stored(each) for each in desired(resource, facts)}
    for (kind, _), child in children.items():
        if kind == "StatefulSet":
            child["status"] = {"observedGeneration": 1, "currentRevision": NEW, "updateRevision": NEW}
        elif kind == "Deployment":
            total = child["spec"]["replicas"]
            child["status"] = {"observedGeneration": 1, "replicas": total, "updatedReplicas": total}
    empty = Scene(resource, facts, children, ())
    counts = {"prefill": resource.spec.prefill.replicas, "decode": resource.spec.decode.replicas}
    if resource.spec.suspend:
        counts = dict.fromkeys(counts, 0)
    pods = [empty.engine(role, ordinal) for role, total in counts.items() for ordinal in range(total)]
    pods += [pod(f"demo-router-{index}", names.ROUTER) for index in range(resource.spec.router.replicas)]
    return replace(empty, pods=tuple(pods)).verified()
