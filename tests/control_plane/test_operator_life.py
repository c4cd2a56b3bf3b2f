"""The life of a resource and of its children, with a real operator on a real API server."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_operator import names
from kvloop_operator.cluster.kinds import RESOURCE
from tests.cluster.audit import AuditLog
from tests.cluster.kubectl import Kubectl
from tests.cluster.waiting import wait_until
from tests.control_plane.ready import engines, make_ready, wait_until_ready
from tests.control_plane.settled import (
    CHILD_KINDS,
    owned,
    settle,
    snapshot,
    wait_for_reason,
    wait_until_nothing_is_left,
    writes,
)
from tests.harness.kube import Kube, Object
from tests.harness.operator_process import OperatorProcess
from tests.unit.operator.documents import RESOURCES, document, read

pytestmark = pytest.mark.timeout(1200)

FOREIGN = {"app.kubernetes.io/managed-by": "somebody-else"}


@pytest.fixture
def demo(kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog) -> Object:
    """The resource `demo`, with all that the operator makes of it."""
    made = kube.create(document(serviceAccount__create=True, serviceAccount__name="models"), ns)
    settle(operator, audit, ns)
    return made


def test_a_resource_gets_its_children_and_a_status_and_is_not_touched_itself(kube: Kube, ns: str, demo: Object) -> None:
    now = kube.get(RESOURCE.kind, ns, "demo")
    assert now is not None
    assert now["spec"] == demo["spec"]
    meta = now["metadata"]
    assert meta["generation"] == 1
    assert not {"finalizers", "annotations", "labels"} & meta.keys()
    (manager,) = [each for each in meta["managedFields"] if each["manager"] == "kvloop-operator-status"]
    assert (manager["operation"], manager["subresource"]) == ("Apply", "status")
    assert manager["fieldsV1"].keys() == {"f:status"}

    children = owned(kube, ns, now)
    assert {kind for kind, _ in children} == set(CHILD_KINDS)
    for child in children.values():
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["controller"]) == (RESOURCE.kind, "demo", True)
        assert "finalizers" not in child["metadata"]
    # The controllers make the pods, and the scheduler says why they do not run.
    wait_for_reason(kube, ns, "demo", "Unschedulable")
    assert now["status"]["observedGeneration"] == 1


EDITS: dict[tuple[str, str], dict[str, Any]] = {
    ("Service", "demo-router"): {"spec": {"selector": {names.LABEL_ROLE: "decode"}}},
    ("Service", "demo-prefill"): {"spec": {"ports": [{"name": "http", "port": 9999, "targetPort": "http"}]}},
    ("Service", "demo-decode"): {"metadata": {"labels": {names.LABEL_MANAGED_BY: None}}},
    ("ConfigMap", "demo-router"): {"data": {names.ROUTER_CONFIG_KEY: "nonsense"}},
    ("ServiceAccount", "models"): {"automountServiceAccountToken": True},
    ("Role", "demo-router"): {"rules": []},
    ("RoleBinding", "demo-router"): {"subjects": []},
    ("NetworkPolicy", "demo-prefill"): {"spec": {"ingress": [{}]}},
    ("PodDisruptionBudget", "demo-decode"): {"spec": {"maxUnavailable": "100%"}},
    ("Deployment", "demo-router"): {"spec": {"replicas": 3, "template": {"spec": {"serviceAccountName": "default"}}}},
    ("StatefulSet", "demo-prefill"): {"spec": {"replicas": 4}},
    ("StatefulSet", "demo-decode"): {
        "metadata": {"labels": {names.LABEL_ROLE: None}},
        "spec": {"template": {"spec": {"terminationGracePeriodSeconds": 20}}},
    },
    ("NetworkPolicy", "demo-router"): {"metadata": {"ownerReferences": None}},
    ("Secret", "demo-router"): {"data": {names.DIGEST_KEY_KEY: None}},
}


def test_children_edited_by_hand_are_repaired(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog, demo: Object
) -> None:
    before = snapshot(kube, ns, "demo")["children"]
    for (kind, name), patch in EDITS.items():
        kube.patch(kind, ns, name, patch)
    settle(operator, audit, ns)
    assert snapshot(kube, ns, "demo")["children"] == before


def test_what_others_add_to_children_stays(
    kube: Kube, ns: str, namespace_cp: Kubectl, operator: OperatorProcess, audit: AuditLog, demo: Object
) -> None:
    added = {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}}}
    for (kind, name), child in owned(kube, ns, demo).items():
        if child["kind"] != "Secret":
            kube.patch(kind, ns, name, added)
    since = audit.from_now()
    namespace_cp("rollout", "restart", "deployment/demo-router")
    operator.wait_for_resyncs(3)
    # The status tells of the router's new pod.
    assert {event.resource for event in writes(since, ns)} <= {RESOURCE.plural, "events"}
    for child in owned(kube, ns, demo).values():
        assert child["kind"] == "Secret" or child["metadata"]["labels"]["team"] == "a"
    template = kube.get("Deployment", ns, "demo-router")["spec"]["template"]  # type: ignore[index]
    assert "kubectl.kubernetes.io/restartedAt" in template["metadata"]["annotations"]


def test_children_that_were_deleted_are_made_anew(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog, demo: Object
) -> None:
    before, first = snapshot(kube, ns, "demo"), owned(kube, ns, demo)
    for kind, name in first:
        kube.delete(kind, ns, name)
    wait_until(lambda: owned(kube, ns, demo).keys() == first.keys(), what="every child")
    settle(operator, audit, ns)
    assert snapshot(kube, ns, "demo") == before
    second = owned(kube, ns, demo)
    assert not {child["metadata"]["uid"] for child in second.values()} & {
        child["metadata"]["uid"] for child in first.values()
    }


def test_what_is_not_wanted_any_more_is_removed_and_comes_back_when_it_is(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog, demo: Object
) -> None:
    before = snapshot(kube, ns, "demo")["children"]
    off = {"network": {"policy": {"enabled": False}}, "serviceAccount": {"create": False}}
    kube.patch(RESOURCE.kind, ns, "demo", {"spec": off})
    settle(operator, audit, ns)
    gone = before.keys() - snapshot(kube, ns, "demo")["children"].keys()
    policies = {f"NetworkPolicy demo-{role}" for role in ("prefill", "decode", "router")}
    # The engines' account is named still, now as one that somebody else looks after.
    assert gone == policies
    on = {"network": {"policy": {"enabled": True}}, "serviceAccount": {"create": True}}
    kube.patch(RESOURCE.kind, ns, "demo", {"spec": on})
    settle(operator, audit, ns)
    assert snapshot(kube, ns, "demo")["children"] == before


def test_an_engine_lost_in_mid_rollout_comes_back_with_the_account_that_its_template_names(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog
) -> None:
    unseen = {f"{part}__podTemplate": {"spec": {"schedulerName": "nobody"}} for part in ("prefill", "decode")}
    account = {"serviceAccount__create": True, "serviceAccount__name": "models"}
    kube.create(document(**unseen, **account, decode__replicas=2), ns)
    wait_until_ready(kube, ns, prefill=1, decode=2)
    former = {pod["metadata"]["uid"] for pod in engines(kube, ns)}
    kube.patch(RESOURCE.kind, ns, "demo", {"spec": {"serviceAccount": {"create": False, "name": None}}})

    def left() -> list[Object]:
        return [pod for pod in engines(kube, ns) if pod["metadata"]["uid"] in former]

    # New engines do not get ready, so that the rollout stands still with former ones in place.
    wait_until(lambda: len(left()) < len(former), what="the first of the new engines")
    settle(operator, audit, ns)
    lost = left()[0]["metadata"]
    kube.delete("Pod", ns, lost["name"])

    def is_back() -> bool:
        pod = kube.get("Pod", ns, lost["name"])
        return pod is not None and pod["metadata"]["uid"] != lost["uid"]

    wait_until(is_back, what="the lost engine anew")

    def replaced() -> bool:
        make_ready(kube, ns)
        return not left()

    wait_until(replaced, what="new engines")
    wait_until_ready(kube, ns, prefill=1, decode=2)
    wait_until(lambda: kube.get("ServiceAccount", ns, "models") is None, what="no account")


def test_of_a_deleted_resource_nothing_is_left(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog, demo: Object
) -> None:
    since = audit.from_now()
    kube.delete(RESOURCE.kind, ns, "demo")
    wait_until_nothing_is_left(kube, ns)
    operator.wait_for_resyncs(2)
    assert writes(since, ns) == []


def test_a_resource_made_anew_under_the_same_name_gets_children_of_its_own(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog, demo: Object
) -> None:
    first = owned(kube, ns, demo)
    kube.delete(RESOURCE.kind, ns, "demo")
    again = kube.create(document(serviceAccount__create=True, serviceAccount__name="models"), ns)
    wait_until(lambda: owned(kube, ns, again).keys() == first.keys(), what="children of the new resource")
    settle(operator, audit, ns)
    assert owned(kube, ns, again).keys() == first.keys()
    assert owned(kube, ns, demo) == {}


def test_a_name_that_somebody_else_has_is_left_alone_and_named(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog
) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "demo-router", "labels": FOREIGN},
        "data": {"a": "b"},
    }
    kube.create(theirs, ns)
    kube.create(document(), ns)
    resource = wait_for_reason(kube, ns, "demo", "NameTaken", condition="Stalled")
    (stalled,) = [each for each in resource["status"]["conditions"] if each["type"] == "Stalled"]
    assert "ConfigMap demo-router" in stalled["message"]
    found = kube.get("ConfigMap", ns, "demo-router")
    assert found is not None
    assert found["data"] == {"a": "b"}
    settle(operator, audit, ns)
    kube.delete("ConfigMap", ns, "demo-router")
    wait_for_reason(kube, ns, "demo", "Unschedulable")


def test_paused_nothing_is_written_but_the_status(
    kube: Kube, ns: str, operator: OperatorProcess, audit: AuditLog, demo: Object
) -> None:
    kube.patch(RESOURCE.kind, ns, "demo", {"spec": {"paused": True}})
    wait_until(lambda: "Paused" in _conditions(kube, ns), what="a condition that says so")
    settle(operator, audit, ns)
    since = audit.from_now()
    kube.patch("PodDisruptionBudget", ns, "demo-decode", {"spec": {"maxUnavailable": "100%"}})
    kube.patch(RESOURCE.kind, ns, "demo", {"spec": {"network": {"policy": {"enabled": False}}}})
    operator.wait_for_resyncs(3)
    assert {event.resource for event in writes(since, ns)} <= {RESOURCE.plural, "events"}
    assert len(kube.list("NetworkPolicy", ns)) == 3
    kube.patch(RESOURCE.kind, ns, "demo", {"spec": {"paused": False}})
    wait_until(lambda: not kube.list("NetworkPolicy", ns), what="the policies gone")
    settle(operator, audit, ns)
    budget = kube.get("PodDisruptionBudget", ns, "demo-decode")
    assert budget is not None
    assert budget["spec"]["maxUnavailable"] == 1
    assert "Paused" not in _conditions(kube, ns)


@pytest.mark.parametrize("file", sorted((RESOURCES / "stalled").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_resource_that_would_not_serve_is_stalled_and_gets_nothing(
    kube: Kube, ns: str, operator: OperatorProcess, file: Any
) -> None:
    expected = file.read_text().splitlines()[0].removeprefix("# field: ")
    made = kube.create(read(file), ns)
    name = made["metadata"]["name"]
    resource = wait_for_reason(kube, ns, name, "InvalidSpec")
    conditions = {each["type"]: each for each in resource["status"]["conditions"]}
    assert conditions["Ready"]["status"] == "False"
    assert conditions["Stalled"]["status"] == "True"
    assert expected in conditions["Stalled"]["message"]
    assert owned(kube, ns, made) == {}


def test_kubectl_describe_shows_what_happened(namespace_cp: Kubectl, kube: Kube, ns: str, demo: Object) -> None:
    wait_for_reason(kube, ns, "demo", "Unschedulable")
    described = namespace_cp("describe", "dinf", "demo")
    events = described[described.index("Events:") :]
    assert "Unschedulable" in events
    assert "kvloop-operator" in events
    (row,) = namespace_cp("get", "dinf", "--no-headers").splitlines()
    assert row.split()[:6] == ["demo", "Qwen/Qwen3-32B", "0/1", "0/1", "Unknown", "Unschedulable"]


def _conditions(kube: Kube, ns: str) -> dict[str, Object]:
    resource = kube.get(RESOURCE.kind, ns, "demo")
    assert resource is not None
    return {each["type"]: each for each in resource["status"]["conditions"]}
