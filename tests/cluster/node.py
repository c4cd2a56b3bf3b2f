"""A whole one-node cluster in mount, network, process, UTS, IPC and cgroup namespaces of its own.

On the machine itself it leaves two processes (this one's children), one loopback port and a cgroup in each hierarchy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from tests.cluster import cgroups, components, debian, images, parts
from tests.cluster.api import Api
from tests.cluster.build import location
from tests.cluster.control_plane import has_default_account, write_kubeconfigs
from tests.cluster.credentials import Authority, create_tokens
from tests.cluster.errors import ClusterFailedError
from tests.cluster.services import Services
from tests.cluster.state import Ready, State

LABELS: Final = {
    "node.kubernetes.io/instance-type": "p5en.48xlarge",
    "topology.kubernetes.io/zone": "zone-a",
}
EXTENDED_RESOURCES: Final = {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 16}
"""Devices that the node says it has: scheduled on, never used."""


def start(state: State, services: Services) -> Ready:
    """Start the node and wait until it takes pods."""
    authority = Authority(state.keys)
    authority.create()
    authority.issue("apiserver", user="kube-apiserver", hosts=components.API_HOSTS)
    authority.issue("kubelet-client", user="kubelet-client", groups=["system:masters"])
    address = components.NODE_ADDRESS
    authority.issue("kubelet", user=components.NODE, hosts=[f"DNS:{components.NODE}", f"IP:{address}"])
    tokens = create_tokens(state.keys / "tokens.csv")
    write_kubeconfigs(state, tokens, server=f"https://{address}:{components.API_PORT}")
    components.write_audit_policy(state)
    components.write_node_configuration(state, runc=debian.find("runc") or "runc")

    own = cgroups.below_present(f"kvloop-node-{os.getpid()}")
    # First on record, then made: whoever sweeps up knows of all that may be there.
    state.cgroups.write_text("".join(f"{cgroup}\n" for cgroup in own))
    cgroups.create(own)
    unshare = services.start(
        "init",
        [
            debian.find("unshare") or "unshare",
            *("--mount", "--net", "--pid", "--uts", "--ipc", "--cgroup", "--mount-proc", "--fork"),
            # Process 1 of the namespaces ends with unshare, and everything in them with process 1.
            "--kill-child=SIGKILL",
            *(sys.executable, "-m", "tests.cluster.node_init", str(state.root)),
        ],
        before=lambda: cgroups.join(own),
    )
    services.wait_until(state.api_socket.exists, what="API server listens in the node")

    services.start("forward", components.forward(source="tcp:127.0.0.1:0", target=f"unix:{state.api_socket}"))
    services.wait_until(lambda: services.log("forward").read_text().endswith("\n"), what="port forwarded")
    server = f"https://{services.log('forward').read_text().strip()}"
    write_kubeconfigs(state, {"admin": tokens["admin"]}, server=server)
    api = Api.from_kubeconfig(state.kubeconfig("admin"))
    services.wait_until(lambda: _is_ready(api), what="node Ready")
    images.load(state, location(parts.BASE) / "base.tar")
    _describe(api)
    services.wait_until(lambda: _takes_pods(api) and has_default_account(api), what="node takes pods")
    return Ready(server=server, init_pid=_init_process(unshare))


def _node(api: Api) -> Any:
    return api.get(f"/api/v1/nodes/{components.NODE}")


def _is_ready(api: Api) -> bool:
    node = _node(api)
    return node is not None and any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in node["status"]["conditions"]
    )


def _takes_pods(api: Api) -> bool:
    node = _node(api)
    return node is not None and not node["spec"].get("taints")


def _describe(api: Api) -> None:
    """Give the node its labels and devices. The kubelet keeps devices that were patched onto the status."""
    path = f"/api/v1/nodes/{components.NODE}"
    devices = [
        {"op": "add", "path": f"/status/{field}/{resource.replace('/', '~1')}", "value": str(count)}
        for field in ("capacity", "allocatable")
        for resource, count in EXTENDED_RESOURCES.items()
    ]
    labelled = api.patch(path, {"metadata": {"labels": LABELS}}, kind="merge-patch")
    if labelled is None or api.patch(f"{path}/status", devices, kind="json-patch") is None:
        raise ClusterFailedError("the node could not be given its labels and devices")


def _init_process(unshare: int) -> int:
    """The machine's process id of process 1 in the namespaces: unshare's child."""
    for child in Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split():
        if b"tests.cluster.node_init" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise ClusterFailedError("process 1 of the node is not there")
