"""The examples for Argo CD and Flux point at what is there, with values and resources that are valid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvloop.resources import load
from kvloop_operator.facts import OperatorSettings
from tests.charts.helm import CHART, CRDS_CHART, Helm, Manifest, documents, find, kinds
from tests.cluster import parts
from tests.cluster.build import location
from tests.cluster.paths import REPOSITORY

# Also for kubectl, which comes with it.
pytestmark = pytest.mark.usefixtures("helm")

_GITOPS: Final = REPOSITORY / "examples" / "gitops"
_APPLICATIONS: Final = documents((_GITOPS / "argocd" / "applications.yaml").read_text(encoding="utf-8"))
_FLUX: Final = documents((_GITOPS / "flux" / "kvloop.yaml").read_text(encoding="utf-8"))
_RELEASES: Final = documents((_GITOPS / "flux" / "operator" / "releases.yaml").read_text(encoding="utf-8"))
_MODELS: Final = _GITOPS / "models"
_CRD_KEPT: Final = {"helm.sh/resource-policy": "keep"}


def _name(manifest: Manifest) -> str:
    name: str = manifest["metadata"]["name"]
    return name


def _folder(path: str) -> Path:
    """What a path in the repository names, which has to be there."""
    folder = (REPOSITORY / path).resolve()
    assert folder.is_dir(), path
    assert folder.is_relative_to(REPOSITORY), path
    return folder


def _built(folder: Path) -> list[Manifest]:
    """What kustomize makes of a folder, as both tools do."""
    return documents(parts.run(location(parts.KUBECTL) / "kubectl", "kustomize", folder))


def _charts() -> Iterator[tuple[str, str, Path, dict[str, Any]]]:
    """Each chart that an example installs: the tool, the release, the chart and its values."""
    for application in _APPLICATIONS:
        source = application["spec"]["source"]
        if "helm" in source:
            yield "argocd", source["helm"]["releaseName"], _folder(source["path"]), source["helm"]["valuesObject"]
    for release in _RELEASES:
        spec = release["spec"]
        yield "flux", _name(release), _folder(spec["chart"]["spec"]["chart"]), spec["values"]


@pytest.mark.parametrize(
    ("tool", "release", "chart", "values"), list(_charts()), ids=lambda each: each if isinstance(each, str) else ""
)
def test_charts_are_installed_with_values_that_they_know(
    helm: Helm, tool: str, release: str, chart: Path, values: dict[str, Any]
) -> None:
    rendered = helm.render(chart, values=values, release=release)
    if chart == CRDS_CHART:
        assert _CRD_KEPT.items() <= find(rendered, "CustomResourceDefinition")["metadata"]["annotations"].items()
    else:
        assert chart == CHART
        assert "CustomResourceDefinition" not in kinds(rendered), "two releases would own the definition"


@pytest.mark.parametrize("tool", ["argocd", "flux"])
def test_both_tools_install_both_charts_and_the_same_operator(helm: Helm, tool: str) -> None:
    installed = {chart: values for by, _, chart, values in _charts() if by == tool}
    assert installed.keys() == {CHART, CRDS_CHART}
    others = {chart: values for by, _, chart, values in _charts() if by != tool}
    assert installed[CHART] == others[CHART]


def test_resources_are_valid_and_stay_in_their_namespace() -> None:
    built = _built(_MODELS)
    resources = [each for each in built if each["kind"] == "DisaggregatedInference"]
    assert resources
    assert {each["metadata"]["namespace"] for each in resources} == {_name(find(built, "Namespace"))}
    for file in _MODELS.glob("*.yaml"):
        if file.name not in ("kustomization.yaml", "namespace.yaml"):
            assert [document.lines() for document in load(file, OperatorSettings())] == [[]]


def test_every_file_of_a_folder_is_in_its_kustomization() -> None:
    for folder in (_MODELS, _GITOPS / "flux" / "operator"):
        (kustomization,) = documents((folder / "kustomization.yaml").read_text(encoding="utf-8"))
        files = {file.name for file in folder.iterdir()} - {"kustomization.yaml"}
        assert set(kustomization["resources"]) == files


def test_the_operators_namespace_is_restricted_and_the_models_is_not() -> None:
    label = "pod-security.kubernetes.io/enforce"
    operators = find(_built(_GITOPS / "flux" / "operator"), "Namespace")
    application = next(each for each in _APPLICATIONS if _name(each) == "kvloop")
    managed = application["spec"]["syncPolicy"]["managedNamespaceMetadata"]["labels"]
    assert operators["metadata"]["labels"][label] == managed[label] == "restricted"
    assert find(_built(_MODELS), "Namespace")["metadata"]["labels"][label] == "privileged"


def test_argo_cd_deletes_no_definition_and_compares_resources_on_the_server() -> None:
    applications = {_name(each): each for each in _APPLICATIONS}
    assert applications.keys() == {"kvloop-crds", "kvloop", "kvloop-models"}
    definition = applications["kvloop-crds"]
    assert "prune" not in definition["spec"]["syncPolicy"]["automated"]
    annotations = definition["spec"]["source"]["helm"]["valuesObject"]["commonAnnotations"]
    assert annotations == {"argocd.argoproj.io/sync-options": "Prune=false,Delete=false"}
    models = applications["kvloop-models"]
    assert models["metadata"]["annotations"] == {"argocd.argoproj.io/compare-options": "ServerSideDiff=true"}
    assert _folder(models["spec"]["source"]["path"]) == _MODELS
    assert "finalizers" not in models["metadata"]
    for application in applications.values():
        assert "ServerSideApply=true" in application["spec"]["syncPolicy"]["syncOptions"]


def test_an_ignored_difference_is_the_field_that_autoscalers_scale(helm: Helm) -> None:
    models = next(each for each in _APPLICATIONS if _name(each) == "kvloop-models")
    (ignored,) = models["spec"]["ignoreDifferences"]
    definition = find(helm.render(CRDS_CHART), "CustomResourceDefinition")
    (version,) = definition["spec"]["versions"]
    scaled = version["subresources"]["scale"]["specReplicasPath"].replace(".", "/")
    assert ignored == {"group": "kvloop.io", "kind": "DisaggregatedInference", "jsonPointers": [scaled]}


def test_flux_brings_the_operator_before_the_resources() -> None:
    source = find(_FLUX, "GitRepository")
    operator, models = (find(_FLUX, "Kustomization", name) for name in ("kvloop-operator", "kvloop-models"))
    assert models["spec"]["dependsOn"] == [{"name": _name(operator)}]
    assert _folder(models["spec"]["path"]) == _MODELS
    assert _built(_folder(operator["spec"]["path"]))
    for kustomization in (operator, models):
        assert kustomization["spec"]["sourceRef"] == {"kind": "GitRepository", "name": _name(source)}
        assert kustomization["spec"]["wait"] is True

    definition, release = _RELEASES
    assert release["spec"]["dependsOn"] == [{"name": _name(definition)}]
    for each in _RELEASES:
        reference = each["spec"]["chart"]["spec"]["sourceRef"]
        assert reference == {
            "kind": "GitRepository",
            "name": _name(source),
            "namespace": source["metadata"]["namespace"],
        }
