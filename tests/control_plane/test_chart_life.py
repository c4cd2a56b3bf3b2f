"""The charts on a real API server: installed, upgraded, rolled back and uninstalled by the real helm.

On a control plane of its own: it takes the CustomResourceDefinition away, and with it what other tests would have made.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.charts.helm import CHART, CRD, CRDS_CHART, Helm
from tests.charts.rights import RIGHTS
from tests.cluster import cluster
from tests.cluster.cluster import Cluster
from tests.cluster.errors import CommandFailedError
from tests.cluster.fixtures import skip_where_unavailable
from tests.cluster.kubectl import Kubectl
from tests.cluster.paths import REPOSITORY
from tests.cluster.waiting import wait_until
from tests.control_plane.rights import rights_of

_CRD_NAME: Final = "disaggregatedinferences.kvloop.io"
_EXAMPLE: Final = yaml.safe_load((REPOSITORY / "examples" / "minimal.yaml").read_text(encoding="utf-8"))
_RESTRICTED: Final = {"pod-security.kubernetes.io/enforce": "restricted"}
# By its full name: the short one is among what changes.
_RESOURCE: Final = f"{_CRD_NAME}/{_EXAMPLE['metadata']['name']}"


@pytest.fixture(scope="module")
def own_control_plane() -> Iterator[Cluster]:
    with skip_where_unavailable():
        started = cluster.running("control-plane")
    with started as control_plane:
        yield control_plane


@pytest.fixture
def kubectl(own_control_plane: Cluster) -> Iterator[Kubectl]:
    """kubectl in a namespace that admits restricted pods only. Without the CRD, before and after."""
    with own_control_plane.namespace(labels=_RESTRICTED) as in_namespace:
        yield in_namespace
    own_control_plane.kubectl("delete", f"crd/{_CRD_NAME}", "--ignore-not-found")
    own_control_plane.kubectl("delete", "clusterrole,clusterrolebinding", "--selector=helm.sh/chart")


@pytest.fixture
def helm(kubectl: Kubectl, tmp_path: Path) -> Helm:
    assert kubectl.namespace is not None
    return Helm(tmp_path, kubectl.kubeconfig, kubectl.namespace)


def _exists(kubectl: Kubectl, what: str) -> bool:
    return bool(kubectl("get", what, "--ignore-not-found", "--output=name"))


def _operator(kubectl: Kubectl) -> dict[str, Any]:
    (container,) = kubectl.get("deployment", "kvloop-operator")["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def _apply_example(kubectl: Kubectl) -> None:
    def established() -> bool:
        # Not `kubectl wait`, which gives up on an object that has no conditions yet.
        conditions = kubectl.get("crd", _CRD_NAME).get("status", {}).get("conditions") or ()
        return {"Established": "True"}.items() <= {each["type"]: each["status"] for each in conditions}.items()

    wait_until(established, what="the kind is served")
    kubectl.apply(_EXAMPLE)


@pytest.mark.parametrize("chart", [CHART, CRDS_CHART], ids=lambda chart: chart.name)
def test_a_trial_on_the_server_makes_nothing(kubectl: Kubectl, helm: Helm, chart: Path) -> None:
    helm("install", "kvloop", chart, "--dry-run=server")
    assert not _exists(kubectl, f"crd/{_CRD_NAME}")
    assert not _exists(kubectl, "deployments")


@pytest.mark.parametrize("side", ["--server-side=true", "--server-side=false"])
def test_an_installed_operator_gets_its_pod_where_pods_are_restricted(kubectl: Kubectl, helm: Helm, side: str) -> None:
    helm("install", "kvloop", CHART, side)
    kubectl.wait("create", "pod", "--selector=app.kubernetes.io/name=kvloop-operator")
    (pod,) = kubectl.list("pods", selector="app.kubernetes.io/instance=kvloop")
    assert pod["spec"]["serviceAccountName"] == "kvloop-operator"
    assert "kvloop-operator-metrics" in [each["metadata"]["name"] for each in kubectl.list("services")]
    _apply_example(kubectl)


def test_with_two_namespaces_the_operator_has_its_rights_there_and_none_elsewhere(
    own_control_plane: Cluster, kubectl: Kubectl, helm: Helm
) -> None:
    with own_control_plane.namespace() as one, own_control_plane.namespace() as other:
        watched = [one.namespace, other.namespace]
        helm("install", "kvloop", CHART, values={"watchNamespaces": watched})
        account = (helm.namespace, "kvloop-operator")
        wanted = {what: set(verbs) for what, verbs in RIGHTS.items()}
        for namespace in watched:
            assert namespace is not None
            assert rights_of(own_control_plane, account, namespace) == wanted
        for namespace in ("default", helm.namespace):
            assert rights_of(own_control_plane, account, namespace) == {}
        assert _operator(kubectl)["args"][:2] == [f"--namespace={namespace}" for namespace in watched]

        helm("upgrade", "kvloop", CHART, values={"watchNamespaces": watched[:1]})
        assert not _exists(other, "role/kvloop-operator")
        helm("uninstall", "kvloop", "--wait")
        assert not _exists(one, "role/kvloop-operator")


def test_an_upgrade_changes_the_operator_and_a_rollback_returns_it(kubectl: Kubectl, helm: Helm) -> None:
    helm("install", "kvloop", CHART, values={"operator": {"workers": 2}})
    before = _operator(kubectl)
    assert "--workers=2" in before["args"]

    helm("upgrade", "kvloop", CHART, values={"operator": {"workers": 4}, "image": {"tag": "v9"}})
    changed = _operator(kubectl)
    assert "--workers=4" in changed["args"]
    assert changed["image"] == "kvloop/operator:v9"

    helm("rollback", "kvloop", "1")
    assert _operator(kubectl) == before


def test_an_upgrade_brings_the_new_definition(kubectl: Kubectl, helm: Helm, tmp_path: Path) -> None:
    """Of a chart's own folder `crds`, helm would install it once and never touch it again."""
    older = tmp_path / "kvloop"
    shutil.copytree(CHART, older)
    (definition,) = (older / "files").iterdir()
    document = yaml.load(definition.read_text(encoding="utf-8"), yaml.CSafeLoader)
    document["spec"]["names"]["shortNames"] = ["older"]
    definition.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")

    helm("install", "kvloop", older)
    assert kubectl.get("crd", _CRD_NAME)["spec"]["names"]["shortNames"] == ["older"]
    helm("upgrade", "kvloop", CHART)
    assert kubectl.get("crd", _CRD_NAME)["spec"]["names"]["shortNames"] == ["dinf"]


