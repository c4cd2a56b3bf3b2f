"""Command lines and configuration files of the cluster's components. Pure but for `write_*`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.cluster import parts
from tests.cluster.build import location
from tests.cluster.state import State

NODE: Final = "node1"
NODE_ADDRESS: Final = "10.244.0.1"
POD_NETWORK: Final = "10.244.0.0/24"
SERVICE_NETWORK: Final = "10.96.0.0/16"
API_SERVICE: Final = "10.96.0.1"
API_PORT: Final = 6443

API_HOSTS: Final = (
    "DNS:localhost",
    *(f"DNS:kubernetes{suffix}" for suffix in ("", ".default", ".default.svc", ".default.svc.cluster.local")),
    *(f"IP:{address}" for address in ("127.0.0.1", NODE_ADDRESS, API_SERVICE)),
)


def kubernetes(*arguments: str) -> list[str]:
    """The command of one part of the multi-call binary."""
    return [str(location(parts.KUBERNETES) / "kubernetes"), *arguments]


def etcd(data: Path) -> list[str]:
    return kubernetes("etcd", f"--data-dir={data}")


def etcd_url(data: Path) -> str:
    return f"unix://{data}/client.sock"


def api_server(state: State, *, etcd: str, bind: str, port: int) -> list[str]:
    keys = state.keys
    return kubernetes(
        "kube-apiserver",
        f"--etcd-servers={etcd}",
        f"--bind-address={bind}",
        f"--secure-port={port}",
        f"--cert-dir={state.root / 'certificates'}",
        f"--tls-cert-file={keys / 'apiserver.crt'}",
        f"--tls-private-key-file={keys / 'apiserver.key'}",
        f"--client-ca-file={keys / 'ca.crt'}",
        f"--token-auth-file={keys / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={keys / 'service-account.pub'}",
        f"--service-account-signing-key-file={keys / 'service-account.key'}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--audit-policy-file={state.root / 'audit-policy.json'}",
        f"--audit-log-path={state.audit_log}",
        # Written with the request, not some time after it.
        "--audit-log-mode=blocking",
        # In one file, however long (MiB).
        "--audit-log-maxsize=100000",
        "--allow-privileged=true",
    )


def node_api_server(state: State, *, etcd: str) -> list[str]:
    """The API server inside the node's namespaces, which also talks to the kubelet."""
    return [
        *api_server(state, etcd=etcd, bind="0.0.0.0", port=API_PORT),
        f"--advertise-address={NODE_ADDRESS}",
        f"--kubelet-client-certificate={state.keys / 'kubelet-client.crt'}",
        f"--kubelet-client-key={state.keys / 'kubelet-client.key'}",
        f"--kubelet-certificate-authority={state.keys / 'ca.crt'}",
        "--kubelet-preferred-address-types=InternalIP",
    ]


def controller_manager(state: State) -> list[str]:
    return kubernetes(
        "kube-controller-manager",
        f"--kubeconfig={state.kubeconfig('controller-manager')}",
        "--secure-port=0",
        "--leader-elect=false",
        f"--service-account-private-key-file={state.keys / 'service-account.key'}",
        f"--root-ca-file={state.keys / 'ca.crt'}",
        f"--cluster-cidr={POD_NETWORK}",
        "--allocate-node-cidrs=false",
        # A node that just joined loses its not-ready taint within this time.
        "--node-monitor-period=1s",
    )


def scheduler(state: State) -> list[str]:
    return kubernetes(
        "kube-scheduler", f"--kubeconfig={state.kubeconfig('scheduler')}", "--secure-port=0", "--leader-elect=false"
    )


def forward(*, source: str, target: str) -> list[str]:
    """Forwards connections; its first line of output is the address it listens on."""
    return kubernetes("forward", f"--from={source}", f"--to={target}")


def kubelet(state: State) -> list[str]:
    return kubernetes(
        "kubelet",
        f"--config={state.root / 'kubelet.json'}",
        f"--kubeconfig={state.kubeconfig('kubelet')}",
        f"--hostname-override={NODE}",
        f"--node-ip={NODE_ADDRESS}",
        f"--tls-cert-file={state.keys / 'kubelet.crt'}",
        f"--tls-private-key-file={state.keys / 'kubelet.key'}",
    )


def kube_proxy(state: State) -> list[str]:
    return kubernetes("kube-proxy", f"--config={state.root / 'kube-proxy.json'}")


def write_audit_policy(state: State) -> None:
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata"}],
    }
    _write(state.root / "audit-policy.json", policy)


def write_node_configuration(state: State, *, runc: str) -> None:
    """Write the configuration files of kubelet, kube-proxy, containerd, the pod network and DNS."""
    _write(state.root / "kubelet.json", _kubelet_configuration(state))
    _write(
        state.root / "kube-proxy.json",
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(state.kubeconfig("proxy"))},
            "mode": "nftables",
            "clusterCIDR": POD_NETWORK,
            "hostnameOverride": NODE,
            # Zero leaves the machine-wide limits alone.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        },
    )
    _write(
        state.root / "cni" / "10-pods.conflist",
        {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/run/cni-addresses",
                        "ranges": [[{"subnet": POD_NETWORK}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        },
    )
    (state.root / "containerd.toml").write_text(_containerd_configuration(state, runc=runc))
    (state.root / "Corefile").write_text(
        f"""\
. {{
  bind {NODE_ADDRESS}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {state.kubeconfig("dns")}
    pods verified
    ttl 1
  }}
}}
"""
    )


def _kubelet_configuration(state: State) -> Mapping[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": f"unix://{state.containerd_socket}",
        # Root without CAP_SYS_RESOURCE may only raise it.
        "oomScoreAdj": 0,
        "failSwapOn": False,
        "clusterDomain": "cluster.local",
        "clusterDNS": [NODE_ADDRESS],
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(state.keys / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "address": "0.0.0.0",  # in the node's own network namespace
        "volumePluginDir": str(state.root / "volume-plugins"),
        # The machine's disk is not the test's business.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
        "podPidsLimit": 4096,
        "registryPullQPS": 0,
        "serializeImagePulls": False,
    }


def _containerd_configuration(state: State, *, runc: str) -> str:
    return f"""\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.internal.v1.tracing",
  "io.containerd.nri.v1.nri",
  "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
address = "{state.containerd_socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "/var/lib/containerd-opt"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{parts.PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
# Root without CAP_SYS_RESOURCE may only raise oom_score_adj.
restrict_oom_score_adj = true
disable_apparmor = true
enable_selinux = false
disable_hugetlb_controller = true
tolerate_missing_hugetlb_controller = true
enable_unprivileged_ports = true
enable_unprivileged_icmp = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{location(parts.CNI)}"]
conf_dir = "{state.root / "cni"}"

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{runc}"
SystemdCgroup = false
"""


def _write(path: Path, document: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1))
