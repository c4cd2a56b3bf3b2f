"""Process 1 of the node's namespaces: `python -m tests.cluster.node_init STATE`.

It mounts what the components need so that nothing of it is seen outside, starts them, and ends when one of them does:
the kernel then ends the rest, and drops every mount, interface and packet filter rule with the namespaces.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from tests.cluster import cgroups, components, images, parts
from tests.cluster.api import Api
from tests.cluster.build import location
from tests.cluster.errors import ClusterFailedError, CommandFailedError
from tests.cluster.parts import run
from tests.cluster.state import State

_START_SECONDS: Final = 240
_POLL_SECONDS: Final = 0.05

_WANTED_SYSCTLS: Final[Mapping[str, str]] = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What the kubelet would set, for the whole machine."""


def mount_file_systems(memory: Path) -> None:
    """Lay private, empty places over the machine's own. What is written there is kept in `memory` (a folder)."""
    memory.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", "mode=755,size=8g", "tmpfs", memory)
    for name in ("etc", "var"):
        upper, work = memory / name, memory / f"{name}.work"
        upper.mkdir()
        work.mkdir()
        options = f"lowerdir=/{name},upperdir={upper},workdir={work}"
        run("mount", "-t", "overlay", "-o", options, "overlay", f"/{name}")
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    for folder in ("/run/lock", "/run/netns", "/var/log/pods", "/var/log/containers"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    for name in ("containerd", "kubelet"):
        source, target = memory / name, Path("/var/lib") / name
        source.mkdir()
        target.mkdir(exist_ok=True)
        # Overlays on an overlay do not work: these lie on the tmpfs itself.
        run("mount", "--bind", source, target)
    # Volumes that the kubelet mounts are to be seen in the containers.
    run("mount", "--make-rshared", "/var/lib/kubelet")
    Path("/etc/resolv.conf").unlink(missing_ok=True)
    Path("/etc/resolv.conf").write_text(f"nameserver {components.NODE_ADDRESS}\n")
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost\n{components.NODE_ADDRESS} {components.NODE}\n")


def mount_sysctls() -> None:
    """Let the kubelet see the settings that it wants, and write them nowhere."""
    for number, (name, value) in enumerate(_WANTED_SYSCTLS.items()):
        copy = Path(f"/run/sysctl-{number}")
        copy.write_text(value)
        run("mount", "--bind", copy, f"/proc/sys/{name}")


def mount_cgroups() -> None:
    """Mount the hierarchies anew: in this cgroup namespace, the node's own cgroup is their root."""
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    root = Path("/sys/fs/cgroup")
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", root)
    for hierarchy in cgroups.hierarchies(Path("/proc/self/cgroup").read_text()):
        controllers = hierarchy.controllers
        folder = root / controllers.removeprefix("name=")
        folder.mkdir()
        run(
            "mount",
            "-t",
            "cgroup",
            "-o",
            f"none,{controllers}" if "=" in controllers else controllers,
            "cgroup",
            folder,
        )


def set_up_network() -> None:
    """The bridge that pods hang on; the node is its first address."""
    for command in (
        "link set lo up",
        "link add cni0 type bridge",
        f"address add {components.NODE_ADDRESS}/24 dev cni0",
        "link set cni0 up",
        f"route add {components.SERVICE_NETWORK} dev cni0 src {components.NODE_ADDRESS}",
    ):
        run("ip", *command.split())
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if not bridged.exists():
        raise ClusterFailedError("the kernel lacks br_netfilter: Services would not work between pods (modprobe it)")
    bridged.write_text("1")


class Init:
    """The components, and the duties of a process 1."""

    def __init__(self, state: State) -> None:
        self._logs = state.logs
        # Kept whole: a Popen that nobody holds reaps its process by itself.
        self._running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}

    def start(self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        with (self._logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | (environment or {}),
            )
        self._running[process.pid] = (name, process)

    def wait_until(self, condition: Callable[[], bool], *, what: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            self._reap(os.WNOHANG)
            if time.monotonic() > deadline:
                raise ClusterFailedError(f"not within {_START_SECONDS} s: {what}")
            time.sleep(_POLL_SECONDS)

    def reap(self) -> NoReturn:
        """Take in children, also orphans of others, until a component ends."""
        while True:
            self._reap(0)

    def _reap(self, options: int) -> None:
        pid, status = os.waitpid(-1, options)
        if pid in self._running:
            name, _ = self._running[pid]
            log = (self._logs / f"{name}.log").read_text(errors="replace")
            raise ClusterFailedError(f"{name} ended with {os.waitstatus_to_exitcode(status)}:\n{log[-3000:]}")


def start_components(init: Init, state: State, *, memory: Path) -> None:
    binaries = location(parts.CONTAINERD)
    path = os.pathsep.join([str(binaries), os.environ["PATH"], "/usr/sbin", "/sbin"])
    init.start(
        "containerd",
        [str(binaries / "containerd"), "--config", str(state.root / "containerd.toml")],
        environment={"PATH": path},
    )
    etcd = memory / "etcd"
    etcd.mkdir(mode=0o700)
    init.start("etcd", components.etcd(etcd))
    init.start("apiserver", components.node_api_server(state, etcd=components.etcd_url(etcd)))
    # The controller manager gives up on an API server that is not healthy within 10 s.
    api = Api.from_kubeconfig(state.kubeconfig("controller-manager"))
    init.wait_until(api.is_ready, what="API server ready")
    target = f"tcp:{components.NODE_ADDRESS}:{components.API_PORT}"
    init.start("forward", components.forward(source=f"unix:{state.api_socket}", target=target))
    init.start("controller-manager", components.controller_manager(state))
    init.start("scheduler", components.scheduler(state))
    init.wait_until(state.containerd_socket.exists, what="containerd listens")
    # Without its pause image no pod starts; the kubelet must not try before.
    images.load(state, location(parts.PAUSE) / "pause.tar")
    init.start("kubelet", components.kubelet(state))
    init.start("kube-proxy", components.kube_proxy(state))
    init.start("coredns", [str(location(parts.COREDNS) / "coredns"), "-conf", str(state.root / "Corefile")])


def main() -> int:
    state = State(Path(sys.argv[1]))
    memory = state.root / "memory"
    socket.sethostname(components.NODE)
    try:
        mount_file_systems(memory)
        mount_sysctls()
        mount_cgroups()
        set_up_network()
        init = Init(state)
        start_components(init, state, memory=memory)
        init.reap()
    except (ClusterFailedError, CommandFailedError) as error:
        print(error, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
