"""Container images: out of the repository's Dockerfiles, and into the node."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.cluster import debian, parts, paths
from tests.cluster.build import location
from tests.cluster.parts import BASE_IMAGE, run
from tests.cluster.state import State

COMPONENTS: Final = ("router", "operator", "sim")
TAG: Final = "test"

# What a build needs of the machine to reach the package index as the machine itself does.
_FROM_MACHINE: Final = ("/etc/ssl/certs", "/etc/pip.conf")


def name(component: str) -> str:
    """What the tests call the image of one of `COMPONENTS`. A tag other than `latest`: nobody tries to pull it."""
    return f"localhost/kvloop-{component}:{TAG}"


def load(state: State, archive: Path) -> None:
    """Load the images of an archive, OCI or Docker, into the node."""
    _ctr(state, "import", archive)


def tag(state: State, image: str, other: str) -> None:
    """Give an image on the node a further name."""
    _ctr(state, "tag", "--force", image, other)


def _ctr(state: State, *arguments: str | Path) -> None:
    ctr = location(parts.CONTAINERD) / "ctr"
    run(ctr, "--address", state.containerd_socket, "--namespace", "k8s.io", "images", *arguments)


@contextmanager
def built(components: Sequence[str] = COMPONENTS) -> Iterator[list[Path]]:
    """Build the Dockerfiles of `components` from this checkout; gives a Docker archive for each.

    Layers are kept in the cache: only what changed is built anew, and what no image needs any more is removed. The
    archives are not compressed, which takes longer than all the rest.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder) / "context"
        _write_context(context, components)
        archives = [Path(folder) / f"{component}.tar" for component in components]
        with _storage_locked():
            # The containers of a build that was killed keep their images from being removed.
            _buildah("rm", "--all")
            _buildah("pull", "--quiet", f"oci-archive:{location(parts.BASE) / 'base.tar'}")
            for component, archive in zip(components, archives, strict=True):
                _build(component, context)
                _buildah(
                    "push",
                    "--quiet",
                    "--disable-compression",
                    name(component),
                    f"docker-archive:{archive}:{name(component)}",
                )
            _buildah("rmi", "--prune")
        yield archives


def _build(component: str, context: Path) -> None:
    volumes = [f"--volume={path}:{path}:ro" for path in _FROM_MACHINE if Path(path).exists()]
    dockerfile = paths.REPOSITORY / component / "Dockerfile"
    command = ["build", "--layers", "--quiet", f"--build-arg=BASE={BASE_IMAGE}", *volumes, f"--file={dockerfile}"]
    # Under a name of its own, the stage that installs the requirements outlives the pruning.
    _buildah(*command, "--target=requirements", f"--tag=localhost/kvloop-{component}-requirements:{TAG}", str(context))
    _buildah(*command, f"--tag={name(component)}", str(context))


@contextmanager
def _storage_locked() -> Iterator[None]:
    """Keep other runs off the layers: pruning would take those of a build that has not ended."""
    paths.cache().mkdir(parents=True, exist_ok=True)
    with (paths.cache() / "buildah.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_context(context: Path, components: Sequence[str]) -> None:
    """What the Dockerfiles copy: the wheel of this checkout, and the requirement files."""
    requirements = context / "requirements"
    requirements.mkdir(parents=True)
    for component in components:
        shutil.copy(paths.REPOSITORY / "requirements" / f"{component}.txt", requirements)
    # The same tree gives the same wheel, byte for byte, and so the same layer.
    run(
        *(sys.executable, "-m", "hatchling", "build", "--target=wheel", f"--directory={context / 'dist'}"),
        cwd=paths.REPOSITORY,
        environment={"SOURCE_DATE_EPOCH": "0"},
    )


def _buildah(*arguments: str) -> None:
    storage = paths.cache() / "buildah"
    run(
        # In a mount namespace of its own, where what the storage driver mounts ends with it.
        *(debian.find("unshare") or "unshare", "--mount"),
        *(debian.find("buildah") or "buildah", f"--root={storage / 'root'}", f"--runroot={storage / 'run'}"),
        *arguments,
        environment={
            "BUILDAH_ISOLATION": "chroot",
            "STORAGE_DRIVER": os.environ.get("STORAGE_DRIVER", "overlay"),
        },
    )
