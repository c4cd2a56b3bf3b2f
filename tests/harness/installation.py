"""kvloop as its chart installs it on a node, by the real helm."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from tests.charts.helm import CHART, Helm
from tests.cluster.audit import AuditEvent, AuditLog
from tests.cluster.errors import CommandFailedError
from tests.cluster.kubectl import Kubectl
from tests.cluster.waiting import wait_until
from tests.harness.deployment import is_ready
from tests.harness.inside import Inside
from tests.harness.kube import Kube, Object

NAMESPACE: Final = "kvloop-system"
USER: Final = f"system:serviceaccount:{NAMESPACE}:kvloop-operator"
RESYNC_SECONDS: Final = 2

_METRICS_PORT: Final = 9090
_SELECTOR: Final = "app.kubernetes.io/name=kvloop-operator"


class Installation:
    """The release and its operator."""

    title: Final = "the operator"

    def __init__(
        self, helm: Helm, kubectl: Kubectl, kube: Kube, inside: Inside, *, images: Mapping[str, str], audit: AuditLog
    ) -> None:
        self._helm = helm
        self._kubectl = kubectl
        self._kube = kube
        self._inside = inside
        self._images = images
        self._audit = audit

    def install(self) -> None:
        """Install the chart and wait until its operator is ready."""
        operator, router = (_image(self._images[component]) for component in ("operator", "router"))
        values: dict[str, Any] = {
            "image": operator,
            "router": {"image": router},
            "operator": {"resyncSeconds": RESYNC_SECONDS},
        }
        self._helm("install", "kvloop", CHART, "--wait", "--timeout=240s", values=values)

    def uninstall(self) -> None:
        """Uninstall it and wait until its operator is gone."""
        self._helm("uninstall", "kvloop", "--wait")
        wait_until(lambda: not self._pods(), what="the operator gone")

    def kill_operator(self) -> None:
        """Delete the operator's pod, without waiting for the next one."""
        for pod in self._pods():
            self._kube.delete("Pod", NAMESPACE, pod["metadata"]["name"])

    def wait_until_ready(self) -> None:
        """Wait until there is one operator, ready to work."""
        wait_until(lambda: [is_ready(pod) for pod in self._pods()] == [True], what="one operator, ready")

    def stop_operator(self) -> None:
        """Scale the operator to zero and wait until it is gone."""
        self._kubectl("scale", "deployment/kvloop-operator", "--replicas=0")
        wait_until(lambda: not self._pods(), what="the operator gone")

    def start_operator(self) -> None:
        """Undo ``stop_operator``."""
        self._kubectl("scale", "deployment/kvloop-operator", "--replicas=1")
        self.wait_until_ready()

    def writes(self, since: AuditLog) -> list[AuditEvent]:
        """What the operator asked to be changed."""
        return since.events(lambda event: event.user == USER and event.mutates)

    def wait_until_quiet(self) -> AuditLog:
        """Wait until a pass over everything finds nothing to write; gives the audit log from then on."""
        since = self._audit.from_now()

        def quiet() -> bool:
            nonlocal since
            since = self._audit.from_now()
            self.wait_for_resyncs(1)
            return not self.writes(since)

        wait_until(quiet, what="an operator that has nothing left to write")
        return since

    def wait_for_resyncs(self, count: int) -> None:
        """Wait until everything was read anew ``count`` times from now on, and passed over."""
        # The passes follow the reading: with the next one they are over.
        wanted = self._resyncs() + count + 1
        wait_until(lambda: self._resyncs() >= wanted, what=f"{count} resyncs")

    def explain(self) -> str:
        """What the operator's pod is at, and what it wrote last."""
        commands = ("get", "pods", "--output=wide"), ("logs", f"--selector={_SELECTOR}", "--tail=60")
        told = []
        for command in commands:
            with suppress(CommandFailedError):
                told.append(self._kubectl(*command))
        return "\n".join(told)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of those series of the operator's own metrics; it starts anew with each operator."""
        (pod,) = self._pods()
        text = self._inside.get(f"http://{pod['status']['podIP']}:{_METRICS_PORT}/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(
            sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def _resyncs(self) -> float:
        return self.metric("kvloop_operator_resyncs_total", result="ok")

    def _pods(self) -> list[Object]:
        return self._kube.list("Pod", NAMESPACE, selector=_SELECTOR)


def _image(name: str) -> dict[str, str]:
    repository, _, tag = name.rpartition(":")
    return {"repository": repository, "tag": tag}
