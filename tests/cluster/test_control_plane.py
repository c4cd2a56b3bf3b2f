"""The control plane serves: built-in kinds, our CRD, identities, the audit log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import paths, versions
from tests.cluster.cluster import Cluster
from tests.cluster.errors import CommandFailedError
from tests.cluster.fixtures import skip_where_unavailable
from tests.cluster.kubectl import Kubectl
from tests.cluster.paths import REPOSITORY

pytestmark = pytest.mark.timeout(1200)

_CRD = REPOSITORY / "crds" / "kvloop.io_disaggregatedinferences.yaml"
_EXAMPLE = REPOSITORY / "examples" / "minimal.yaml"


def test_server_and_kubectl_are_of_the_pinned_version(control_plane: Cluster) -> None:
    found = control_plane.kubectl.json("version")
    assert found["clientVersion"]["gitVersion"] == f"v{versions.KUBECTL}"
    if control_plane.state is not None:
        assert found["serverVersion"]["gitVersion"] == f"v{versions.KUBERNETES}"


def test_controllers_and_scheduler_work_where_no_kubelet_does(control_plane: Cluster) -> None:
    if control_plane.state is None:
        pytest.skip("the cluster that was given has kubelets")
    with control_plane.namespace() as kubectl:
        kubectl("create", "deployment", "idle", "--image=localhost/none:1")
        kubectl.wait("create", "pod", "--selector=app=idle")
        kubectl.wait("condition=PodScheduled=false", "pod", "--selector=app=idle")


def test_a_resource_of_ours_round_trips(control_plane: Cluster) -> None:
    example = yaml.safe_load(_EXAMPLE.read_text())
    control_plane.define(_CRD)
    with control_plane.namespace() as kubectl:
        kubectl.apply(example)
        found = kubectl.get("dinf", example["metadata"]["name"])
    assert _is_within(example["spec"], found["spec"])
    assert found["status"]["observedGeneration"] == -1


def test_a_service_account_has_the_rights_of_its_roles_and_no_others(control_plane: Cluster) -> None:
    with control_plane.namespace() as kubectl:
        namespace = _name(kubectl)
        kubectl("create", "serviceaccount", "reader")
        kubectl("create", "role", "reads", "--verb=get,list", "--resource=configmaps")
        kubectl("create", "rolebinding", "reads", "--role=reads", f"--serviceaccount={namespace}:reader")
        reader = Kubectl(control_plane.service_account(namespace, "reader"), namespace)
        assert reader.list("configmaps")
        with pytest.raises(CommandFailedError, match='cannot list resource "secrets"'):
            reader.list("secrets")


def test_a_named_user_is_known_by_name_and_groups(control_plane: Cluster) -> None:
    someone = Kubectl(control_plane.user("jane@example.com", "team/a", "team-b"))
    told = someone.json("auth", "whoami")["status"]["userInfo"]
    assert told["username"] == "jane@example.com"
    assert {"team/a", "team-b"} <= set(told["groups"])


def test_the_audit_log_names_who_asked_for_what_and_how_it_ended(control_plane: Cluster) -> None:
    with skip_where_unavailable():
        audit = control_plane.audit
    with control_plane.namespace() as kubectl:
        namespace = _name(kubectl)
        kubectl("create", "serviceaccount", "writer")
        kubectl("create", "role", "writes", "--verb=create", "--resource=configmaps")
        kubectl("create", "rolebinding", "writes", "--role=writes", f"--serviceaccount={namespace}:writer")
        writer = Kubectl(control_plane.service_account(namespace, "writer"), namespace)
        since = audit.from_now()
        writer("create", "configmap", "made")
        with pytest.raises(CommandFailedError):
            writer("delete", "configmap", "made")

        user = f"system:serviceaccount:{namespace}:writer"
        created, refused = since.wait_for(lambda event: event.user == user and event.mutates, count=2)
    assert (created.verb, created.resource, created.namespace, created.name) == (
        "create",
        "configmaps",
        namespace,
        "made",
    )
    assert (created.code, created.allowed) == (201, True)
    assert "writes" in created.rule
    assert (refused.verb, refused.name, refused.code, refused.allowed) == ("delete", "made", 403, False)


def test_kubectl_leaves_nothing_in_the_home_folder(
    control_plane: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The built parts lie below the home folder, unless told otherwise.
    monkeypatch.setenv("KVLOOP_CACHE", str(paths.cache()))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert control_plane.kubectl.list("namespaces")
    assert list(tmp_path.iterdir()) == []


def _is_within(part: Any, whole: Any) -> bool:
    """Whether `whole` is `part`, but for what defaults added."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and _is_within(value, whole[key]) for key, value in part.items())
    return bool(part == whole)


def _name(kubectl: Kubectl) -> str:
    assert kubectl.namespace is not None
    return kubectl.namespace
