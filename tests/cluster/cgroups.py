"""A cgroup of the node's own in every version 1 hierarchy, below the one this process is in."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.errors import ClusterUnavailableError

REMOVAL_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One line of `/proc/self/cgroup`."""

    controllers: str
    """As the mount option names them: `cpu,cpuacct`, or `name=systemd`."""
    path: str


def hierarchies(text: str) -> list[Hierarchy]:
    """The version 1 hierarchies in the text of `/proc/PID/cgroup`."""
    lines = (line.split(":", 2) for line in text.splitlines())
    return [Hierarchy(controllers=controllers, path=path) for _, controllers, path in lines if controllers]


def mount_points(text: str) -> dict[str, Path]:
    """From the text of `/proc/PID/mountinfo`: each version 1 controller to where it is mounted."""
    found: dict[str, Path] = {}
    for line in text.splitlines():
        mount, _, kind = line.partition(" - ")
        fields, (file_system, _, options) = mount.split(), kind.split()[:3]
        if file_system == "cgroup" and fields[3] == "/":
            found |= {option: Path(fields[4]) for option in options.split(",")}
    return found


def require_version_1() -> None:
    """Raise ClusterUnavailableError where the node's containers could not get cgroups."""
    mounted = mount_points(Path("/proc/self/mountinfo").read_text())
    needed = {"cpu", "cpuset", "memory", "pids"}
    if absent := needed - mounted.keys():
        raise ClusterUnavailableError(
            f"no cgroup v1 hierarchy for {', '.join(sorted(absent))}: on a machine with cgroup v2 only, "
            "give the tests a cluster by --kubeconfig (kind, for example)"
        )


def below_present(name: str) -> list[Path]:
    """The paths of cgroups called `name` below the present one in every hierarchy."""
    mounted = mount_points(Path("/proc/self/mountinfo").read_text())
    return [
        mounted[hierarchy.controllers.split(",")[0]] / hierarchy.path.lstrip("/") / name
        for hierarchy in hierarchies(Path("/proc/self/cgroup").read_text())
        if hierarchy.controllers.split(",")[0] in mounted
    ]


def create(cgroups: Iterable[Path]) -> None:
    """Make `cgroups`, ready to take processes."""
    for cgroup in cgroups:
        cgroup.mkdir()
        for file in ("cpuset.cpus", "cpuset.mems"):
            # A new cpuset is empty, and takes no process before it is filled.
            if (cgroup / file).exists():
                (cgroup / file).write_text((cgroup.parent / file).read_text())


def join(cgroups: Iterable[Path]) -> None:
    """Move the calling process into `cgroups`."""
    for cgroup in cgroups:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))


def remove(cgroups: Iterable[Path]) -> list[Path]:
    """Remove `cgroups` with all below them once their last process has gone; returns those that could not be."""
    deadline = time.monotonic() + REMOVAL_SECONDS
    left = [cgroup for cgroup in cgroups if cgroup.exists()]
    while left and time.monotonic() < deadline:
        for cgroup in left:
            for folder, _, _ in os.walk(cgroup, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
        left = [cgroup for cgroup in left if cgroup.exists()]
        if left:
            time.sleep(0.02)
    return left
