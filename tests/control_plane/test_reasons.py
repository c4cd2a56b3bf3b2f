"""Why a resource does not serve, on a real control plane: reasons that come about without a running pod.

Everything is applied at once, and each test waits for what is said of its own resource.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.cluster.kinds import RESOURCE
from kvloop_operator.facts import ENGINE_TEMPLATE_VERSIONS
from kvloop_operator.status import ConditionType, Reason
from tests.charts.helm import CHART, Helm
from tests.cluster.audit import AuditEvent, AuditLog
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.waiting import wait_until
from tests.control_plane.conftest import StartOperator
from tests.control_plane.newer_operator import NEWER
from tests.control_plane.ready import pod_called, runs, says_of
from tests.control_plane.settled import settle
from tests.harness.kube import Kube, Object
from tests.harness.operator_process import USER, OperatorProcess
from tests.harness.policies import refused
from tests.harness.told import Told
from tests.unit.operator.documents import document

pytestmark = pytest.mark.timeout(1200)

UNSCHEDULABLE_SECONDS: Final = 20
HELD: Final = "example.com/held"

# Nobody schedules these pods: the tests themselves say what becomes of them.
_UNSEEN: Final = {"spec": {"schedulerName": "nobody"}}
_RESTRICTED: Final = {"pod-security.kubernetes.io/enforce": "restricted"}


def resource(name: str, **changes: Any) -> Object:
    """A resource whose pods nobody schedules."""
    unseen = {f"{part}__podTemplate": _UNSEEN for part in ("prefill", "decode", "router")}
    return {**document(**{**unseen, **changes}), "metadata": {"name": name}}


def placed(name: str, **changes: Any) -> Object:
    """A resource whose pods the scheduler sees."""
    return {**document(**changes), "metadata": {"name": name}}


@pytest.fixture(scope="module")
def place(control_plane: Cluster, kvloop_crd: None) -> Iterator[Kubectl]:
    """Where everything is let in but for Services of one resource, and pods that failed stay to be looked at."""
    message, allowed = "no such Service is wanted here", "!object.metadata.name.startsWith('denied-')"
    whole = "!has(oldObject.status.phase) || oldObject.status.phase != 'Failed'"
    with (
        control_plane.namespace() as kubectl,
        refused(kubectl, "CREATE", "services", unless=allowed, message=message),
        refused(kubectl, "DELETE", "pods", unless=whole, message="failed pods are kept"),
    ):
        yield kubectl


@pytest.fixture(scope="module")
def restricted(control_plane: Cluster, kvloop_crd: None) -> Iterator[Kubectl]:
    """Where only restricted pods are let in."""
    with control_plane.namespace(labels=_RESTRICTED) as kubectl:
        yield kubectl


@pytest.fixture(scope="module")
def full(control_plane: Cluster, kvloop_crd: None) -> Iterator[Kubectl]:
    """Where the quota leaves nothing for a StatefulSet."""
    with control_plane.namespace() as kubectl:
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "nothing-left"}}
        kubectl.apply({**quota, "spec": {"hard": {"count/statefulsets.apps": "0"}}})
        wait_until(lambda: "hard" in kubectl.get("quota", "nothing-left").get("status", {}), what="the quota in force")
        yield kubectl


@pytest.fixture(scope="module")
def operator(
    operator_account: Path,
    place: Kubectl,
    restricted: Kubectl,
    full: Kubectl,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OperatorProcess]:
    """One for all three, that takes a pod without a node for lost after seconds."""
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    flags = [f"--namespace={each.namespace}" for each in (place, restricted, full)]
    flags += ["--resync-seconds=0.5", f"--unschedulable-seconds={UNSCHEDULABLE_SECONDS}"]
    with OperatorProcess(operator_account, log=log, flags=flags) as operator:
        operator.wait_until_ready()
        yield operator
        print(operator.log_tail())


@pytest.fixture(scope="module")
def watching(place: Kubectl, restricted: Kubectl, full: Kubectl) -> Iterator[tuple[Told, ...]]:
    """All that is said in the three namespaces."""
    with ExitStack() as stack:
        yield tuple([stack.enter_context(Told(each)) for each in (place, restricted, full)])


@pytest.fixture(scope="module")
def applied(
    kube: Kube,
    place: Kubectl,
    restricted: Kubectl,
    full: Kubectl,
    operator: OperatorProcess,
    watching: tuple[Told, ...],
) -> tuple[Told, ...]:
    """All resources, and what is done to them at the beginning."""
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "taken-router"}, "data": {"a": "b"}}
    place.apply(
        config_map,
        resource("stuck"),
        placed("unplaced"),
        resource("invalid", engine__image="my-registry/vllm-efa:v0.20.0"),
        resource("taken"),
        resource("denied"),
        resource("paused", paused=True),
        resource("suspended", suspend=True),
        resource("starting"),
        resource("evicted"),
        resource("late"),
        resource("shrinking", decode__replicas=2),
    )
    overlay = {"spec": {**_UNSEEN["spec"], "hostNetwork": True}}
    restricted.apply(resource("unlike", security__profile="privileged", router__podTemplate=overlay))
    full.apply(resource("too-many"))
    assert place.namespace is not None
    pod_called(kube, place.namespace, "stuck-decode-0")
    kube.patch("Pod", place.namespace, "stuck-decode-0", {"metadata": {"finalizers": [HELD]}})
    kube.delete("Pod", place.namespace, "stuck-decode-0")
    return watching


@pytest.fixture
def told(applied: tuple[Told, ...]) -> Told:
    """What is said where everything is let in."""
    return applied[0]


@pytest.fixture(autouse=True)
def as_declared(request: pytest.FixtureRequest, watching: tuple[Told, ...]) -> Iterator[None]:
    """A test brings about the reasons that it declares, and no other is asked for."""
    failures = request.session.testsfailed
    for each in watching:
        each.shown.clear()
    yield
    if request.session.testsfailed == failures:
        declared = request.node.get_closest_marker("produces")
        shown = set().union(*(each.shown for each in watching))
        assert shown == set(declared.args if declared is not None else ())


@pytest.mark.produces(Reason.UNSCHEDULABLE)
def test_no_node_has_what_a_pod_asks_for(told: Told) -> None:
    unplaced = told.of("unplaced")
    words = "finds no node: no nodes available", "add nodes that have what it asks for"
    unplaced.has_said(ConditionType.RECONCILING, "True", Reason.UNSCHEDULABLE, "unplaced-", *words)
    unplaced.is_stalled_by(Reason.UNSCHEDULABLE, "unplaced-", *words)
    unplaced.says(ConditionType.DECODE_READY, "False", Reason.UNSCHEDULABLE, "0 of 1 decode", "-decode-0", *words)
    unplaced.says(ConditionType.ROUTER_READY, "False", Reason.UNSCHEDULABLE, "0 of 1 routers", "-router-", *words)


@pytest.mark.produces(Reason.INVALID_SPEC)
def test_a_spec_that_would_not_serve(told: Told) -> None:
    invalid = told.of("invalid")
    words = "spec.engine.image", "v0.20.0", "another request's text", "use an image with vLLM"
    invalid.is_stalled_by(Reason.INVALID_SPEC, *words)
    invalid.says(ConditionType.PREFILL_READY, "False", Reason.INVALID_SPEC, "none are made")


@pytest.mark.produces(Reason.NAME_TAKEN)
def test_somebody_else_has_the_name_of_a_child(told: Told) -> None:
    told.of("taken").is_stalled_by(Reason.NAME_TAKEN, "ConfigMap taken-router", "delete or rename it")


@pytest.mark.produces(Reason.APPLY_FAILED)
def test_a_policy_does_not_let_a_child_in(told: Told) -> None:
    told.of("denied").is_stalled_by(
        Reason.APPLY_FAILED, "Service denied-router", "no such Service is wanted here", "change"
    )


@pytest.mark.produces(Reason.APPLY_FAILED)
def test_a_quota_does_not_let_a_child_in(applied: tuple[Told, ...]) -> None:
    too_many = applied[2].of("too-many")
    too_many.is_stalled_by(
        Reason.APPLY_FAILED, "StatefulSet too-many-prefill", "exceeded quota: nothing-left", "change"
    )


@pytest.mark.produces(Reason.FORBIDDEN)
def test_the_operator_lacks_a_right(
    control_plane: Cluster, namespace_cp: Kubectl, ns: str, start_operator: StartOperator, alone: Told, tmp_path: Path
) -> None:
    kubeconfig = _without_a_right(control_plane, namespace_cp, Helm(tmp_path / "helm"), "patch", "deployments")
    start_operator(f"--namespace={ns}", "--resync-seconds=0.5", kubeconfig=kubeconfig)
    namespace_cp.apply(resource("demo"))
    alone.of("demo").is_stalled_by(
        Reason.FORBIDDEN, "Deployment demo-router", 'cannot patch resource "deployments"', "roles"
    )


@pytest.mark.produces(Reason.PODS_REFUSED)
def test_the_level_of_the_namespace_does_not_let_pods_in(applied: tuple[Told, ...]) -> None:
    unlike = applied[1].of("unlike")
    remedy = "let the namespace's pod-security level admit the pod"
    words = "pods of unlike-prefill are refused", 'violates PodSecurity "restricted:latest": privileged', remedy
    unlike.is_stalled_by(Reason.PODS_REFUSED, *words)
    unlike.says(ConditionType.DECODE_READY, "False", Reason.PODS_REFUSED, "0 of 1 decode engines", "privileged")
    unlike.says(ConditionType.ROUTER_READY, "False", Reason.PODS_REFUSED, "hostNetwork=true", remedy)


@pytest.mark.produces(Reason.PAUSED)
def test_nothing_is_done_while_it_is_paused(told: Told) -> None:
    paused = told.of("paused")
    paused.says(ConditionType.READY, "Unknown", Reason.PAUSED, "spec.paused is true", "set it to false")
    paused.says(ConditionType.PAUSED, "True", Reason.PAUSED, "spec.paused is true")


@pytest.mark.produces(Reason.STARTING, Reason.SUSPENDED)
def test_nothing_is_to_serve(told: Told, kube: Kube, place: Kubectl) -> None:
    suspended = told.of("suspended")
    suspended.waits_for(Reason.STARTING, "suspended-router-")
    assert place.namespace is not None
    (router,) = kube.list("Pod", place.namespace, selector=f"{names.LABEL_DEPLOYMENT}=suspended")
    runs(kube, router, names.ROUTER_CONTAINER, ready=True)
    suspended.says(ConditionType.READY, "True", Reason.SUSPENDED, "spec.suspend is true", "503")
    suspended.says(ConditionType.PREFILL_READY, "True", Reason.SUSPENDED, "no prefill engines are wanted")
    suspended.says(ConditionType.KV_TRANSFER_VERIFIED, "Unknown", Reason.SUSPENDED, "no pair of engines is wanted")


@pytest.mark.produces(Reason.STARTING)
def test_pods_are_on_their_way(told: Told) -> None:
    starting = told.of("starting")
    starting.waits_for(Reason.STARTING, "waits for a scheduler")
    starting.says(ConditionType.DECODE_READY, "False", Reason.STARTING, "starting-decode-0 waits")
    starting.says(ConditionType.ROUTER_READY, "False", Reason.STARTING, "starting-router-")


@pytest.mark.produces(Reason.START_TIMED_OUT)
def test_an_engine_runs_and_is_not_ready_for_longer_than_it_may(told: Told, kube: Kube, place: Kubectl) -> None:
    late = told.of("late")
    assert place.namespace is not None
    for role in Role:
        pod = pod_called(kube, place.namespace, f"late-{role.value}-0")
        runs(kube, pod, names.ENGINE_CONTAINER, ready=False, since=timedelta(hours=2))
    late.is_stalled_by(Reason.START_TIMED_OUT, "late-prefill-0", "engine.startupTimeoutSeconds")


@pytest.mark.produces(Reason.POD_FAILED)
def test_a_pod_was_evicted(told: Told, kube: Kube, place: Kubectl) -> None:
    evicted = told.of("evicted")
    assert place.namespace is not None
    pod = pod_called(kube, place.namespace, "evicted-prefill-0")
    # As a kubelet says it of a model that is larger than its cache may be.
    message = 'Usage of EmptyDir volume "kvloop-cache" exceeds the limit "1Mi". '
    says_of(kube, pod, {"phase": "Failed", "reason": "Evicted", "message": message})
    words = "evicted-prefill-0 has failed: Evicted", 'EmptyDir volume "kvloop-cache" exceeds the limit "1Mi"'
    evicted.waits_for(Reason.POD_FAILED, *words, "made anew")
    evicted.says(ConditionType.PREFILL_READY, "False", Reason.POD_FAILED, "0 of 1 prefill engines", *words)


@pytest.mark.produces(Reason.DRAINING, Reason.SCALING_DOWN)
def test_fewer_engines_are_wanted_than_there_are(told: Told, kube: Kube, place: Kubectl) -> None:
    shrinking = told.of("shrinking")
    assert place.namespace is not None
    kube.patch(RESOURCE.kind, place.namespace, "shrinking", {"spec": {"suspend": True}})
    words = "waiting for shrinking-", "as fewer are wanted"
    shrinking.has_said(ConditionType.RECONCILING, "True", Reason.DRAINING, *words)
    shrinking.has_said(ConditionType.DECODE_READY, "True", Reason.SCALING_DOWN, "some are still there")
    wait_until(lambda: shrinking.now["status"]["decode"]["replicas"] == 0, what="no engines")


@pytest.mark.produces(Reason.UP_TO_DATE, Reason.NEW_ENGINE_TEMPLATE)
def test_a_newer_operator_has_another_engine_template(
    operator_account: Path, kube: Kube, namespace_cp: Kubectl, ns: str, alone: Told, audit: AuditLog, tmp_path: Path
) -> None:
    demo, flags = alone.of("demo"), [f"--namespace={ns}", "--resync-seconds=0.5"]
    namespace_cp.apply(resource("demo"))
    with OperatorProcess(operator_account, log=tmp_path / "old.log", flags=flags) as old:
        old.wait_until_ready()
        demo.says(ConditionType.UPDATE_AVAILABLE, "False", Reason.UP_TO_DATE, "newest template")
        settle(old, audit, ns)
    (oldest,), engines = ENGINE_TEMPLATE_VERSIONS, _engines(kube, ns)
    newer = "tests.control_plane.newer_operator"
    with OperatorProcess(operator_account, log=tmp_path / "new.log", flags=flags, module=newer) as new:
        new.wait_until_ready()
        words = f"set rollout.engineTemplateVersion to {NEWER}", "engines are restarted"
        demo.says(ConditionType.UPDATE_AVAILABLE, "True", Reason.NEW_ENGINE_TEMPLATE, *words)
        settle(new, audit, ns)
        assert demo.now["status"]["engineTemplate"] == {"current": oldest, "offered": NEWER}
        assert _engines(kube, ns) == engines, "nothing is done before somebody asks for it"
        kube.patch(RESOURCE.kind, ns, "demo", {"spec": {"rollout": {"engineTemplateVersion": NEWER}}})
        demo.says(ConditionType.UPDATE_AVAILABLE, "False", Reason.UP_TO_DATE)
        assert demo.now["status"]["engineTemplate"] == {"current": NEWER, "offered": ""}


# Last, since they take longest to come about.
@pytest.mark.produces(Reason.STUCK_TERMINATING)
def test_a_pod_does_not_end(told: Told) -> None:
    told.of("stuck").is_stalled_by(Reason.STUCK_TERMINATING, "stuck-decode-0 does not end", HELD)


def test_at_rest_nothing_is_written(
    applied: tuple[Told, ...], place: Kubectl, operator: OperatorProcess, audit: AuditLog
) -> None:
    def written(since: AuditLog) -> list[AuditEvent]:
        # What the API server refuses is tried again.
        return since.events(lambda event: event.user == USER and event.mutates and event.code < 400)

    def quiet() -> bool:
        since = audit.from_now()
        operator.wait_for_resyncs(1)
        return written(since) == []

    wait_until(quiet, what="an operator that has nothing left to write")
    since = audit.from_now()
    operator.wait_for_resyncs(4)
    assert written(since) == []


def test_nothing_that_was_said_contradicts_itself(applied: tuple[Told, ...]) -> None:
    assert [each for told in applied for each in told.contradictions()] == []


@pytest.fixture
def alone(namespace_cp: Kubectl, watching: tuple[Told, ...]) -> Iterator[Told]:
    """What is said in a namespace of the test's own, where no operator runs yet."""
    with Told(namespace_cp) as told:
        yield told
        watching[0].shown |= told.shown
        assert told.contradictions() == []


