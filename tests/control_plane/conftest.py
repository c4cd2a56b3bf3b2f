"""The control plane with kvloop's CustomResourceDefinition, a namespace for each test, and operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.charts.helm import Helm
from tests.cluster.audit import AuditLog
from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import skip_where_unavailable
from tests.cluster.kubectl import Kubectl
from tests.cluster.paths import REPOSITORY
from tests.harness.kube import Kube
from tests.harness.operator_process import OperatorProcess, install_rights

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


@pytest.fixture
def ns(namespace_cp: Kubectl) -> str:
    """The name of that namespace."""
    assert namespace_cp.namespace is not None
    return namespace_cp.namespace


@pytest.fixture
def audit(control_plane: Cluster) -> AuditLog:
    """The audit log from now on."""
    with skip_where_unavailable():
        return control_plane.audit.from_now()


@pytest.fixture(scope="session")
def operator_account(control_plane: Cluster, kvloop_crd: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig of the ServiceAccount that the chart makes, with the rights that the chart gives it."""
    return install_rights(control_plane, Helm(tmp_path_factory.mktemp("helm")))


class StartOperator(Protocol):
    """Starts an operator with these flags, ready to work; `kubeconfig` where it is not the shipped account's."""

    def __call__(self, *flags: str, kubeconfig: Path | None = None) -> OperatorProcess: ...


@pytest.fixture
def start_operator(operator_account: Path, tmp_path: Path) -> Iterator[StartOperator]:
    """Operators of the test's own. They end with it; what they wrote is shown if it fails."""
    started: list[OperatorProcess] = []

    def start(*flags: str, kubeconfig: Path | None = None) -> OperatorProcess:
        log = tmp_path / f"operator-{len(started)}.log"
        operator = OperatorProcess(kubeconfig or operator_account, log=log, flags=flags)
        started.append(operator)
        operator.launch()
        operator.wait_until_ready()
        return operator

    yield start
    for operator in started:
        operator.kill()
        print(operator.log_tail())


@pytest.fixture
def own_operator(start_operator: StartOperator, ns: str) -> OperatorProcess:
    """An operator that watches the test's namespace and reads everything anew twice a second; the test may end it."""
    return start_operator(f"--namespace={ns}", "--resync-seconds=0.5")


@pytest.fixture(scope="module")
def operator(operator_account: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """One that watches all namespaces, for all tests of a module: no other may run beside it."""
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    flags = ["--all-namespaces", "--resync-seconds=0.5"]
    with OperatorProcess(operator_account, log=log, flags=flags) as operator:
        operator.wait_until_ready()
        yield operator
        print(operator.log_tail())
