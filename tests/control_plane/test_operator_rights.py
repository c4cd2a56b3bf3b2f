"""The operator needs every right that the chart gives it, and no other, by the API server's own log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvloop_operator import names
from kvloop_operator.cluster.kinds import RESOURCE
from tests.charts.helm import Helm
from tests.charts.rights import RIGHTS
from tests.cluster.audit import AuditEvent, AuditLog
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.waiting import wait_until
from tests.control_plane.conftest import StartOperator
from tests.control_plane.ready import engines, make_broken, make_ready, wait_until_ready
from tests.harness.kube import Kube, Object
from tests.harness.operator_process import NAMESPACE, install_rights
from tests.unit.operator.documents import document

pytestmark = pytest.mark.timeout(1200)

POD_MONITORS: Final = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "names": {"kind": "PodMonitor", "plural": "podmonitors"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
"""What the Prometheus operator brings, without its schema."""

HANDED_ON: Final = {(("", "pods"), "get")}
"""What the operator has only because it gives it to each router."""


@pytest.fixture
def pod_monitors(control_plane: Cluster, tmp_path: Path) -> Iterator[None]:
    """A cluster that has the Prometheus operator's API."""
    file = tmp_path / "podmonitors.yaml"
    file.write_text(yaml.safe_dump(POD_MONITORS))
    control_plane.define(file)
    yield
    control_plane.kubectl("delete", f"--filename={file}")


class Life:
    """A resource whose life touches everything that the operator deals with."""

    def __init__(self, kube: Kube, ns: str) -> None:
        self.kube = kube
        self.ns = ns

    def begins(self) -> None:
        """With every kind of child."""
        unseen = {f"{part}__podTemplate": {"spec": {"schedulerName": "nobody"}} for part in ("prefill", "decode")}
        wanted = {
            "monitoring__podMonitor": True,
            "network__efa__mode": "DRA",
            "serviceAccount__create": True,
            "serviceAccount__name": "models",
            "decode__replicas": 3,
        }
        self.kube.create(document(**unseen, **wanted), self.ns)
        self.wait_for("StatefulSet", 2)
        self.wait_for("PodMonitor", 3)
        self.wait_for("ResourceClaimTemplate", 2)
        wait_until_ready(self.kube, self.ns, prefill=1, decode=3)

    def has_two_routers_for_a_while(self) -> None:
        """They share handles in a server, which goes with the second of them."""
        before = len(self.kube.list("Service", self.ns, selector=names.LABEL_DEPLOYMENT))
        for replicas in (2, 1):
            self.kube.patch(RESOURCE.kind, self.ns, "demo", {"spec": {"router": {"replicas": replicas}}})
            self.wait_for("Deployment", replicas)
            self.wait_for("Service", before + replicas - 1)

    def is_edited_by_hand(self) -> None:
        """In every kind of child that the operator may write."""
        for kind in ("Service", "ConfigMap", "Role", "RoleBinding", "PodDisruptionBudget", "Deployment", "Secret"):
            self.kube.delete(kind, self.ns, "demo-router")
            self.wait_for_name(kind, "demo-router")
        for kind in ("StatefulSet", "PodMonitor", "NetworkPolicy"):
            self.kube.patch(kind, self.ns, "demo-decode", {"metadata": {"labels": {names.LABEL_ROLE: "other"}}})
            self.wait_until_like(
                kind, "demo-decode", lambda found: found["metadata"]["labels"][names.LABEL_ROLE] == "decode"
            )
        labels = {"metadata": {"labels": {names.LABEL_ROLE: "other"}}}
        self.kube.patch("ResourceClaimTemplate", self.ns, "demo-decode-efa", labels)
        self.kube.patch("ServiceAccount", self.ns, "models", {"automountServiceAccountToken": True})
        self.wait_until_like("ServiceAccount", "models", lambda found: not found["automountServiceAccountToken"])

    def shrinks(self) -> None:
        """One decode engine is drained."""
        self.kube.patch(RESOURCE.kind, self.ns, "demo", {"spec": {"decode": {"replicas": 2}}})
        wait_until_ready(self.kube, self.ns, prefill=1, decode=2)

    def gets_another_image(self) -> None:
        """All engines are replaced."""
        self.rolls({"engine": {"image": "my-registry/vllm-efa:v0.33.1"}})

    def is_put_right(self) -> None:
        """The engines' image could not be pulled; with another one none of their pods stands in the way."""
        broken = engines(self.kube, self.ns, "decode")
        for pod in broken:
            make_broken(self.kube, pod)
        self.kube.patch(RESOURCE.kind, self.ns, "demo", {"spec": {"engine": {"image": "my-registry/vllm-efa:v0.33.2"}}})

        # The controller of StatefulSets replaces one, and would wait for it.
        def replaced() -> bool:
            now = engines(self.kube, self.ns, "decode")
            return not {pod["metadata"]["uid"] for pod in broken} & {pod["metadata"]["uid"] for pod in now}

        wait_until(replaced, what="broken engines replaced")
        wait_until_ready(self.kube, self.ns, prefill=1, decode=2)

    def wants_less(self) -> None:
        """What is optional goes."""
        self.rolls(
            {
                "monitoring": {"podMonitor": False},
                "network": {"efa": {"mode": "DevicePlugin"}, "policy": {"enabled": False}},
                "serviceAccount": {"create": False, "name": None},
            }
        )
        for kind in ("PodMonitor", "NetworkPolicy", "ResourceClaimTemplate"):
            self.wait_for(kind, 0)
        wait_until(lambda: self.kube.get("ServiceAccount", self.ns, "models") is None, what="no service account")

    def rolls(self, change: dict[str, Any]) -> None:
        before = {pod["metadata"]["uid"] for pod in engines(self.kube, self.ns)}
        self.kube.patch(RESOURCE.kind, self.ns, "demo", {"spec": change})

        def replaced() -> bool:
            make_ready(self.kube, self.ns)
            return not before & {pod["metadata"]["uid"] for pod in engines(self.kube, self.ns)}

        wait_until(replaced, what="new engines")
        wait_until_ready(self.kube, self.ns, prefill=1, decode=2)

    def may_have_no_more_pods(self) -> None:
        """A quota stands against a pod that the StatefulSet wants back."""
        quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
        self.kube.request("POST", f"/api/v1/namespaces/{self.ns}/resourcequotas", body=quota)
        wait_until(lambda: "status" in self._quota(), what="a quota that counts")
        self.kube.delete("Pod", self.ns, "demo-decode-0")
        wait_until(
            lambda: "exceeded quota" in str(self.kube.get(RESOURCE.kind, self.ns, "demo")), what="a status that says so"
        )

    def _quota(self) -> Object:
        found: Object = self.kube.request("GET", f"/api/v1/namespaces/{self.ns}/resourcequotas/none").body
        return found

    def wait_for(self, kind: str, count: int) -> None:
        wait_until(
            lambda: len(self.kube.list(kind, self.ns, selector=names.LABEL_DEPLOYMENT)) == count,
            what=f"{count} of {kind}",
        )

    def wait_for_name(self, kind: str, name: str) -> None:
        wait_until(lambda: self.kube.get(kind, self.ns, name) is not None, what=f"{kind} {name}")

    def wait_until_like(self, kind: str, name: str, like: Any) -> None:
        def is_like() -> bool:
            found = self.kube.get(kind, self.ns, name)
            return found is not None and bool(like(found))

        wait_until(is_like, what=f"{kind} {name} put right")


