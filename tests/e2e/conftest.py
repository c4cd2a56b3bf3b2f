"""kvloop on a whole node: installed by its chart, with simulated engines in pods."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.charts.helm import Helm
from tests.cluster.audit import AuditLog
from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import skip_where_unavailable
from tests.cluster.kubectl import Kubectl
from tests.harness.deployment import Deployment
from tests.harness.inside import Inside
from tests.harness.installation import NAMESPACE, USER, Installation
from tests.harness.kube import Kube

_RESTRICTED: Final = {"pod-security.kubernetes.io/enforce": "restricted"}
# Engines on a CPU need no more; those with EFA lock memory.
_BASELINE: Final = {"pod-security.kubernetes.io/enforce": "baseline"}
_EXPLAINED: Final = pytest.StashKey[list[Deployment | Installation]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_EXPLAINED] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show beside a failure what the resources, the operator, routers and engines say."""
    report = yield
    if report.failed:
        for each in item.config.stash[_EXPLAINED]:
            report.sections.append((each.title, each.explain()))
    return report


@pytest.fixture(scope="session")
def audit(node: Cluster) -> AuditLog:
    """The audit log, from the first request on."""
    with skip_where_unavailable():
        return node.audit


@pytest.fixture(scope="session")
def kube(node: Cluster) -> Kube:
    """Plain requests as the administrator."""
    return Kube(node.kubeconfig)


@pytest.fixture(scope="session")
def inside(node: Cluster) -> Iterator[Inside]:
    """Requests from inside the node's network."""
    with skip_where_unavailable():
        node.in_node_network()
    with Inside(node.in_node_network) as inside:
        yield inside


@pytest.fixture(scope="session")
def kvloop(
    node: Cluster,
    kube: Kube,
    inside: Inside,
    audit: AuditLog,
    kvloop_images: dict[str, str],
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> Installation:
    """kvloop, installed by its chart where only restricted pods are admitted."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": _RESTRICTED}}
    node.kubectl.apply(namespace)
    helm = Helm(tmp_path_factory.mktemp("helm"), node.kubeconfig, NAMESPACE)
    kubectl = Kubectl(node.kubeconfig, NAMESPACE)
    installation = Installation(helm, kubectl, kube, inside, images=kvloop_images, audit=audit)
    pytestconfig.stash[_EXPLAINED].append(installation)
    installation.install()
    return installation


@pytest.fixture(scope="session")
def next_engine_image(node: Cluster, kvloop_images: dict[str, str]) -> str:
    """The simulator's image under a name that says another version."""
    image = f"{kvloop_images['sim'].rpartition(':')[0]}:v0.33.1"
    with skip_where_unavailable():
        node.tag_image(kvloop_images["sim"], image)
    return image


@contextmanager
def _in_a_namespace(node: Cluster, kube: Kube, inside: Inside, config: pytest.Config) -> Iterator[Deployment]:
    explained = config.stash[_EXPLAINED]
    with node.namespace(labels=_BASELINE) as kubectl:
        deployment = Deployment(kubectl, kube, inside)
        explained.append(deployment)
        yield deployment
        explained.remove(deployment)


@pytest.fixture
def deployment(
    node: Cluster, kube: Kube, inside: Inside, kvloop: Installation, pytestconfig: pytest.Config
) -> Iterator[Deployment]:
    """A namespace of the test's own, for a resource that the test applies."""
    with _in_a_namespace(node, kube, inside, pytestconfig) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def shared(
    node: Cluster, kube: Kube, inside: Inside, kvloop: Installation, pytestconfig: pytest.Config
) -> Iterator[Deployment]:
    """The same for all tests of a module."""
    with _in_a_namespace(node, kube, inside, pytestconfig) as deployment:
        yield deployment


@pytest.fixture
def operator_is_well(kvloop: Installation, audit: AuditLog) -> Iterator[None]:
    """While the test runs the operator is refused nothing, and no pass ends by a defect in it."""
    since = audit.from_now()
    yield
    assert since.events(lambda event: event.user == USER and not event.allowed) == []
    assert kvloop.metric("kvloop_operator_reconciles_total", result="defect") == 0
