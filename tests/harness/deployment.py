"""A DisaggregatedInference with simulated engines on a real node, as tests see it: status, pods, engines, turns."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.cluster.kinds import RESOURCE
from tests.cluster.errors import CommandFailedError
from tests.cluster.kubectl import Kubectl
from tests.cluster.waiting import DEADLINE_SECONDS
from tests.harness import metrics
from tests.harness.inside import Answer, Inside, Pending
from tests.harness.kube import Kube, Object
from tests.harness.metrics import EngineMetrics

NAME: Final = "demo"
MODEL: Final = "demo"

_POLL_SECONDS: Final = 0.2
_PAIRS_POLL_SECONDS: Final = 0.3


def spec(image: str) -> dict[str, Any]:
    """One prefill and one decode engine. Prefill keeps no cache of its own, so that reuse means transfer."""
    small = {"requests": {"cpu": "50m", "memory": "64Mi"}}
    role = {"accelerator": "cpu", "resources": small, "terminationGracePeriodSeconds": 60}
    return {
        "model": {"id": "kvloop/demo-model", "servedName": MODEL},
        "engine": {"image": image, "version": "0.33.0", "dtype": "float32", "blockSize": 32, "maxModelLen": 32768},
        # How long prefill keeps what nobody reads, such as after a release: it does not end before that.
        "kvTransfer": {"extraConfig": {"kv_lease_duration": 5}},
        "prefill": {"replicas": 1, "prefixCaching": False, **role},
        "decode": {"replicas": 1, **role},
        "router": {"resources": small},
        "rollout": {"drainTimeoutSeconds": 60, "honourHandlesSeconds": 3},
    }


@dataclass(frozen=True, slots=True)
class EnginePod:
    """An engine pod at one moment. ``process`` is another one after its container was started again."""

    name: str
    uid: str
    role: Role
    address: str
    kv_revision: str
    process: str
    restarts: int
    ready: bool
    draining: bool
    deleted_at: float | None
    """When its deletion was asked for, in Unix seconds; None where it was not."""

    @property
    def url(self) -> str:
        return f"http://{self.address}:{names.ENGINE_PORT}"


@dataclass(frozen=True, slots=True)
class Meeting:
    """What an engine says of a peer. ``reason``: why hands were not shaken, else empty."""

    engine: str
    peer: str
    compatibility: str
    reason: str
    pod: str


@dataclass(slots=True)
class Meetings:
    """What the engines themselves say of whom they met, gathered for as long as they live.

    revisions: the KV revision of each engine that was seen, by its engine id.
    """

    revisions: dict[str, str] = field(default_factory=dict)
    all: set[Meeting] = field(default_factory=set)

    def mixed(self) -> list[str]:
        """Meetings of engines of two KV revisions, and of engines that refused one another."""
        known = self.revisions
        return [
            f"{met}: {known.get(met.engine)}, {known.get(met.peer)}"
            for met in self.all
            if met.reason or known.get(met.engine) != known.get(met.peer)
        ]


class Deployment:
    """One resource in a namespace of its own."""

    def __init__(self, kubectl: Kubectl, kube: Kube, inside: Inside, *, name: str = NAME) -> None:
        assert kubectl.namespace is not None
        self.name = name
        self.namespace = kubectl.namespace
        self.kubectl = kubectl
        self.kube = kube
        self.inside = inside

    @property
    def title(self) -> str:
        """Names it in a report."""
        return f"{self.namespace}/{self.name}"

    def apply(self, wanted: Mapping[str, Any]) -> None:
        """Apply the resource with kubectl, as a person does."""
        self.kubectl.apply(
            {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": self.name}, "spec": wanted}
        )

    def edit(self, **fields: Any) -> None:
        """Merge fields into the spec."""
        self.kube.patch(RESOURCE.kind, self.namespace, self.name, {"spec": fields})

    def resource(self) -> Object:
        """As it is now; empty where it is gone."""
        return self.kube.get(RESOURCE.kind, self.namespace, self.name) or {}

    def conditions(self) -> dict[str, Object]:
        """Those that are about the spec as it is now, by type."""
        resource = self.resource()
        status, generation = resource.get("status", {}), resource.get("metadata", {}).get("generation")
        return {each["type"]: each for each in status.get("conditions", ()) if each["observedGeneration"] == generation}

    def wait_for(self, kind: str, status: str, *, reason: str | None = None) -> Object:
        """Wait for a condition of the present spec; gives it."""

        def there() -> bool:
            found = self.conditions().get(kind, {})
            return found.get("status") == status and reason in (None, found["reason"])

        self.wait_until(there, what=f"{kind}={status} {reason or ''}")
        return self.conditions()[kind]

    def wait_until_served(self, *, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until nothing is left to be done: Ready, KV seen to move, all engines there and none on its way out, and
        the Service leads to the router, which the node's kube-proxy learns a moment after the pod is ready."""

        def served() -> bool:
            found, engines = self.conditions(), self.engines()
            fine = all(found.get(each, {}).get("status") == "True" for each in ("Ready", "KVTransferVerified"))
            wanted = sum(self.resource()["spec"][role.value]["replicas"] for role in Role)
            there = len(engines) == wanted and all(pod.ready for pod in engines)
            settled = fine and there and not found.keys() & {"Reconciling", "Stalled"}
            return settled and not self.inside.get(f"{self.url}/healthz").error

        self.wait_until(served, what="the resource to serve", seconds=seconds)

    def wait_until(self, condition: Callable[[], bool], *, what: str, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until ``condition`` holds. The error shows the status as it then is."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                status = json.dumps(self.resource().get("status"), indent=1)
                raise TimeoutError(f"not within {seconds:.0f} s: {what}\n{status}")
            time.sleep(_POLL_SECONDS)

    @property
    def url(self) -> str:
        """The router's Service, by its address in the cluster."""
        service = self.kube.get("Service", self.namespace, names.router_name(self.name))
        assert service is not None
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    def begin(self, messages: Sequence[Mapping[str, str]], **more: Any) -> Pending:
        """Send a chat request through the Service, without waiting for its answer."""
        body = {"model": MODEL, "messages": list(messages), "max_tokens": 24, **more}
        return self.inside.begin("POST", f"{self.url}/v1/chat/completions", body)

    def chat(self, messages: Sequence[Mapping[str, str]], **more: Any) -> Answer:
        """The answer to a chat request through the Service."""
        answer = self.begin(messages, **more).answer()
        assert (answer.error, answer.status) == ("", 200), answer
        return answer

    def pods(self, role: str) -> list[Object]:
        """The pods of a role, terminating ones too."""
        labels = ",".join(f"{key}={value}" for key, value in names.selector(self.name, role).items())
        return self.kube.list("Pod", self.namespace, selector=labels)

    def engines(self, *roles: Role) -> list[EnginePod]:
        """The engine pods, of all roles or some, by name."""
        found = [engine_pod(pod) for role in roles or Role for pod in self.pods(role.value)]
        return sorted(found, key=lambda pod: (pod.name, pod.uid))

    def engine(self, name: str) -> EnginePod:
        """The newest pod of that name."""
        pods = {pod.name: pod for pod in self.engines() if pod.deleted_at is None}
        return pods[name]

    def metrics(self, pod: EnginePod) -> EngineMetrics:
        """An engine's own counters."""
        return metrics.parse(self.inside.get(f"{pod.url}/metrics").text)

    def admin(self, what: str) -> Any:
        """What the first router that is ready says of its ``engines`` or ``pairs``."""
        secret = self.kubectl("get", "secret", names.router_name(self.name), f"--output=go-template={_TOKEN}")
        router = next(pod for pod in self.pods(names.ROUTER) if is_ready(pod))
        url = f"http://{router['status']['podIP']}:{names.ADMIN_PORT}/admin/v1/{what}"
        return self.inside.get(url, headers={"Authorization": f"Bearer {secret}"}).json[what]

    @contextmanager
    def meetings(self) -> Iterator[Meetings]:
        """Ask the simulated engines all the while whom they met."""
        found, stop = Meetings(), threading.Event()
        failures: list[Exception] = []

        def gather() -> None:
            try:
                while not stop.wait(_PAIRS_POLL_SECONDS):
                    self._ask_whom_they_met(found)
            except Exception as error:  # noqa: BLE001  raised where the test waits
                failures.append(error)

        thread = threading.Thread(target=gather, name="meetings")
        thread.start()
        try:
            yield found
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]
        self._ask_whom_they_met(found)

    def _ask_whom_they_met(self, found: Meetings) -> None:
        # All at once: a pod that has just ended takes seconds not to answer.
        pods = [pod for pod in self.engines() if pod.address]
        states, meetings = (
            [self.inside.begin("GET", f"{pod.url}/sim/{what}") for pod in pods] for what in ("state", "pairs")
        )
        for pod, state, pairs in zip(pods, _answers(states), _answers(meetings), strict=True):
            # One that starts or has just ended does not answer.
            if state.status == pairs.status == 200:
                own = state.json["engine_id"]
                found.revisions[own] = pod.kv_revision
                found.all |= {
                    Meeting(own, pair["engine_id"], pair["compatibility"], pair["reason"], pod.name)
                    for pair in pairs.json
                }

    def explain(self) -> str:
        """Status, events and logs, for somebody who has to find out why a test failed."""
        told = [json.dumps(self.resource().get("status"), indent=1)]
        for command in (("get", "pods", "--output=wide"), ("events",)):
            with suppress(CommandFailedError):
                told.append(self.kubectl(*command))
        for role in (names.ROUTER, *(role.value for role in Role)):
            for pod in self.pods(role):
                name = pod["metadata"]["name"]
                with suppress(CommandFailedError):
                    told.append(f"--- log of {name}\n{self.kubectl('logs', name, '--tail=40')}")
        return "\n".join(told)


