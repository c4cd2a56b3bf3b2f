"""Engine pods that nobody runs, what the operator makes for their router, and what the router learns of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.desired import desired
from kvloop_operator.facts import OperatorSettings, SecretMaterial, resolve
from kvloop_router.engine_spec import EngineSpec
from tests.cluster.kubectl import Kubectl
from tests.harness.engines import SERVED_MODEL
from tests.harness.kube import Kube
from tests.integration.router_process import until

NAME = "demo"
SECRETS = SecretMaterial(admin_token="t" * 32, digest_key="ab" * 32, seal_key="cd" * 32)


class Place:
    """A namespace with what the operator makes for a router, and pods that say what a test has them say."""

    def __init__(self, kube: Kube, kubectl: Kubectl) -> None:
        assert kubectl.namespace is not None
        self.kube = kube
        self.kubectl = kubectl
        self.namespace = kubectl.namespace

    def add(self, name: str, role: str = "decode", *, deployment: str = NAME, **status: Any) -> str:
        """A pod, whose deletion waits for ``let_go``; gives its UID. With ``status``: one that serves."""
        labels = {"kvloop.io/deployment": deployment, "kvloop.io/role": role, "kvloop.io/kv-revision": "abc"}
        made = self.kube.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": labels, "finalizers": ["kvloop.io/test"]},
                "spec": {"containers": [{"name": "engine", "image": "localhost/none:1"}]},
            },
            self.namespace,
        )
        if status:
            self.says(name, **status)
        return str(made["metadata"]["uid"])

    def says(
        self, name: str, *, address: str = "10.0.0.1", ready: bool = True, runs: bool = True, process: str = "1"
    ) -> None:
        """What a kubelet says of a pod."""
        state = {"running": {}} if runs else {"terminated": {"exitCode": 0}}
        container = {"name": "engine", "image": "", "imageID": "", "restartCount": 0, "ready": ready, "started": True}
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{**container, "state": state, "containerID": f"containerd://{process}"}],
        }
        self.kube.patch("Pod", self.namespace, name, {"status": status}, subresource="status")

    def label(self, name: str, label: str, value: str | None) -> None:
        self.kube.patch("Pod", self.namespace, name, {"metadata": {"labels": {label: value}}})

    def delete(self, name: str) -> None:
        """As ``kubectl delete`` does: the pod terminates."""
        self.kube.delete("Pod", self.namespace, name)

    def let_go(self, name: str) -> None:
        """Its container has ended and the pod goes."""
        self.kube.patch("Pod", self.namespace, name, {"metadata": {"finalizers": None}})


class Known:
    """What discovery has told. ``interruptions``: why watches ended."""

    def __init__(self) -> None:
        self.told: list[tuple[EngineSpec, ...]] = []
        self.interruptions: list[str] = []

    @property
    def engines(self) -> dict[str, EngineSpec]:
        return {engine.name: engine for engine in self.told[-1]} if self.told else {}

    async def update(self, engines: tuple[EngineSpec, ...]) -> None:
        self.told.append(engines)

    async def until(self, condition: Callable[[dict[str, EngineSpec]], bool]) -> None:
        await until(lambda: condition(self.engines), seconds=60)

    async def until_draining(self, name: str) -> None:
        await self.until(lambda engines: name in engines and engines[name].draining)

    async def until_gone(self, name: str) -> None:
        await self.until(lambda engines: name not in engines)

    async def until_named(self, *names: str) -> None:
        await self.until(lambda engines: set(engines) == set(names))


def children(namespace: str) -> list[dict[str, Any]]:
    """What the operator makes of a small resource."""
    resource = DisaggregatedInference.parse(
        {
            "apiVersion": "kvloop.io/v1alpha1",
            "kind": "DisaggregatedInference",
            "metadata": {"name": NAME, "namespace": namespace},
            "spec": {
                "model": {"id": "tiny", "servedName": SERVED_MODEL},
                "engine": {"image": "localhost/kvloop-sim:v0.33.0"},
                "prefill": {"accelerator": "cpu"},
                "decode": {"accelerator": "cpu"},
            },
        }
    )
    return desired(resource, resolve(resource, OperatorSettings(secret_material=SECRETS)))
