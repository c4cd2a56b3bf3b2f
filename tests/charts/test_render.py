"""What the chart makes of its values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvloop_operator.settings import parse
from tests.charts.generated import assert_generated
from tests.charts.helm import CHART, CRD, CRDS_CHART, Helm, Manifest, Values, documents, find, kinds, read_values
from tests.charts.pod_security import offences
from tests.charts.rights import RIGHTS, rights
from tests.cluster.errors import CommandFailedError
from tests.cluster.paths import REPOSITORY

_GOLDEN: Final = Path(__file__).parent / "golden"
_FOR_KUBECTL: Final = REPOSITORY / "examples" / "kubectl" / "operator.yaml"
_DIGEST: Final = "sha256:" + "0123456789abcdef" * 4

CASES: Final[dict[str, Values]] = {
    "default": {},
    "watch-namespaces": {"watchNamespaces": ["team-a", "team-b"]},
    "everything": {
        "nameOverride": "inference",
        "commonLabels": {"team": "platform"},
        "commonAnnotations": {"example.org/owner": "platform"},
        "image": {"registry": "registry.example.org/ai", "digest": _DIGEST, "pullPolicy": "Always"},
        "router": {"image": {"registry": "registry.example.org/ai", "tag": "v9"}},
        "imagePullSecrets": [{"name": "registry"}],
        "crds": {"keep": False},
        "operator": {"resyncSeconds": 60, "workers": 2, "unschedulableSeconds": 1200, "logLevel": "debug"},
        "extraArgs": ["--host=0.0.0.0"],
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example.org:3128"}],
        "resources": {"requests": {"cpu": 1}},
        "serviceAccount": {"name": "inference", "annotations": {"example.org/role": "inference"}},
        "podLabels": {"tier": "control"},
        "podAnnotations": {"example.org/scrape": "true"},
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "livenessProbe": {"initialDelaySeconds": 5},
        "metrics": {
            "service": {"annotations": {"example.org/metrics": "yes"}},
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "podMonitor": {"enabled": True, "interval": "1m"},
        },
        "networkPolicy": {
            "enabled": True,
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
    },
}


def pod(manifests: list[Manifest]) -> dict[str, Any]:
    """The operator's pod."""
    spec: dict[str, Any] = find(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(manifests: list[Manifest]) -> dict[str, Any]:
    (only,) = pod(manifests)["containers"]
    assert isinstance(only, dict)
    return only


@pytest.mark.parametrize("chart", [CHART, CRDS_CHART], ids=lambda chart: chart.name)
def test_lint_has_nothing_to_say(helm: Helm, chart: Path) -> None:
    said = helm("lint", "--strict", chart)
    assert "WARNING" not in said
    assert "ERROR" not in said


def _without_crd(text: str) -> str:
    """A rendered release without the CRD, which is long and compared elsewhere."""
    parts = [part for part in text.split("---\n") if "kind: CustomResourceDefinition" not in part]
    return "---\n".join(parts)


@pytest.mark.parametrize("case", CASES)
def test_a_release_is_the_golden_one(helm: Helm, case: str) -> None:
    rendered = _without_crd(helm("template", "kvloop", CHART, values=CASES[case]))
    assert_generated(_GOLDEN / f"{case}.yaml", rendered)


def test_the_file_for_kubectl_is_the_chart_without_the_crd_and_a_namespace_for_it(helm: Helm) -> None:
    rendered = helm("template", "kvloop", CHART, values={"crds": {"enabled": False}})
    assert_generated(_FOR_KUBECTL, _KUBECTL_HEAD + rendered)
    assert find(documents(_KUBECTL_HEAD), "Namespace")["metadata"]["name"] == helm.namespace


_KUBECTL_HEAD = """\
# The operator for a cluster that is looked after with kubectl; `make generate` writes it from charts/kvloop. The CRD is
# in crds/. Put the addresses of your images for kvloop/operator and kvloop/router.
---
apiVersion: v1
kind: Namespace
metadata:
  name: kvloop-system
  labels:
    pod-security.kubernetes.io/enforce: restricted
"""


@pytest.mark.parametrize("chart", [CHART, CRDS_CHART], ids=lambda chart: chart.name)
def test_a_chart_carries_the_crd_as_the_repository_has_it(chart: Path) -> None:
    (carried,) = (chart / "files").iterdir()
    assert carried.name == CRD.name
    assert carried.read_bytes() == CRD.read_bytes(), "run `make generate`"


@pytest.mark.parametrize(
    ("chart", "values"),
    [(CHART, {"commonLabels": {"team": "a"}}), (CRDS_CHART, {"commonLabels": {"team": "a"}})],
    ids=["kvloop", "kvloop-crds"],
)
def test_the_crd_is_installed_whole_with_labels_and_kept_by_default(helm: Helm, chart: Path, values: Values) -> None:
    rendered = find(helm.render(chart, values=values), "CustomResourceDefinition")
    metadata = rendered["metadata"]
    assert metadata.pop("annotations") == {"helm.sh/resource-policy": "keep"}
    labels = metadata.pop("labels")
    assert labels["team"] == "a"
    assert labels["app.kubernetes.io/managed-by"] == "Helm"
    assert rendered == yaml.load(CRD.read_text(encoding="utf-8"), yaml.CSafeLoader)


def test_the_crd_goes_with_the_release_only_where_that_is_asked_for(helm: Helm) -> None:
    for chart, values in ((CHART, {"crds": {"keep": False}}), (CRDS_CHART, {"keep": False})):
        metadata = find(helm.render(chart, values=values), "CustomResourceDefinition")["metadata"]
        assert "annotations" not in metadata
    assert "CustomResourceDefinition" not in kinds(helm.render(CHART, values={"crds": {"enabled": False}}))


def test_the_operator_gets_what_it_needs_and_nothing_else(helm: Helm) -> None:
    wanted = {what: set(verbs) for what, verbs in RIGHTS.items()}
    everywhere = helm.render(CHART)
    assert rights(find(everywhere, "ClusterRole", "kvloop-operator")["rules"]) == wanted
    assert "Role" not in kinds(everywhere)

    listed = helm.render(CHART, values={"watchNamespaces": ["team-a", "team-b"]})
    roles = [each for each in listed if each["kind"] == "Role"]
    assert [role["metadata"]["namespace"] for role in roles] == ["team-a", "team-b"]
    assert all(rights(role["rules"]) == wanted for role in roles)
    assert "ClusterRoleBinding" not in kinds(listed)


def test_with_a_list_of_namespaces_nothing_of_the_cluster_as_a_whole_need_be_touched(helm: Helm) -> None:
    values = {"watchNamespaces": ["team-a"], "crds": {"enabled": False}, "rbac": {"aggregate": False}}
    rendered = helm.render(CHART, values=values)
    assert kinds(rendered) == ["Deployment", "Role", "RoleBinding", "Service", "ServiceAccount"]
    assert all(each["metadata"]["namespace"] in ("team-a", helm.namespace) for each in rendered)


@pytest.mark.parametrize("case", CASES)
def test_the_operator_understands_its_arguments(helm: Helm, case: str) -> None:
    arguments = container(helm.render(CHART, values=CASES[case]))["args"]
    settings = parse(arguments, {"POD_NAMESPACE": helm.namespace})
    values = read_values(CHART)["operator"] | CASES[case].get("operator", {})
    assert settings.namespaces == tuple(CASES[case].get("watchNamespaces", ()))
    assert (settings.probe_port, settings.metrics_port) == (8080, 9090)
    assert settings.resync_seconds == values["resyncSeconds"]
    assert settings.workers == values["workers"]
    assert settings.unschedulable_seconds == values["unschedulableSeconds"]
    assert settings.log_level == values["logLevel"]
    assert settings.operator_namespace == helm.namespace


def test_what_the_chart_binds_is_the_account_of_the_pod(helm: Helm) -> None:
    for values in ({}, {"serviceAccount": {"create": False, "name": "given"}}, {"watchNamespaces": ["team-a"]}):
        rendered = helm.render(CHART, values=values)
        account = {"kind": "ServiceAccount", "name": pod(rendered)["serviceAccountName"], "namespace": helm.namespace}
        bindings = [each for each in rendered if each["kind"] in ("ClusterRoleBinding", "RoleBinding")]
        assert [each["subjects"] for each in bindings] == [[account]]
        made = [each["metadata"]["name"] for each in rendered if each["kind"] == "ServiceAccount"]
        assert made == ([] if account["name"] == "given" else [account["name"]])


def test_the_operator_watches_what_the_values_say(helm: Helm) -> None:
    assert container(helm.render(CHART))["args"][0] == "--all-namespaces"
    listed = container(helm.render(CHART, values={"watchNamespaces": ["team-a", "team-b"]}))["args"]
    assert listed[:2] == ["--namespace=team-a", "--namespace=team-b"]
    assert "--all-namespaces" not in listed


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, "kvloop/operator:v0.1.0"),
        ({"tag": "v9"}, "kvloop/operator:v9"),
        ({"registry": "registry.example.org:5000/ai/"}, "registry.example.org:5000/ai/kvloop/operator:v0.1.0"),
        ({"repository": "localhost:5000/kvloop-operator", "tag": "v9"}, "localhost:5000/kvloop-operator:v9"),
        ({"digest": _DIGEST}, f"kvloop/operator@{_DIGEST}"),
        ({"tag": "v9", "digest": _DIGEST, "repository": "mine"}, f"mine@{_DIGEST}"),
    ],
)
def test_an_image_has_a_digest_or_a_tag(helm: Helm, image: Values, expected: str) -> None:
    values = {"image": image, "router": {"image": {"repository": "kvloop/operator", **image}}}
    operator = container(helm.render(CHART, values=values))
    assert operator["image"] == expected
    assert f"--router-image={expected}" in operator["args"]


