"""What every run under faults does, and what it has to come to: what a run without faults comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvloop_operator.cluster.kinds import RESOURCE
from tests.cluster.audit import AuditLog
from tests.control_plane.settled import settle, snapshot, wait_until_seen, writes
from tests.harness.kube import Kube
from tests.harness.operator_process import OperatorProcess
from tests.unit.operator.documents import document

MADE: Final = document(serviceAccount__create=True, serviceAccount__name="models")
CHANGED: Final[Mapping[str, Any]] = {
    "network": {"policy": {"enabled": False}},
    "router": {"service": {"port": 8080}},
    "serviceAccount": {"annotations": {"a": "b"}},
    "decode": {"replicas": 2, "disruptionBudget": {"maxUnavailable": 2}},
}


@dataclass(frozen=True, slots=True)
class Course:
    """What a run came to."""

    made: Any
    changed: Any
    written: int
    """Successful writes to children."""


def run(kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog, between: Callable[[], None]) -> Course:
    """Make the resource, then change it; `between` the two, once the operator has come to rest."""
    kube.create(MADE, ns)
    wait_until_seen(kube, ns, "demo")
    settle(operator, audit, ns)
    made = snapshot(kube, ns, "demo")
    between()
    kube.patch(RESOURCE.kind, ns, "demo", {"spec": CHANGED})
    wait_until_seen(kube, ns, "demo")
    settle(operator, audit, ns)
    changed = snapshot(kube, ns, "demo")
    since = audit.from_now()
    operator.wait_for_resyncs(3)
    assert writes(since, ns) == []
    to_children = [
        event for event in writes(audit, ns) if event.code < 300 and event.resource not in (RESOURCE.plural, "events")
    ]
    return Course(made, changed, len(to_children))