def used(events: list[AuditEvent]) -> set[tuple[tuple[str, str], str]]:
    """The rights that requests took. An apply that makes an object takes `create` too, which only its status tells."""
    found = set()
    for event in events:
        if not event.resource:
            continue
        what = event.group, f"{event.resource}/{event.subresource}" if event.subresource else event.resource
        found.add((what, event.verb))
        if event.verb == "patch" and event.code == 201:
            found.add((what, "create"))
    return found


@pytest.mark.parametrize("scope", ["cluster", "namespace"])
def test_over_a_whole_life_nothing_is_forbidden_and_every_right_is_used(
    control_plane: Cluster,
    kube: Kube,
    ns: str,
    namespace_cp: Kubectl,
    pod_monitors: None,
    start_operator: StartOperator,
    audit: AuditLog,
    tmp_path: Path,
    scope: str,
) -> None:
    release = f"{ns}-kvloop"
    namespaces = [ns] if scope == "namespace" else []
    account = install_rights(control_plane, Helm(tmp_path), release=release, namespaces=namespaces)
    flags = [f"--namespace={ns}"] if namespaces else ["--all-namespaces"]
    start_operator(*flags, "--resync-seconds=0.5", kubeconfig=account)
    life = Life(kube, ns)
    life.begins()
    life.has_two_routers_for_a_while()
    life.is_edited_by_hand()
    life.shrinks()
    life.gets_another_image()
    life.is_put_right()
    life.wants_less()
    life.may_have_no_more_pods()

    user = f"system:serviceaccount:{NAMESPACE}:{release}-operator"
    events = audit.events(lambda event: event.user == user)
    # An admission's 403 is another matter: namespaces of earlier tests are still on their way out.
    assert [event for event in events if not event.allowed or event.code == 401] == []
    given = {(what, verb) for what, verbs in RIGHTS.items() for verb in verbs}
    assert given - used(events) == HANDED_ON
    role = kube.get("Role", ns, "demo-router")
    assert role is not None
    assert [verb for rule in role["rules"] for verb in rule["verbs"]] == ["get", "list", "watch"]
