"""The router: Deployment, Service, access to the API server, configuration and Secret."""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import sha256
from typing import Any

import yaml

from kvloop_connector.settings import HANDLE_TTL_MARGIN_SECONDS, Role
from kvloop_operator import names
from kvloop_operator.manifests import connector, handle_store, tls
from kvloop_operator.manifests.common import Context, Manifest, field_env, metadata, plain, restricted_pod
from kvloop_operator.manifests.overlay import merged
from kvloop_operator.serving import has_own_store, model_argument, router_tls, served_name

_CONFIG_VOLUME = "kvloop-config"
_ENGINES_VOLUME = "kvloop-engines"
_API_KEYS_VOLUME = "kvloop-api-keys"
_TEMPORARY_VOLUME = "kvloop-tmp"
_USER = 65532
_EXIT_MARGIN_SECONDS = 30
_PRE_STOP_SECONDS = 5
"""How long the proxies of Services may take to send nothing more to a pod that ends. A router that was told to stop
refuses new turns."""


def router_config(context: Context) -> dict[str, Any]:
    """The contents of ``router.yaml``; the router's own models refuse anything else."""
    spec, router, engine = context.spec, context.spec.router, context.facts.engine
    transfer = spec.kv_transfer
    ttl = router.handle_ttl_seconds
    if ttl is None:
        ttl = transfer.decoder_kv_blocks_ttl_seconds - HANDLE_TTL_MARGIN_SECONDS
    limits = {
        "longestLeaseSeconds": transfer.longest_lease_seconds,
        "retainedShareLimit": transfer.retained_share_limit,
    }
    return {
        "listen": {"host": context.facts.bind_address, "port": names.ROUTER_PORT, **tls.router_listen(context)},
        "admin": {
            "host": context.facts.bind_address,
            "port": names.ADMIN_PORT,
            "tokenFile": f"{names.SECRET_DIRECTORY}/{names.ADMIN_TOKEN_KEY}",
        },
        "workers": router.workers,
        "model": {"id": spec.model.id or model_argument(spec), "servedName": served_name(spec)},
        "discovery": _discovery(context),
        "digestKeyFile": f"{names.SECRET_DIRECTORY}/{names.DIGEST_KEY_KEY}",
        "handleTtlSeconds": ttl,
        "kvTransfer": {
            "connector": context.facts.connector.value,
            "bidirectionalKvXfer": transfer.bidirectional_kv_xfer,
            "kvRecomputeThreshold": transfer.kv_recompute_threshold,
            "decoderKvBlocksTtlSeconds": transfer.decoder_kv_blocks_ttl_seconds,
            **_set(**limits),
        },
        # Which engines can, the router asks them itself.
        "leases": {"renew": True},
        "engine": {
            "promptTokenIds": engine.prompt_token_ids if engine else False,
            "streamHandles": connector.streams_carry_handles(context),
            "multiGroupReuse": engine.multi_group_reuse if engine else False,
        },
        "cacheSalt": router.cache_salt,
        "sessionHeaders": list(router.session_headers),
        "limits": {
            "bodyBytes": router.limits.body_bytes,
            "turnsPerEngine": router.limits.turns_per_engine,
            "waitingTurnsPerEngine": router.limits.waiting_turns_per_engine,
            **_set(concurrentRequestsPerTenant=router.limits.concurrent_requests_per_tenant),
        },
        "timeouts": {
            **_set(keepAliveSeconds=router.timeouts.keep_alive_seconds),
            "connectSeconds": router.timeouts.connect_seconds,
            "prefillSeconds": router.timeouts.prefill_seconds,
            "decodeSeconds": router.timeouts.decode_seconds,
            "decodeStallSeconds": router.timeouts.decode_stall_seconds,
            "drainSeconds": spec.rollout.drain_timeout_seconds,
        },
        "healthChecks": router.health_checks.model_dump(by_alias=True),
        "handleStore": handle_store.router_settings(context),
        "canary": {"enabled": router.canary.enabled},
        "truthSampling": {
            "everyNthWarmTurn": router.truth_sampling.every_nth_warm_turn,
            "leastToleranceNats": router.truth_sampling.least_tolerance_nats,
        },
        "templateProbe": {"enabled": True},
        "tracing": _tracing(context),
        "pathChoice": {
            "mode": router.path_choice.mode.value,
            "decodeDelayWeight": router.path_choice.decode_delay_weight,
        },
        "reuse": router.reuse,
        # Else nobody would be there to tell clients when to come back.
        "suspended": any(context.replicas(role) == 0 for role in Role),
        "apiKeysFile": _api_keys_file(context),
        "engineTls": tls.router_engines(context),
    }


