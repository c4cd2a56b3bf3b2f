"""The control plane with kvloop's CustomResourceDefinition, and a namespace for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.paths import REPOSITORY
from tests.harness.kube import Kube

CRD = REPOSITORY / "crds" / "kvloop.io_disaggregatedinferences.yaml"


@pytest.fixture(scope="session")
def kvloop_crd(control_plane: Cluster) -> None:
    """The checked-in CustomResourceDefinition, served."""
    control_plane.define(CRD)


@pytest.fixture(scope="session")
def kube(control_plane: Cluster, kvloop_crd: None) -> Kube:
    """Plain requests as the administrator."""
    return Kube(control_plane.kubeconfig)


@pytest.fixture
def namespace_cp(control_plane: Cluster, kvloop_crd: None) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test's own, on the control plane, with the definition served."""
    with control_plane.namespace() as kubectl:
        yield kubectl
