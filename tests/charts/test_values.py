"""Values: what the schema admits, what it refuses, and what holds for everything that it admits."""

from __future__ import annotations

import json
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from kvloop_operator.facts import OperatorSettings
from tests.charts.helm import CHART, CRDS_CHART, Helm, Values, find, read_values
from tests.charts.pod_security import offences
from tests.charts.test_render import CASES
from tests.cluster.errors import CommandFailedError
from tests.cluster.paths import REPOSITORY

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_CLUSTER_KINDS: Final = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}


def read_schema(chart: Path) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    return schema


def paths(values: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all maps in a document."""
    if not isinstance(values, dict):
        return []
    return [before, *(path for key, value in values.items() for path in paths(value, (*before, key)))]


_FREE: Final = (
    "Labels",
    "Annotations",
    "labels",
    "annotations",
    "odeSelector",
    "affinity",
    "ecurityContext",
    "requests",
)
_CLOSED: Final = [
    path
    for path in paths(read_values(CHART))
    if not any(step.endswith(_FREE) or step in ("limits", "seccompProfile") for step in path)
]


@pytest.mark.parametrize("path", _CLOSED, ids=".".join)
def test_a_misspelt_value_is_refused_by_name(helm: Helm, path: tuple[str, ...]) -> None:
    values: Any = "anything"
    for step in reversed((*path, "misspelt")):
        values = {step: values}
    with pytest.raises(CommandFailedError, match="'misspelt' not allowed") as refused:
        helm.render(CHART, values=values)
    assert f"at '{''.join(f'/{step}' for step in path)}'" in str(refused.value)


def test_the_paths_that_are_closed_are_nearly_all() -> None:
    assert {(), ("image",), ("router", "image"), ("crds",), ("rbac",), ("metrics", "podMonitor")} <= set(_CLOSED)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"watchNamespaces": "team-a"}, "/watchNamespaces"),
        ({"watchNamespaces": ["Team"]}, "/watchNamespaces/0"),
        ({"operator": {"workers": "8"}}, "/operator/workers"),
        ({"operator": {"workers": 0}}, "/operator/workers"),
        ({"operator": {"logLevel": "loud"}}, "/operator/logLevel"),
        ({"image": {"digest": "sha256:short"}}, "/image/digest"),
        ({"image": {"repository": "kvloop/operator:v1"}}, "/image/repository"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"imagePullSecrets": ["registry"]}, "/imagePullSecrets/0"),
        ({"crds": {"keep": "yes"}}, "/crds/keep"),
        ({"commonLabels": {"team": 1}}, "/commonLabels/team"),
        ({"commonLabels": {"team": "two words"}}, "/commonLabels/team"),
        ({"extraEnv": [{"value": "x"}]}, "/extraEnv/0"),
        ({"metrics": {"podMonitor": {"interval": "30"}}}, "/metrics/podMonitor/interval"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_value_of_the_wrong_kind_is_refused_where_it_is(helm: Helm, values: Values, field: str) -> None:
    with pytest.raises(CommandFailedError, match=f"at '{field}'"):
        helm.render(CHART, values=values)


@pytest.mark.parametrize("chart", [CHART, CRDS_CHART], ids=lambda chart: chart.name)
def test_every_value_has_a_default_and_every_default_is_in_the_schema(chart: Path) -> None:
    # Given by charts that depend on this one; no value of this chart.
    outside = {"enabled", "global"}
    schema = read_schema(chart)
    assert schema["properties"].keys() - outside == read_values(chart).keys()


def test_the_chart_can_be_a_part_of_another(helm: Helm) -> None:
    assert helm.render(CHART, values={"enabled": True, "global": {"anything": 1}}) == helm.render(CHART)


@pytest.mark.parametrize("chart", [CHART, CRDS_CHART], ids=lambda chart: chart.name)
def test_versions_are_those_of_the_package(chart: Path) -> None:
    about = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    version = metadata.version("kvloop")
    assert (about["version"], about["appVersion"]) == (version, version)


def test_the_default_router_image_is_the_operators_own_default(helm: Helm) -> None:
    (operator,) = find(helm.render(CHART), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert f"--router-image={OperatorSettings().router_image}" in operator["args"]


def test_what_the_chart_says_of_kubernetes_includes_the_version_that_the_tests_run_on(helm: Helm) -> None:
    helm.render(CHART, "--kube-version=1.30.0")
    with pytest.raises(CommandFailedError, match="incompatible"):
        helm.render(CHART, "--kube-version=1.29.9")


_labels = st.dictionaries(
    st.sampled_from(["team", "app.kubernetes.io/part-of", "app.kubernetes.io/name", "example.org/x", "helm.sh/chart"]),
    st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,20}[A-Za-z0-9])?", fullmatch=True),
    max_size=3,
)
_text = st.text(alphabet=st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
_names = st.one_of(
    # What YAML would take for something else than text.
    st.sampled_from(["n", "on", "null", "true", "1", "1e3"]),
    st.from_regex(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", fullmatch=True),
)
_image = st.fixed_dictionaries(
    {},
    optional={
        "registry": st.sampled_from(["", "registry.example.org", "localhost:5000/x"]),
        "tag": st.sampled_from(["", "v1", "1.2.3_a"]),
        "digest": st.sampled_from(["", "sha256:" + "a" * 64]),
    },
)
_values = st.fixed_dictionaries(
    {"crds": st.fixed_dictionaries({"enabled": st.booleans(), "keep": st.booleans()})},
    optional={
        "nameOverride": st.one_of(st.just(""), _names),
        "fullnameOverride": st.one_of(st.just(""), _names),
        "commonLabels": _labels,
        "commonAnnotations": st.dictionaries(_names, _text, max_size=2),
        "podLabels": _labels,
        "podAnnotations": st.dictionaries(_names, _text, max_size=2),
        "image": _image,
        "router": st.fixed_dictionaries({"image": _image}),
        "watchNamespaces": st.lists(_names, unique=True, max_size=3),
        "rbac": st.fixed_dictionaries({}, optional={"create": st.booleans(), "aggregate": st.booleans()}),
        "serviceAccount": st.one_of(
            st.fixed_dictionaries({"create": st.just(True)}, optional={"name": _names}),
            st.fixed_dictionaries({"create": st.just(False), "name": _names}),
        ),
        "extraArgs": st.lists(_text, max_size=2),
        "metrics": st.fixed_dictionaries(
            {
                "service": st.just({"enabled": True}),
                "serviceMonitor": st.fixed_dictionaries({"enabled": st.booleans(), "labels": _labels}),
                "podMonitor": st.fixed_dictionaries({"enabled": st.booleans(), "labels": _labels}),
            }
        ),
        "networkPolicy": st.fixed_dictionaries({"enabled": st.booleans()}),
    },
)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    # Each example starts a process, so that a failing one is shown as it was drawn.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(values=_values, release=_names)
def test_whatever_the_values_a_release_is_sound(helm: Helm, values: dict[str, Any], release: str) -> None:
    rendered = helm.render(CHART, values=values, release=release[:53].rstrip("-"))

    keys = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in rendered]
    assert len(set(keys)) == len(keys)
    for kind, namespace, name in keys:
        assert (namespace is None) == (kind in _CLUSTER_KINDS)
        assert len(name) <= 63
        assert kind == "CustomResourceDefinition" or _NAME.fullmatch(name)
    for each in rendered:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "kvloop-operator"
        assert values.get("commonLabels", {}).keys() <= labels.keys()
        assert all(len(value) <= 63 for value in labels.values())
        assert values.get("commonAnnotations", {}).items() <= each["metadata"].get("annotations", {}).items()

    assert ("CustomResourceDefinition" in {kind for kind, _, _ in keys}) == values["crds"]["enabled"]
    spec = find(rendered, "Deployment")["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert offences(spec["template"]["spec"]) == []
    (operator,) = spec["template"]["spec"]["containers"]
    extra = values.get("extraArgs", [])
    assert operator["args"][len(operator["args"]) - len(extra) :] == extra
    for binding in (each for each in rendered if each["kind"] in ("RoleBinding", "ClusterRoleBinding")):
        assert binding["subjects"][0]["name"] == spec["template"]["spec"]["serviceAccountName"]
        role = (binding["roleRef"]["kind"], binding["metadata"].get("namespace"), binding["roleRef"]["name"])
        assert role in keys


def test_every_value_of_the_chart_is_in_a_golden_release() -> None:
    """A value that no golden release sets could be lost from the templates unseen."""
    unset = {"fullnameOverride", "rbac", "terminationGracePeriodSeconds", "podSecurityContext", "securityContext"}
    # Long, and compared with its files by test_monitoring.py.
    unset.add("monitoring")
    used = {key for values in CASES.values() for key in values}
    assert used | unset == set(read_values(CHART))


def test_no_chart_is_left_out_here() -> None:
    assert {CHART, CRDS_CHART} == {path for path in (REPOSITORY / "charts").iterdir() if path.is_dir()}
