"""Who may do what once the chart is installed, as a real API server judges it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.charts.helm import CHART, Helm
from tests.charts.rights import RIGHTS
from tests.cluster.cluster import Cluster
from tests.cluster.errors import CommandFailedError
from tests.cluster.kubectl import Kubectl
from tests.cluster.waiting import wait_until
from tests.control_plane.rights import rights_of


@dataclass(frozen=True, slots=True)
class _Release:
    namespace: str
    account: str


@pytest.fixture(scope="module")
def release(control_plane: Cluster, kvloop_crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Release]:
    """A release with the default values, but for the definition, which other tests have too."""
    with control_plane.namespace() as kubectl:
        assert kubectl.namespace is not None
        # A name of its own: the roles are the cluster's.
        name = kubectl.namespace
        helm = Helm(tmp_path_factory.mktemp("helm"), control_plane.kubeconfig, kubectl.namespace)
        helm("install", name, CHART, values={"crds": {"enabled": False}})
        yield _Release(kubectl.namespace, f"{name}-kvloop-operator")
        helm("uninstall", name)


def test_the_operators_account_has_the_rights_that_it_needs_and_no_other(
    control_plane: Cluster, release: _Release
) -> None:
    wanted = {what: set(verbs) for what, verbs in RIGHTS.items()}
    assert rights_of(control_plane, (release.namespace, release.account), "default") == wanted


def test_the_operator_can_give_a_router_its_rights_and_no_more(control_plane: Cluster, release: _Release) -> None:
    """The API server lets nobody make a role that holds more than its maker."""
    operator = Kubectl(control_plane.service_account(release.namespace, release.account), release.namespace)
    operator("create", "role", "router", "--verb=get,list,watch", "--resource=pods")
    operator("create", "rolebinding", "router", "--role=router", f"--serviceaccount={release.namespace}:router")
    with pytest.raises(CommandFailedError, match="attempting to grant RBAC permissions not currently held"):
        operator("create", "role", "greedy", "--verb=list", "--resource=secrets")


def test_who_may_edit_a_namespace_may_edit_its_resources(control_plane: Cluster, release: _Release) -> None:
    admin = Kubectl(control_plane.kubeconfig, release.namespace)
    for role in ("view", "edit"):
        admin("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}er")
    viewer, editor = (Kubectl(control_plane.user(name), release.namespace) for name in ("viewer", "editer"))

    def may(who: Kubectl, verb: str, subresource: str = "") -> bool:
        try:
            return who("auth", "can-i", verb, "dinf", f"--subresource={subresource}").strip() == "yes"
        except CommandFailedError:
            return False

    # The controller adds our rules to the cluster's own roles a moment after the chart brings them.
    wait_until(lambda: may(editor, "patch"), what="the role edit covers resources")
    wait_until(lambda: may(viewer, "get"), what="the role view covers resources")
    assert may(editor, "patch", "scale")
    assert not may(viewer, "patch")
    assert not may(editor, "patch", "status")
