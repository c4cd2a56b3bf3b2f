"""The machine's own tools that the node needs, and how they get there on Debian."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.cluster.errors import ClusterUnavailableError

CONTROL_PLANE_TOOLS: Final[Mapping[str, str]] = {"openssl": "openssl", "setpriv": "util-linux"}
NODE_TOOLS: Final[Mapping[str, str]] = {
    **CONTROL_PLANE_TOOLS,
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "nft": "nftables",
    "nsenter": "util-linux",
    "runc": "runc",
    "unshare": "util-linux",
}
"""Command to Debian package."""

_SYSTEM_PATH: Final = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def find(command: str) -> str | None:
    """Path of a command, also where only root's PATH has it."""
    return shutil.which(command) or shutil.which(command, path=os.pathsep.join(_SYSTEM_PATH))


def missing(tools: Mapping[str, str]) -> dict[str, str]:
    """Those of `tools` that this machine lacks."""
    return {command: package for command, package in tools.items() if find(command) is None}


def require(tools: Mapping[str, str]) -> None:
    """Raise ClusterUnavailableError unless every command is there."""
    if absent := missing(tools):
        raise ClusterUnavailableError(
            f"{', '.join(absent)} not found: run `make cluster-parts` as root on Debian, "
            f"or install {', '.join(sorted(set(absent.values())))}"
        )


def install(tools: Mapping[str, str]) -> None:
    """Install the packages of the commands that are missing, where that is possible."""
    absent = missing(tools)
    if not absent:
        return
    if not Path("/etc/debian_version").exists() or os.geteuid() != 0 or find("apt-get") is None:
        require(tools)
    packages = sorted(set(absent.values()))
    print(f"cluster: installing {' '.join(packages)}", file=sys.stderr, flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        finished = subprocess.run(
            ["apt-get", "--quiet=2", "-o", "DPkg::Lock::Timeout=600", *arguments],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if finished.returncode:
            raise ClusterUnavailableError(f"apt-get {arguments[0]} failed: {finished.stdout[-2000:]}")
    require(tools)
