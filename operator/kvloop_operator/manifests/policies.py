"""Disruption budgets, network policies, monitoring and the engines' service account."""

from __future__ import annotations

from typing import Any

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1.roles import DisruptionBudget
from kvloop_operator.manifests import tls
from kvloop_operator.manifests.common import Context, Manifest, metadata
from kvloop_operator.manifests.engine import service_account_name
from kvloop_operator.serving import has_own_store, router_tls

_NAMESPACE_LABEL = "kubernetes.io/metadata.name"

_FIRST_DATA_PORT = 32768
_LAST_DATA_PORT = 60999
"""Linux's range of ports that a program may get without asking for one; UCX moves KV over TCP through them."""


def engine_service_account(context: Context) -> Manifest | None:
    """The engines' service account; None where it is somebody else's."""
    account = context.spec.service_account
    if not account.create:
        return None
    meta = metadata(context, service_account_name(context), "engine", annotations=dict(account.annotations))
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta, "automountServiceAccountToken": False}


def disruption_budget(context: Context, name: str, role: str, budget: DisruptionBudget) -> Manifest:
    """How many pods of a role a voluntary disruption may take at a time."""
    limit: dict[str, Any] = {"maxUnavailable": 1 if budget.max_unavailable is None else budget.max_unavailable}
    if budget.min_available is not None:
        limit = {"minAvailable": budget.min_available}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(context, name, role),
        "spec": {
            **limit,
            "selector": {"matchLabels": names.selector(context.name, role)},
            # A pod that does not serve holds no turn and no handle: a node may be emptied of it at any time.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def engine_network_policy(context: Context, role: Role) -> Manifest:
    """Turns come from the router; handshakes and KV from the engines of the other role, in both directions."""
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    last_rank = context.role(role).data_parallel_size - 1
    ingress = [
        {"from": [_pods(context, names.ROUTER)], "ports": [_port(names.ENGINE_PORT)]},
        {
            "from": [_pods(context, other)],
            "ports": [
                _port(names.SIDE_CHANNEL_PORT, names.SIDE_CHANNEL_PORT + last_rank),
                _port(_FIRST_DATA_PORT, _LAST_DATA_PORT),
            ],
        },
        *_from_monitoring(context, names.ENGINE_PORT),
    ]
    return _policy(context, names.engine_name(context.name, role), role, ingress)


def router_network_policy(context: Context) -> Manifest:
    """Anybody may call the router; its admin port is for the operator."""
    admin: dict[str, Any] = {"ports": [_port(names.ADMIN_PORT)]}
    if context.facts.operator_namespace is not None:
        admin["from"] = [_namespace(context.facts.operator_namespace)]
    ingress = [{"ports": [_port(names.ROUTER_PORT)]}, admin]
    return _policy(context, names.router_name(context.name), names.ROUTER, ingress)


def store_network_policy(context: Context) -> Manifest | None:
    """Only routers of this resource reach the server in which they share handles."""
    if not has_own_store(context.spec):
        return None
    ingress = [{"from": [_pods(context, names.ROUTER)], "ports": [_port(names.STORE_PORT)]}]
    return _policy(context, names.store_name(context.name), names.STORE, ingress)


def pod_monitor(context: Context, name: str, role: str) -> Manifest:
    """Scraping of a role's pods by the Prometheus operator."""
    monitoring = context.spec.monitoring
    meta = metadata(context, name, role)
    meta["labels"] = {**monitoring.labels, **meta["labels"]}
    endpoint: dict[str, Any] = {"port": "http", "path": "/metrics", "interval": f"{monitoring.interval_seconds}s"}
    if role != names.ROUTER:
        endpoint |= tls.engine_scrape(context)
    elif router_tls(context.spec) is not None:
        # A pod is addressed by its number, which is not in its certificate.
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": meta,
        "spec": {
            "selector": {"matchLabels": names.selector(context.name, role)},
            "podTargetLabels": [names.LABEL_DEPLOYMENT, names.LABEL_ROLE],
            "podMetricsEndpoints": [endpoint],
        },
    }


def _policy(context: Context, name: str, role: str, ingress: list[dict[str, Any]]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(context, name, role),
        "spec": {
            "podSelector": {"matchLabels": names.selector(context.name, role)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _from_monitoring(context: Context, port: int) -> list[dict[str, Any]]:
    namespace = context.spec.monitoring.namespace
    return [] if namespace is None else [{"from": [_namespace(namespace)], "ports": [_port(port)]}]


def _pods(context: Context, role: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": names.selector(context.name, role)}}


def _namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {_NAMESPACE_LABEL: name}}}


def _port(first: int, last: int | None = None) -> dict[str, Any]:
    port: dict[str, Any] = {"protocol": "TCP", "port": first}
    if last is not None and last > first:
        port["endPort"] = last
    return port
