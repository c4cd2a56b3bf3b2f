"""Pods that nobody runs, and what a kubelet would say of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from kvloop_operator import names
from tests.cluster.waiting import wait_until
from tests.harness.kube import Kube, Object


def engines(kube: Kube, namespace: str, role: str | None = None) -> list[Object]:
    """The engine pods of a namespace, of one role or of both."""
    roles = role or "prefill,decode"
    return kube.list("Pod", namespace, selector=f"{names.LABEL_ROLE} in ({roles})")


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def make_ready(kube: Kube, namespace: str) -> None:
    """Say of every engine pod that is there now that it is ready."""
    for pod in engines(kube, namespace):
        if not is_ready(pod) and "deletionTimestamp" not in pod["metadata"]:
            _say(kube, pod, ready=True)


def make_broken(kube: Kube, pod: Object) -> None:
    """Say of an engine pod that its image cannot be pulled."""
    _say(kube, pod, ready=False)


def _say(kube: Kube, pod: Object, *, ready: bool) -> None:
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    container = {"name": "engine", "image": "", "imageID": "", "restartCount": 0, "ready": ready, "started": ready}
    running, waiting = {"running": {"startedAt": moment}}, {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}
    status = {
        "phase": "Running" if ready else "Pending",
        "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": moment}],
        "containerStatuses": [{**container, "state": running if ready else waiting}],
    }
    path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}/status"
    # It may be gone by now.
    kube.request("PATCH", path, body={"status": status}, content="application/merge-patch+json")


def wait_until_ready(kube: Kube, namespace: str, *, prefill: int, decode: int) -> None:
    """Make whatever comes ready until there are that many engines."""

    def all_ready() -> bool:
        make_ready(kube, namespace)
        there = {role: engines(kube, namespace, role) for role in ("prefill", "decode")}
        return {role: len(pods) for role, pods in there.items()} == {"prefill": prefill, "decode": decode} and all(
            is_ready(pod) for pods in there.values() for pod in pods
        )

    wait_until(all_ready, what="engines ready")


def pod_called(kube: Kube, namespace: str, name: str) -> Object:
    """Wait for a pod; gives it."""
    found: Object | None = None

    def there() -> bool:
        nonlocal found
        found = kube.get("Pod", namespace, name)
        return found is not None

    wait_until(there, what=f"pod {name}")
    assert found is not None
    return found


def runs(kube: Kube, pod: Object, container: str, *, ready: bool, since: timedelta = timedelta(0)) -> None:
    """Say of a pod what a kubelet says whose container runs for so long."""
    begun = (datetime.now(UTC) - since).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"status": "True", "lastTransitionTime": begun}
    running = {"name": container, "image": "", "imageID": "", "restartCount": 0, "ready": ready}
    status = {
        "phase": "Running",
        "conditions": [
            {"type": "PodScheduled", **condition},
            {"type": "Ready", **condition, "status": str(ready)},
        ],
        "containerStatuses": [{**running, "state": {"running": {"startedAt": begun}}}],
    }
    says_of(kube, pod, status)


def says_of(kube: Kube, pod: Object, status: Object) -> None:
    """Write the status of a pod as a kubelet would."""
    meta = pod["metadata"]
    kube.patch("Pod", meta["namespace"], meta["name"], {"status": status}, subresource="status")
