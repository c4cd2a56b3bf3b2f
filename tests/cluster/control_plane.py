"""etcd, API server, controller manager and scheduler as plain processes: for tests that need no running pod.

Needs no root. Also what the control plane and the node have in common.
"""

from __future__ import annotations

import socket

from tests.cluster import components
from tests.cluster.api import Api
from tests.cluster.credentials import Authority, create_tokens, encoded, write_kubeconfig
from tests.cluster.services import Services
from tests.cluster.state import Ready, State


def start(state: State, services: Services) -> Ready:
    """Start a control plane on a free loopback port and wait until its controllers work."""
    authority = Authority(state.keys)
    authority.create()
    authority.issue("apiserver", user="kube-apiserver", hosts=components.API_HOSTS)
    tokens = create_tokens(state.keys / "tokens.csv")
    components.write_audit_policy(state)

    data = state.root / "etcd"
    data.mkdir(mode=0o700)
    # Bound and never listened on: it keeps the port ours, and the API server shares it.
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        server = f"https://127.0.0.1:{port}"
        write_kubeconfigs(state, tokens, server=server)
        api = Api.from_kubeconfig(state.kubeconfig("admin"))

        services.start("etcd", components.etcd(data))
        services.start(
            "apiserver",
            [
                *components.api_server(state, etcd=components.etcd_url(data), bind="127.0.0.1", port=port),
                "--permit-port-sharing=true",
                # Without pods nobody looks for the API server inside the cluster.
                "--endpoint-reconciler-type=none",
            ],
        )
        services.wait_until(api.is_ready, what="API server ready")
    services.start("controller-manager", components.controller_manager(state))
    services.start("scheduler", components.scheduler(state))
    services.wait_until(lambda: has_default_account(api), what="controllers at work")
    return Ready(server=server, init_pid=None)


def write_kubeconfigs(state: State, tokens: dict[str, str], *, server: str) -> None:
    """Write a kubeconfig for the administrator and for each component."""
    cluster: dict[str, object] = {"server": server, "certificate-authority-data": encoded(state.keys / "ca.crt")}
    for identity, token in tokens.items():
        write_kubeconfig(state.kubeconfig(identity), cluster=cluster, user={"token": token})


def has_default_account(api: Api) -> bool:
    """Whether pods can be made in the default namespace; the controllers do that last."""
    return api.get("/api/v1/namespaces/default/serviceaccounts/default") is not None
