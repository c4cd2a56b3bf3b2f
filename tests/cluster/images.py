"""Container images: into the node, and out of the repository's Dockerfiles."""

from __future__ import annotations

from pathlib import Path

from tests.cluster import parts
from tests.cluster.build import location
from tests.cluster.state import State


def load(state: State, archive: Path) -> None:
    """Load the images of an OCI archive into the node."""
    ctr = location(parts.CONTAINERD) / "ctr"
    parts.run(ctr, "--address", state.containerd_socket, "--namespace", "k8s.io", "images", "import", archive)