def test_uninstalling_leaves_the_definition_and_the_resources_and_installing_finds_them_again(
    kubectl: Kubectl, helm: Helm
) -> None:
    helm("install", "kvloop", CHART)
    _apply_example(kubectl)
    uid = kubectl.get(*_RESOURCE.split("/"))["metadata"]["uid"]

    helm("uninstall", "kvloop", "--wait")
    assert not _exists(kubectl, "deployments")
    assert not _exists(kubectl, "clusterrole/kvloop-operator")
    assert kubectl.get(*_RESOURCE.split("/"))["metadata"]["uid"] == uid

    helm("install", "kvloop", CHART)
    assert kubectl.get(*_RESOURCE.split("/"))["metadata"]["uid"] == uid


def test_uninstalling_takes_everything_along_where_it_was_told_to(kubectl: Kubectl, helm: Helm) -> None:
    helm("install", "kvloop", CHART, values={"crds": {"keep": False}})
    _apply_example(kubectl)
    helm("uninstall", "kvloop", "--wait")
    wait_until(lambda: not _exists(kubectl, f"crd/{_CRD_NAME}"), what="the definition is gone")


def test_an_older_definition_that_kubectl_brought_is_taken_over_when_asked(kubectl: Kubectl, helm: Helm) -> None:
    older = yaml.load(CRD.read_text(encoding="utf-8"), yaml.CSafeLoader)
    older["spec"]["names"]["shortNames"] = ["older"]
    kubectl.apply(older, server_side=True)
    _apply_example(kubectl)
    with pytest.raises(CommandFailedError, match="invalid ownership metadata"):
        helm("install", "kvloop", CHART)

    helm("install", "kvloop", CHART, "--take-ownership", "--force-conflicts")
    assert kubectl.get("crd", _CRD_NAME)["spec"]["names"]["shortNames"] == ["dinf"]
    assert _exists(kubectl, _RESOURCE)


def test_definition_and_operator_can_be_releases_of_their_own(kubectl: Kubectl, helm: Helm) -> None:
    helm("install", "kvloop-crds", CRDS_CHART)
    helm("install", "kvloop", CHART, values={"crds": {"enabled": False}})
    _apply_example(kubectl)
    helm("uninstall", "kvloop", "--wait")
    helm("uninstall", "kvloop-crds", "--wait")
    assert _exists(kubectl, _RESOURCE)


def test_the_file_for_kubectl_installs_an_operator_that_helm_can_take_over(
    own_control_plane: Cluster, tmp_path: Path
) -> None:
    file = REPOSITORY / "examples" / "kubectl" / "operator.yaml"
    system = Kubectl(own_control_plane.kubeconfig, "kvloop-system")
    try:
        system("apply", "--server-side", f"--filename={CRD.parent}", f"--filename={file}")
        system.wait("create", "pod", "--selector=app.kubernetes.io/name=kvloop-operator")
        wanted = {what: set(verbs) for what, verbs in RIGHTS.items()}
        assert rights_of(own_control_plane, ("kvloop-system", "kvloop-operator"), "default") == wanted

        helm = Helm(tmp_path, own_control_plane.kubeconfig, "kvloop-system")
        helm("install", "kvloop", CHART, "--take-ownership", "--force-conflicts", values={"operator": {"workers": 2}})
        assert "--workers=2" in _operator(system)["args"]
        helm("uninstall", "kvloop", "--wait")
        assert not _exists(system, "deployments")
    finally:
        system("delete", f"--filename={CRD.parent}", f"--filename={file}", "--wait=false", "--ignore-not-found")
