"""When the operator has done its work, and what the cluster looks like then."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvloop_operator import names
from kvloop_operator.cluster.kinds import CHILDREN, RESOURCE, SECRET
from tests.cluster.audit import AuditEvent, AuditLog
from tests.cluster.waiting import DEADLINE_SECONDS, wait_until
from tests.harness.kube import Kube, Object
from tests.harness.operator_process import USER, OperatorProcess

CHILD_KINDS: Final = tuple(kind.kind for kind in (*CHILDREN, SECRET) if kind.optional is None)

_OF_THE_SERVER: Final = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "namespace")
_CHOSEN_BY_THE_SERVER: Final = ("clusterIP", "clusterIPs")


def writes(audit: AuditLog, namespace: str | None = None) -> list[AuditEvent]:
    """What the operator asked to be changed since then, in one namespace or everywhere."""
    return audit.events(lambda event: event.user == USER and event.mutates and namespace in (None, event.namespace))


def settle(operator: OperatorProcess, audit: AuditLog, namespace: str | None = None) -> None:
    """Wait until two passes over everything, begun after the last write, found nothing to write, and none failed."""

    def quiet() -> bool:
        since, failures = audit.from_now(), operator.failures()
        operator.wait_for_resyncs(2)
        return not writes(since, namespace) and operator.failures() == failures

    wait_until(quiet, what="an operator that has nothing left to write")


def wait_until_seen(kube: Kube, namespace: str, name: str) -> None:
    """Wait until the operator has said something of the resource as it is: before that, rest means nothing."""

    def seen() -> bool:
        found = kube.get(RESOURCE.kind, namespace, name) or {}
        return bool(found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"])

    wait_until(seen, what=f"an operator that has seen {name}")


def wait_for_reason(kube: Kube, namespace: str, name: str, reason: str, *, condition: str = "Ready") -> Object:
    """Wait until a condition has a reason, for the generation that is; gives the resource."""
    found: Object = {}

    def there() -> bool:
        nonlocal found
        found = kube.get(RESOURCE.kind, namespace, name) or {}
        conditions = {each["type"]: each for each in found.get("status", {}).get("conditions", ())}
        now = conditions.get(condition, {})
        return bool(now.get("reason") == reason and now.get("observedGeneration") == found["metadata"]["generation"])

    try:
        wait_until(there, what=f"{condition} because of {reason}")
    except TimeoutError as error:
        told = json.dumps(found.get("status"), indent=1)
        raise TimeoutError(f"not within {DEADLINE_SECONDS} s: {condition} because of {reason}\n{told}") from error
    return found


def owned(kube: Kube, namespace: str, resource: Object) -> dict[tuple[str, str], Object]:
    """The objects of the kinds of children that a resource owns, by kind and name."""
    uid = resource["metadata"]["uid"]
    found = {}
    for kind in CHILD_KINDS:
        for each in kube.list(kind, namespace):
            if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", ())):
                found[kind, each["metadata"]["name"]] = each
    return found


def snapshot(kube: Kube, namespace: str, name: str) -> Any:
    """A resource's status and children without what differs between two clusters: versions, times, addresses, keys."""
    resource = kube.get(RESOURCE.kind, namespace, name)
    assert resource is not None
    children = owned(kube, namespace, resource)
    document = {
        "status": _without(resource.get("status", {}), ("lastTransitionTime",)),
        "children": {" ".join(place): _essence(child) for place, child in sorted(children.items())},
    }
    text = (
        json.dumps(document, sort_keys=True).replace(namespace, "NAMESPACE").replace(resource["metadata"]["uid"], "UID")
    )
    return json.loads(re.sub(rf"{name}-router-[a-z0-9]+-[a-z0-9]{{5}}\b", "ROUTER-POD", text))


def wait_until_nothing_is_left(kube: Kube, namespace: str) -> None:
    """Wait until no resource, no child and no pod is in a namespace."""

    def nothing() -> bool:
        kinds = (*CHILD_KINDS, "Pod")
        left = (kube.list(kind, namespace, selector=names.LABEL_DEPLOYMENT) for kind in kinds)
        return not kube.list(RESOURCE.kind, namespace) and not any(left)

    wait_until(nothing, what="nothing left")


def _essence(child: Object) -> Object:
    essence = {field: value for field, value in child.items() if field not in ("apiVersion", "kind", "status")}
    essence["metadata"] = _without(child["metadata"], _OF_THE_SERVER)
    # Deployments are numbered by their controller.
    essence["metadata"].get("annotations", {}).pop("deployment.kubernetes.io/revision", None)
    if child["kind"] == SECRET.kind:
        essence["data"] = sorted(child["data"])
    if child["kind"] == "Service":
        essence["spec"] = {**child["spec"], **dict.fromkeys(_CHOSEN_BY_THE_SERVER, "?")}
    return essence


def _without(value: Any, fields: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {field: _without(entry, fields) for field, entry in value.items() if field not in fields}
    if isinstance(value, list):
        return [_without(entry, fields) for entry in value]
    return value