def config_map(context: Context) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(context),
        "data": {names.ROUTER_CONFIG_KEY: _config_text(context)},
    }


def secret(context: Context) -> Manifest | None:
    """The resource's Secret; None where somebody else keeps it. The seal key is always in it: engines that are replaced
    one after the other need it on their way from one connector to the other."""
    material = context.facts.secret_material
    if material is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(context),
        "type": "Opaque",
        "stringData": {
            names.ADMIN_TOKEN_KEY: material.admin_token,
            names.DIGEST_KEY_KEY: material.digest_key,
            names.SEAL_KEY_KEY: material.seal_key,
            **_of_own_store(context, material.store_password),
        },
    }


def _of_own_store(context: Context, password: str) -> dict[str, str]:
    if not has_own_store(context.spec):
        return {}
    settings = handle_store.server_settings(password)
    return {names.STORE_PASSWORD_KEY: password, names.STORE_SETTINGS_KEY: settings}


def service_account(context: Context) -> Manifest:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(context)}


def role(context: Context) -> Manifest:
    """All that the router may do: see pods of its namespace."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": _metadata(context),
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
    }


def role_binding(context: Context) -> Manifest:
    name = names.router_name(context.name)
    subject: dict[str, Any] = {"kind": "ServiceAccount", "name": name}
    if context.resource.metadata.namespace is not None:
        subject["namespace"] = context.resource.metadata.namespace
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(context),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [subject],
    }


def service(context: Context) -> Manifest:
    """Where clients call."""
    own = context.spec.router.service
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(context, names.router_name(context.name), names.ROUTER, annotations=dict(own.annotations)),
        "spec": {
            "type": own.type.value,
            "selector": names.selector(context.name, names.ROUTER),
            "ports": [
                {
                    "name": "https" if router_tls(context.spec) else "http",
                    "port": own.port,
                    "targetPort": "http",
                    "protocol": "TCP",
                }
            ],
        },
    }


def deployment(context: Context) -> Manifest:
    router = context.spec.router
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(context),
        "spec": {
            "replicas": router.replicas,
            # One more before one less: clients always find a router.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": names.selector(context.name, names.ROUTER)},
            "template": _with_overlay(context),
        },
    }


def _metadata(context: Context) -> dict[str, Any]:
    return metadata(context, names.router_name(context.name), names.ROUTER)


def _config_text(context: Context) -> str:
    return _as_yaml(json.dumps(router_config(context)))


@lru_cache(maxsize=4096)
def _as_yaml(document: str) -> str:
    # Most of the time of a pass over a resource went into writing the same text again.
    return yaml.safe_dump(json.loads(document), sort_keys=False)


def _asks_api_server(context: Context) -> bool:
    return context.facts.discovery == "kubernetes"


def _discovery(context: Context) -> dict[str, Any]:
    # The namespace is that of the router's own pod.
    if _asks_api_server(context):
        return {"kubernetes": {"deployment": context.name}}
    return {"file": context.facts.engines_file}


def _tracing(context: Context) -> dict[str, Any] | None:
    tracing = context.spec.router.tracing
    return None if tracing is None else {"endpoint": tracing.endpoint, "sampleRatio": tracing.sample_ratio}


def _set(**settings: Any) -> dict[str, Any]:
    """What nobody set is left to the router."""
    return {field: value for field, value in settings.items() if value is not None}


def _api_keys_file(context: Context) -> str | None:
    reference = context.spec.router.api_keys_secret_ref
    return None if reference is None else f"{names.API_KEYS_DIRECTORY}/{reference.key}"


def pod_template(context: Context) -> dict[str, Any]:
    """A router pod, without the user's overlay."""
    # The router reads its configuration at the start: a change has to make new pods.
    config_hash = sha256(_config_text(context).encode()).hexdigest()[:10]
    return {
        "metadata": {
            "labels": names.labels(context.name, names.ROUTER),
            "annotations": {names.ANNOTATION_CONFIG_HASH: config_hash},
        },
        "spec": _pod(context),
    }


def _with_overlay(context: Context) -> dict[str, Any]:
    template, overlay = pod_template(context), context.spec.router.pod_template
    return merged(template, plain(overlay)) if overlay is not None else template


