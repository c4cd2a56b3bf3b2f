"""The operator is killed, started anew, asked to end, and away when things happen."""

from __future__ import annotations

import pytest

from kvloop_operator import names
from kvloop_operator.cluster.kinds import RESOURCE
from tests.cluster.audit import AuditLog
from tests.cluster.cluster import Cluster
from tests.cluster.waiting import wait_until
from tests.control_plane.conftest import StartOperator
from tests.control_plane.settled import (
    settle,
    snapshot,
    wait_for_reason,
    wait_until_nothing_is_left,
    writes,
)
from tests.harness.kube import Kube
from tests.harness.operator_process import USER, OperatorEnded, OperatorProcess
from tests.unit.operator.documents import document

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def operator(own_operator: OperatorProcess, kube: Kube, ns: str, audit: AuditLog) -> OperatorProcess:
    """Of the test's own, with the resource `demo` and all that belongs to it."""
    kube.create(document(), ns)
    settle(own_operator, audit, ns)
    return own_operator


def test_started_again_after_it_was_killed_it_finds_nothing_to_write(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog
) -> None:
    before = snapshot(kube, ns, "demo")
    since = audit.from_now()
    operator.restart()
    operator.wait_for_resyncs(2)
    assert writes(since, ns) == []
    assert snapshot(kube, ns, "demo") == before


def test_killed_in_the_middle_of_its_work_it_ends_where_it_would_have_ended(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog
) -> None:
    before = snapshot(kube, ns, "demo")
    kube.delete(RESOURCE.kind, ns, "demo")
    wait_until_nothing_is_left(kube, ns)
    kube.create(document(), ns)
    wait_until(lambda: bool(kube.list("ConfigMap", ns, selector=names.LABEL_DEPLOYMENT)), what="the first children")
    operator.restart()
    settle(operator, audit, ns)
    assert snapshot(kube, ns, "demo") == before


def test_what_happened_while_it_was_away_is_made_good(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog
) -> None:
    before = snapshot(kube, ns, "demo")
    operator.kill()
    kube.delete("Service", ns, "demo-router")
    kube.patch("Role", ns, "demo-router", {"rules": []})
    kube.patch(RESOURCE.kind, ns, "demo", {"spec": {"network": {"policy": {"enabled": False}}}})
    operator.launch()
    operator.wait_until_ready()
    settle(operator, audit, ns)
    after = snapshot(kube, ns, "demo")["children"]
    assert after == {
        place: child for place, child in before["children"].items() if not place.startswith("NetworkPolicy")
    }


def test_a_resource_goes_with_everything_while_no_operator_runs(kube: Kube, ns: str, operator: OperatorProcess) -> None:
    operator.kill()
    kube.delete(RESOURCE.kind, ns, "demo")
    wait_until_nothing_is_left(kube, ns)


@pytest.mark.parametrize("operator_runs", [True, False])
def test_a_namespace_is_not_stuck_on_its_way_out(
    kube: Kube, ns: str, operator: OperatorProcess, operator_runs: bool
) -> None:
    if not operator_runs:
        operator.kill()
    kube.request("DELETE", f"/api/v1/namespaces/{ns}")
    wait_until(lambda: kube.request("GET", f"/api/v1/namespaces/{ns}").status == 404, what="end of the namespace")
    if operator_runs:
        assert operator.health()[0] == 200
        assert "a pass failed" not in operator.log.read_text()


def test_asked_to_end_it_ends_within_its_grace_period_and_without_a_complaint(operator: OperatorProcess) -> None:
    assert operator.stop() < 10
    assert '"level": "error"' not in operator.log.read_text()


def test_other_namespaces_are_none_of_its_business(
    kube: Kube, ns: str, control_plane: Cluster, operator: OperatorProcess, audit: AuditLog
) -> None:
    with control_plane.namespace() as elsewhere:
        assert elsewhere.namespace is not None
        kube.create(document(), elsewhere.namespace)
        operator.wait_for_resyncs(3)
        of_the_operator = audit.events(lambda event: event.user == USER)
    assert of_the_operator
    assert elsewhere.namespace not in {event.namespace for event in of_the_operator}
    assert {event.namespace for event in of_the_operator if event.verb == "list"} == {ns}


def test_changes_are_seen_by_watches_and_need_no_reading_of_everything(
    kube: Kube, ns: str, start_operator: StartOperator
) -> None:
    start_operator(f"--namespace={ns}", "--resync-seconds=100000")
    kube.create(document(), ns)
    wait_for_reason(kube, ns, "demo", "Unschedulable")
    before = snapshot(kube, ns, "demo")["children"]
    kube.delete("Service", ns, "demo-router")
    kube.delete("StatefulSet", ns, "demo-decode")
    kube.patch("Role", ns, "demo-router", {"rules": []})
    kube.patch("Deployment", ns, "demo-router", {"spec": {"replicas": 3}})
    kube.patch("NetworkPolicy", ns, "demo-prefill", {"spec": {"ingress": []}})
    kube.patch("PodDisruptionBudget", ns, "demo-decode", {"spec": {"maxUnavailable": "100%"}})
    wait_until(lambda: snapshot(kube, ns, "demo")["children"] == before, what="everything as before")


def test_without_any_rights_it_says_so_and_ends(control_plane: Cluster, ns: str, start_operator: StartOperator) -> None:
    nobody = control_plane.service_account(ns, "default")
    with pytest.raises(OperatorEnded, match=r"cannot list resource .* in API group"):
        start_operator("--all-namespaces", kubeconfig=nobody)
