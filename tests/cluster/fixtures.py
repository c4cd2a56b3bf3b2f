"""The pytest fixtures `control_plane` and `node`, for every test that wants a real Kubernetes.

A top-level conftest.py names this module in `pytest_plugins`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.cluster import cluster, images
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterUnavailableError
from tests.cluster.kubectl import Kubectl
from tests.cluster.parts import BASE_IMAGE
from tests.cluster.state import Size


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kubeconfig",
        default=os.environ.get("KUBECONFIG"),
        help="run the cluster tests on this cluster instead of starting one (default: $KUBECONFIG)",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    given = config.getoption("--kubeconfig")
    return f"cluster tests run on the cluster of {given}" if given else None


@contextlib.contextmanager
def skip_where_unavailable() -> Iterator[None]:
    """Skip with the reason where this machine lacks what a test needs; in CI that is an error."""
    try:
        yield
    except ClusterUnavailableError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@contextlib.contextmanager
def _provided(size: Size, config: pytest.Config) -> Iterator[Cluster]:
    kubeconfig: str | None = config.getoption("--kubeconfig")
    with contextlib.ExitStack() as stack:
        with skip_where_unavailable():
            provider = cluster.given(kubeconfig) if kubeconfig else cluster.running(size)
            provided = stack.enter_context(provider)
        yield provided


@pytest.fixture(scope="session")
def control_plane(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """API server, controllers and scheduler: for tests that need no running pod."""
    with _provided("control-plane", pytestconfig) as provided:
        yield provided


@pytest.fixture(scope="session")
def node(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """A whole one-node cluster with real containers."""
    with _provided("node", pytestconfig) as provided:
        yield provided


@pytest.fixture
def namespace(node: Cluster) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test's own, on the node."""
    with node.namespace() as kubectl:
        yield kubectl


def _pushed(component: str) -> str:
    registry = os.environ.get("KVLOOP_TEST_IMAGES")
    with skip_where_unavailable():
        if not registry:
            raise ClusterUnavailableError("KVLOOP_TEST_IMAGES does not say where the given cluster finds the images")
    return f"{registry}/kvloop-{component}:{images.TAG}"


@pytest.fixture(scope="session")
def base_image(node: Cluster) -> str:
    """An image with Python and nothing of ours, on the node; elsewhere `$KVLOOP_TEST_IMAGES/kvloop-base:test`."""
    return BASE_IMAGE if node.state is not None else _pushed("base")


@pytest.fixture(scope="session")
def kvloop_images(node: Cluster) -> dict[str, str]:
    """The images of this checkout, built and loaded into the node: component to image name.

    A cluster given by kubeconfig has to find them as `$KVLOOP_TEST_IMAGES/kvloop-COMPONENT:test`.
    """
    if node.state is None:
        return {component: _pushed(component) for component in images.COMPONENTS}
    with skip_where_unavailable(), images.built() as archives:
        for archive in archives:
            node.load_images(archive)
    return {component: images.name(component) for component in images.COMPONENTS}
