"""StatefulSet, headless Service and claims of one role's engines."""

from __future__ import annotations

from typing import Any

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import Accelerator, EFAMode, SecurityProfile
from kvloop_operator.facts import EFA_RESOURCE
from kvloop_operator.manifests import connector, tls
from kvloop_operator.manifests.common import Context, Manifest, metadata, plain
from kvloop_operator.manifests.engine_container import (
    CACHE_VOLUME,
    EFA_CLAIM,
    MODEL_VOLUME,
    SHM_VOLUME,
    engine_container,
    grace_seconds,
)
from kvloop_operator.manifests.overlay import merged
from kvloop_operator.manifests.placement import affinity


def statefulset(context: Context, role: Role) -> Manifest:
    """The engines of one role.

    The partition stands above every ordinal: pods that crash come back at the revision they had, and only the rollout
    planner lowers it.
    """
    replicas = context.replicas(role)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(
            context,
            names.engine_name(context.name, role),
            role,
            annotations={names.ANNOTATION_TEMPLATE_VERSION: context.facts.template_version},
        ),
        "spec": {
            "replicas": replicas,
            "serviceName": names.engine_name(context.name, role),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": replicas}},
            "selector": {"matchLabels": names.selector(context.name, role)},
            "template": _with_overlay(context, role),
        },
    }


def service(context: Context, role: Role) -> Manifest:
    """The headless Service that gives engine pods their names. Turns never go through it: each goes to one pod."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(context, names.engine_name(context.name, role), role),
        "spec": {
            "clusterIP": "None",
            "selector": names.selector(context.name, role),
            "ports": [{"name": "http", "port": names.ENGINE_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def efa_claim_template(context: Context, role: Role) -> Manifest:
    """The EFA interfaces of one pod, where they are allocated dynamically."""
    request = {
        "name": "efa",
        "exactly": {
            "deviceClassName": context.spec.network.efa.device_class_name,
            "allocationMode": "ExactCount",
            "count": int(context.facts.role(role).efa_interfaces or 0),
        },
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": metadata(context, f"{names.engine_name(context.name, role)}-efa", role),
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def pod_template(context: Context, role: Role) -> dict[str, Any]:
    """An engine pod, without the user's overlay."""
    labels = {**names.labels(context.name, role), names.LABEL_KV_REVISION: context.revision}
    return {"metadata": {"labels": labels}, "spec": _pod(context, role)}


def _with_overlay(context: Context, role: Role) -> dict[str, Any]:
    template, overlay = pod_template(context, role), context.role(role).pod_template
    return merged(template, plain(overlay)) if overlay is not None else template


def _pod(context: Context, role: Role) -> dict[str, Any]:
    spec, own = context.spec, context.role(role)
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        # Said also where it is the namespace's default one: API servers keep a copy of a name that is only taken away.
        "serviceAccountName": service_account_name(context),
        # A Service called `vllm` would otherwise set VLLM_PORT.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds(context, role),
        "containers": [engine_container(context, role)],
        "volumes": _volumes(context, role),
    }
    optional: dict[str, Any] = {
        "securityContext": None
        if spec.security.profile is SecurityProfile.PRIVILEGED
        else {"seccompProfile": {"type": "RuntimeDefault"}},
        "initContainers": [*tls.init_containers(context), *connector.init_containers(context, role)],
        "imagePullSecrets": [plain(secret) for secret in spec.image_pull_secrets],
        "priorityClassName": spec.priority_class_name,
        "runtimeClassName": spec.runtime_class_name,
        "nodeSelector": dict(own.node_selector),
        "affinity": affinity(context, role),
        "tolerations": _tolerations(context, role),
        "topologySpreadConstraints": [plain(constraint) for constraint in own.topology_spread_constraints],
        "resourceClaims": _claims(context, role),
    }
    pod.update({field: value for field, value in optional.items() if value})
    return pod


def service_account_name(context: Context) -> str:
    """The engines' service account."""
    account = context.spec.service_account
    if account.name is not None:
        return account.name
    return f"{context.name}-engine" if account.create else "default"


def _volumes(context: Context, role: Role) -> list[dict[str, Any]]:
    model = context.spec.model
    shm = context.spec.engine.shared_memory
    if shm is None:
        shm = "2Gi" if context.facts.role(role).accelerator is Accelerator.CPU else "32Gi"
    volumes: list[dict[str, Any]] = [{"name": SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": shm}}]
    if model.source is None:
        volumes.append({"name": CACHE_VOLUME, **_cache(context)})
    elif model.source.pvc is not None:
        claim = {"claimName": model.source.pvc.claim_name, "readOnly": True}
        volumes.append({"name": MODEL_VOLUME, "persistentVolumeClaim": claim})
    volumes += [*connector.volumes(context), *tls.engine_volumes(context)]
    return [*volumes, *(plain(volume) for volume in context.role(role).volumes)]


def _cache(context: Context) -> dict[str, Any]:
    cache = context.spec.model.cache
    if cache.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    if cache.host_path is not None:
        return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {"sizeLimit": cache.size_limit} if cache.size_limit is not None else {}}


def _tolerations(context: Context, role: Role) -> list[dict[str, Any]]:
    facts = context.facts.role(role)
    keys = [facts.device_resource] if facts.device_resource else []
    if facts.efa is not EFAMode.DISABLED:
        keys.append(EFA_RESOURCE)
    own = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]
    return [*own, *(plain(toleration) for toleration in context.role(role).tolerations)]


def _claims(context: Context, role: Role) -> list[dict[str, Any]]:
    if context.facts.role(role).efa is not EFAMode.DRA:
        return []
    template = f"{names.engine_name(context.name, role)}-efa"
    return [{"name": EFA_CLAIM, "resourceClaimTemplateName": template}]