_TOKEN: Final = f'{{{{index .data "{names.ADMIN_TOKEN_KEY}" | base64decode}}}}'


def _answers(requests: Sequence[Pending]) -> list[Answer]:
    return [request.answer() for request in requests]


def engine_pod(pod: Object) -> EnginePod:
    """What a test wants to know of an engine pod."""
    meta, status = pod["metadata"], pod.get("status", {})
    (container,) = status.get("containerStatuses") or [{}]
    return EnginePod(
        name=meta["name"],
        uid=meta["uid"],
        role=Role(meta["labels"][names.LABEL_ROLE]),
        address=status.get("podIP", ""),
        kv_revision=meta["labels"][names.LABEL_KV_REVISION],
        process=container.get("containerID", ""),
        restarts=container.get("restartCount", 0),
        ready=is_ready(pod),
        draining=names.LABEL_DRAINING in meta["labels"],
        deleted_at=_deleted_at(meta),
    )


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready and stays."""
    ready = any((each["type"], each["status"]) == ("Ready", "True") for each in pod["status"].get("conditions", ()))
    return ready and "deletionTimestamp" not in pod["metadata"]


def _deleted_at(meta: Object) -> float | None:
    if "deletionTimestamp" not in meta:
        return None
    end = time.mktime(time.strptime(meta["deletionTimestamp"], "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    return end - float(meta.get("deletionGracePeriodSeconds", 0))