@pytest.mark.parametrize("case", CASES)
def test_the_operator_runs_where_pods_are_restricted(helm: Helm, case: str) -> None:
    spec = pod(helm.render(CHART, values=CASES[case]))
    assert offences(spec) == []
    (operator,) = spec["containers"]
    assert operator["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "tmp", "mountPath": "/tmp"} in operator["volumeMounts"]


def test_the_check_of_pod_security_sees_what_it_is_for() -> None:
    bad = {
        "hostNetwork": True,
        "volumes": [{"name": "disk", "hostPath": {"path": "/"}}],
        "containers": [{"name": "it", "securityContext": {"runAsUser": 0, "privileged": True}}],
    }
    found = offences(bad)
    assert {"hostNetwork", "volume disk", "it: privileged", "it: runAsUser", "it: capabilities"} <= set(found)


def test_a_default_can_be_taken_back_by_null(helm: Helm) -> None:
    """Users of OpenShift do that, where each namespace has a range of users of its own."""
    users: dict[str, None] = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    context = pod(helm.render(CHART, values={"podSecurityContext": users}))["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_a_memory_limit_and_no_limit_of_the_processor(helm: Helm) -> None:
    resources = container(helm.render(CHART))["resources"]
    assert resources == {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}


def test_one_operator_at_a_time(helm: Helm) -> None:
    spec = find(helm.render(CHART), "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_people_may_do_with_resources_what_they_may_do_with_deployments(helm: Helm) -> None:
    rendered = helm.render(CHART)
    view, edit = (find(rendered, "ClusterRole", f"kvloop-{name}") for name in ("view", "edit"))
    aggregate = "rbac.authorization.k8s.io/aggregate-to-{}".format
    assert {key for key in view["metadata"]["labels"] if "aggregate" in key} == {aggregate("view")}
    assert {key for key in edit["metadata"]["labels"] if "aggregate" in key} == {aggregate("edit"), aggregate("admin")}
    assert {verb for verbs in rights(view["rules"]).values() for verb in verbs} == {"get", "list", "watch"}
    editable = rights(edit["rules"])
    assert editable.keys() == {("kvloop.io", "disaggregatedinferences"), ("kvloop.io", "disaggregatedinferences/scale")}


def test_metrics_are_scraped_by_service_or_by_pod(helm: Helm) -> None:
    monitored = helm.render(CHART, values={"metrics": {"serviceMonitor": {"enabled": True}}})
    service, monitor = find(monitored, "Service"), find(monitored, "ServiceMonitor")
    labels = service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]

    off = {"service": {"enabled": False}, "podMonitor": {"enabled": True}}
    by_pod = helm.render(CHART, values={"metrics": off})
    assert "Service" not in kinds(by_pod)
    port = find(by_pod, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"]
    assert port in [each["name"] for each in container(by_pod)["ports"]]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}}, "metrics.service.enabled"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
    ],
)
def test_values_that_contradict_one_another_are_refused_by_name(helm: Helm, values: Values, field: str) -> None:
    with pytest.raises(CommandFailedError, match=field):
        helm.render(CHART, values=values)


def test_notes_warn_of_what_uninstalling_deletes(helm: Helm) -> None:
    def notes(chart: Path, values: Values) -> str:
        return helm("install", "kvloop", chart, "--dry-run=client", values=values).split("NOTES:")[1]

    warning = "EVERY DisaggregatedInference"
    assert warning not in notes(CHART, {})
    assert warning in notes(CHART, {"crds": {"keep": False}})
    assert "kvloop-crds" in notes(CHART, {"crds": {"enabled": False}})
    assert "team-a, team-b" in notes(CHART, {"watchNamespaces": ["team-a", "team-b"]})
    assert warning not in notes(CRDS_CHART, {})
    assert warning in notes(CRDS_CHART, {"keep": False})


def test_the_charts_fit_into_the_secret_in_which_helm_keeps_a_release(helm: Helm, tmp_path: Path) -> None:
    """Helm stores the packed chart and the rendered manifest; a Secret holds 1 MiB."""
    helm("package", CHART, f"--destination={tmp_path}")
    (package,) = tmp_path.iterdir()
    rendered = helm("template", "kvloop", CHART)
    assert package.stat().st_size < 100 * 1024
    assert len(json.dumps(rendered)) < 512 * 1024