def _without_a_right(cluster: Cluster, kubectl: Kubectl, helm: Helm, verb: str, resource: str) -> Path:
    """A kubeconfig of an account that may do all that the chart lets the operator do, but for one verb on one kind."""
    rendered = helm.render(CHART)
    (bound,) = [each["roleRef"]["name"] for each in rendered if each["kind"] == "ClusterRoleBinding"]
    (role,) = [each for each in rendered if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", bound)]
    rules = [
        {**rule, "resources": [each], "verbs": [one for one in rule["verbs"] if (one, each) != (verb, resource)]}
        for rule in role["rules"]
        for each in rule["resources"]
    ]
    access = {"apiVersion": role["apiVersion"], "metadata": {"name": f"no-{verb}-{kubectl.namespace}"}}
    subject = {"kind": "ServiceAccount", "name": "operator", "namespace": kubectl.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": access["metadata"]["name"]}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "operator"}},
        {**access, "kind": "ClusterRole", "rules": rules},
        {**access, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]},
    )
    assert kubectl.namespace is not None
    return cluster.service_account(kubectl.namespace, "operator")


def _engines(kube: Kube, namespace: str) -> dict[str, tuple[str, int]]:
    """Every pod and StatefulSet, and what would change if an engine were made anew."""
    return {
        f"{kind} {each['metadata']['name']}": (each["metadata"]["uid"], each["metadata"].get("generation", 0))
        for kind in ("Pod", "StatefulSet")
        for each in kube.list(kind, namespace, selector=names.LABEL_DEPLOYMENT)
    }