def _pod(context: Context) -> dict[str, Any]:
    spec, router = context.spec, context.spec.router
    pod: dict[str, Any] = {
        "serviceAccountName": names.router_name(context.name),
        "automountServiceAccountToken": _asks_api_server(context),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.rollout.drain_timeout_seconds + _EXIT_MARGIN_SECONDS,
        "securityContext": restricted_pod(_USER),
        "containers": [_container(context)],
        "volumes": _volumes(context),
    }
    optional: dict[str, Any] = {
        "imagePullSecrets": [plain(reference) for reference in spec.image_pull_secrets],
        "nodeSelector": dict(router.node_selector),
        "affinity": plain(router.affinity) if router.affinity is not None else {},
        "tolerations": [plain(toleration) for toleration in router.tolerations],
        "topologySpreadConstraints": [plain(constraint) for constraint in router.topology_spread_constraints],
    }
    pod.update({field: value for field, value in optional.items() if value})
    return pod


def _container(context: Context) -> dict[str, Any]:
    router = context.spec.router
    container: dict[str, Any] = {
        "name": names.ROUTER_CONTAINER,
        "image": context.facts.router_image,
        "command": ["kvloop-router"],
        "args": ["--config", f"{names.ROUTER_CONFIG_DIRECTORY}/{names.ROUTER_CONFIG_KEY}"],
        "env": [
            field_env("POD_IP", "status.podIP"),
            field_env("POD_NAME", "metadata.name"),
            field_env("POD_NAMESPACE", "metadata.namespace"),
        ],
        "ports": [
            {"name": "http", "containerPort": names.ROUTER_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": names.ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": plain(router.resources) or _resources(router.workers),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(context),
        "startupProbe": _probe(context, "/healthz", period=1, failures=120),
        "readinessProbe": _probe(context, "/readyz", period=2, failures=3),
        "livenessProbe": _probe(context, "/healthz", period=10, failures=3),
    }
    if _asks_api_server(context):
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}}
    if router.image_pull_policy is not None:
        container["imagePullPolicy"] = router.image_pull_policy.value
    return container


def _resources(workers: int) -> dict[str, Any]:
    return {"requests": {"cpu": f"{500 * workers}m", "memory": f"{512 * workers}Mi"}}


def _mounts(context: Context) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": _CONFIG_VOLUME, "mountPath": names.ROUTER_CONFIG_DIRECTORY, "readOnly": True},
        {"name": _TEMPORARY_VOLUME, "mountPath": "/tmp"},  # noqa: S108 (the pod's own)
    ]
    if not _asks_api_server(context):
        mounts.append({"name": _ENGINES_VOLUME, "mountPath": names.ENGINES_DIRECTORY})
    if context.spec.router.api_keys_secret_ref is not None:
        mounts.append({"name": _API_KEYS_VOLUME, "mountPath": names.API_KEYS_DIRECTORY, "readOnly": True})
    volume = handle_store.router_volume(context)
    if volume is not None:
        mounts.append({"name": volume["name"], "mountPath": names.STORE_DIRECTORY, "readOnly": True})
    return [*mounts, *tls.router_mounts(context)]


def _volumes(context: Context) -> list[dict[str, Any]]:
    name = names.router_name(context.name)
    directory = names.SECRET_DIRECTORY.removeprefix(f"{names.ROUTER_CONFIG_DIRECTORY}/")
    own = (names.STORE_PASSWORD_KEY,) if has_own_store(context.spec) else ()
    keys = (names.ADMIN_TOKEN_KEY, names.DIGEST_KEY_KEY, *own)
    secrets = [{"key": key, "path": f"{directory}/{key}"} for key in keys]
    config = [{"key": names.ROUTER_CONFIG_KEY, "path": names.ROUTER_CONFIG_KEY}]
    volumes: list[dict[str, Any]] = [
        {
            "name": _CONFIG_VOLUME,
            # One volume for both: a Secret cannot be mounted below a ConfigMap, which is read-only.
            "projected": {
                "defaultMode": 0o440,
                "sources": [
                    {"configMap": {"name": name, "items": config}},
                    {"secret": {"name": context.facts.secret_name, "items": secrets}},
                ],
            },
        },
        {"name": _TEMPORARY_VOLUME, "emptyDir": {}},
    ]
    if not _asks_api_server(context):
        volumes.append({"name": _ENGINES_VOLUME, "emptyDir": {}})
    reference = context.spec.router.api_keys_secret_ref
    if reference is not None:
        items = [{"key": reference.key, "path": reference.key}]
        volumes.append(
            {"name": _API_KEYS_VOLUME, "secret": {"secretName": reference.name, "defaultMode": 0o440, "items": items}}
        )
    store = handle_store.router_volume(context)
    if store is not None:
        volumes.append(store)
    return [*volumes, *tls.router_volumes(context)]


def _probe(context: Context, path: str, *, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http", **({"scheme": "HTTPS"} if router_tls(context.spec) else {})},
        "periodSeconds": period,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }
