"""The Valkey server beside the routers, where several of them share handles and the resource names no server."""

from __future__ import annotations

from typing import Any

from kvloop_operator import names
from kvloop_operator.manifests.common import Context, Manifest, metadata, plain
from kvloop_operator.serving import has_own_store

IMAGE = "valkey/valkey:8.1.4"
MAX_BYTES = 419_430_400
"""What all handles may take, where nobody says."""

_USER = 65532
_CONTAINER = "valkey"
_VOLUME = "kvloop-store"
_DIRECTORY = "/etc/valkey"
_SHARE = 2
"""The server's memory is so many times what handles may take: indexes, and what connections and fragments take."""
_MARGIN_BYTES = 134_217_728


def deployment(context: Context) -> Manifest | None:
    """The server. It keeps nothing on disk: handles are worth as much as the memory of the engines that they are of."""
    if not has_own_store(context.spec):
        return None
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(context),
        "spec": {
            "replicas": 1,
            # Two at a time would each know half of the handles.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": names.selector(context.name, names.STORE)},
            "template": {"metadata": {"labels": names.labels(context.name, names.STORE)}, "spec": _pod(context)},
        },
    }


def service(context: Context) -> Manifest | None:
    """Where routers reach it."""
    if not has_own_store(context.spec):
        return None
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(context),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(context.name, names.STORE),
            "ports": [{"name": "valkey", "port": names.STORE_PORT, "targetPort": "valkey", "protocol": "TCP"}],
        },
    }


def router_settings(context: Context) -> dict[str, Any]:
    """``handleStore`` of the router's configuration. What nobody set is left to the router."""
    store = context.spec.router.handle_store
    settings: dict[str, Any] = {"kind": "memory", "maxHandles": store.max_handles}
    if store.max_bytes is not None:
        settings["maxBytes"] = store.max_bytes
    if store.url is None and not has_own_store(context.spec):
        return settings
    namespace = context.resource.metadata.namespace or "default"
    settings |= {
        "kind": "valkey",
        "url": store.url or f"valkey://{names.store_name(context.name)}:{names.STORE_PORT}",
        "name": f"{namespace}/{context.name}",
    }
    if store.url is None:
        settings["passwordFile"] = f"{names.SECRET_DIRECTORY}/{names.STORE_PASSWORD_KEY}"
    elif store.password_secret_ref is not None:
        settings["passwordFile"] = f"{names.STORE_DIRECTORY}/{names.STORE_PASSWORD_KEY}"
    if store.ca_secret_ref is not None:
        settings["caFile"] = f"{names.STORE_DIRECTORY}/{names.STORE_CA_KEY}"
    return settings


def router_volume(context: Context) -> dict[str, Any] | None:
    """What the router has to know of a server that the resource names; None where that is nothing."""
    store = context.spec.router.handle_store
    references = ((store.password_secret_ref, names.STORE_PASSWORD_KEY), (store.ca_secret_ref, names.STORE_CA_KEY))
    sources = [
        {"secret": {"name": reference.name, "items": [{"key": reference.key, "path": path}]}}
        for reference, path in references
        if reference is not None
    ]
    return {"name": _VOLUME, "projected": {"defaultMode": 0o440, "sources": sources}} if sources else None


def server_settings(password: str) -> str:
    """The server's own file of settings, in the Secret: a password among its arguments could be read by others."""
    return f"requirepass {password}\n"


def _metadata(context: Context) -> dict[str, Any]:
    return metadata(context, names.store_name(context.name), names.STORE)


def _pod(context: Context) -> dict[str, Any]:
    router = context.spec.router
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(context)],
        "volumes": [
            {
                "name": _VOLUME,
                "secret": {
                    "secretName": context.facts.secret_name,
                    "defaultMode": 0o440,
                    "items": [{"key": names.STORE_SETTINGS_KEY, "path": names.STORE_SETTINGS_KEY}],
                },
            }
        ],
    }
    optional: dict[str, Any] = {
        "imagePullSecrets": [plain(reference) for reference in context.spec.image_pull_secrets],
        "nodeSelector": dict(router.node_selector),
        "affinity": plain(router.affinity) if router.affinity is not None else {},
        "tolerations": [plain(toleration) for toleration in router.tolerations],
    }
    pod.update({field: value for field, value in optional.items() if value})
    return pod


def _container(context: Context) -> dict[str, Any]:
    store = context.spec.router.handle_store
    server_bytes = _SHARE * (store.max_bytes or MAX_BYTES)
    memory = str(server_bytes + _MARGIN_BYTES)
    return {
        "name": _CONTAINER,
        "image": store.image or IMAGE,
        "command": ["valkey-server"],
        "args": [
            f"{_DIRECTORY}/{names.STORE_SETTINGS_KEY}",
            *("--port", str(names.STORE_PORT)),
            *("--save", ""),
            *("--appendonly", "no"),
            *("--maxmemory", str(server_bytes)),
            # Handles have bounds and ends of their own: one that vanished by itself would be counted for ever.
            *("--maxmemory-policy", "noeviction"),
        ],
        "ports": [{"name": "valkey", "containerPort": names.STORE_PORT, "protocol": "TCP"}],
        "resources": (plain(store.resources) if store.resources is not None else None)
        or {"requests": {"cpu": "250m", "memory": memory}, "limits": {"memory": memory}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": _VOLUME, "mountPath": _DIRECTORY, "readOnly": True}],
        "readinessProbe": _probe(period=2),
        "livenessProbe": _probe(period=10),
    }


def _probe(*, period: int) -> dict[str, Any]:
    return {"tcpSocket": {"port": "valkey"}, "periodSeconds": period, "timeoutSeconds": 3, "failureThreshold": 3}
