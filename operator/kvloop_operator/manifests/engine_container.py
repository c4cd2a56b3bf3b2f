"""The vLLM container of an engine pod."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import Accelerator, EFAMode, SecurityProfile
from kvloop_operator.facts import EFA_RESOURCE
from kvloop_operator.manifests import connector, tls
from kvloop_operator.manifests.common import Context, field_env, plain, secret_env
from kvloop_operator.serving import model_argument, served_name

SHM_VOLUME = "kvloop-shm"
MODEL_VOLUME = "kvloop-model"
CACHE_VOLUME = "kvloop-cache"
EFA_CLAIM = "kvloop-efa"

PRE_STOP_SECONDS = 15
"""How long an engine goes on serving after it was asked to stop, until every router has stopped sending turns to it."""

EXIT_MARGIN_SECONDS = 15
"""Left of the grace period after ``--shutdown-timeout``, for the process to end by itself."""

DRAIN_MARGIN_SECONDS = 60
"""How much longer than the drain a pod's default grace period is."""

_CPU_BLOCK_SIZE = 32


def engine_container(context: Context, role: Role) -> dict[str, Any]:
    """The container of one engine; starts exactly as ``vllm serve`` is started by hand."""
    engine = context.spec.engine
    container: dict[str, Any] = {
        "name": names.ENGINE_CONTAINER,
        "image": engine.image,
        "command": connector.command(context, role),
        "args": _arguments(context, role),
        "env": environment(context, role),
        "ports": _ports(context, role),
        "resources": _resources(context, role),
        "securityContext": _security(context),
        # The status of a pod that ends then says why, as the resource's condition does.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(context, role),
        # The HTTP server starts only when the model is loaded and compiled: until then the startup probe waits.
        "startupProbe": _probe(context, period=2, failures=-(-engine.startup_timeout_seconds // 2)),
        "readinessProbe": _probe(context, period=5, failures=3),
        "livenessProbe": _probe(context, period=10, failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
    }
    if engine.image_pull_policy is not None:
        container["imagePullPolicy"] = engine.image_pull_policy.value
    return container


def grace_seconds(context: Context, role: Role) -> int:
    """From the wish to stop an engine pod to its end."""
    own = context.role(role).termination_grace_period_seconds
    return own if own is not None else context.spec.rollout.drain_timeout_seconds + DRAIN_MARGIN_SECONDS


def environment(context: Context, role: Role) -> list[dict[str, Any]]:
    """kvloop's own variables, then those of both roles, then those of this role; the last of a name wins."""
    variables = [*_own_environment(context, role)]
    variables += [plain(variable) for variable in (*context.spec.engine.env, *context.role(role).env)]
    return list({variable["name"]: variable for variable in variables}.values())


def _arguments(context: Context, role: Role) -> list[str]:
    spec, engine, own = context.spec, context.spec.engine, context.role(role)
    # The last of two equal arguments wins, so that kvloop's own come after the user's.
    arguments = ["serve", model_argument(spec), *engine.args, *own.args]
    arguments += ["--served-model-name", served_name(spec)]
    arguments += ["--host", context.facts.bind_address, "--port", str(names.ENGINE_PORT)]
    arguments += tls.engine_arguments(context)
    if spec.model.revision is not None:
        arguments += ["--revision", spec.model.revision]
    if spec.model.source is not None and spec.model.source.s3 is not None:
        arguments += ["--load-format", "runai_streamer"]
    arguments += ["--dtype", engine.dtype.value]
    block_size = engine.block_size
    if block_size is None and context.facts.role(role).accelerator is Accelerator.CPU:
        block_size = _CPU_BLOCK_SIZE
    for flag, value in (
        ("--block-size", block_size),
        ("--max-model-len", engine.max_model_len),
        ("--kv-cache-dtype", engine.kv_cache_dtype),
    ):
        if value is not None:
            arguments += [flag, str(value)]
    arguments += ["--tensor-parallel-size", str(own.tensor_parallel_size)]
    if own.data_parallel_size > 1:
        arguments += ["--data-parallel-size", str(own.data_parallel_size)]
    arguments.append("--enable-prefix-caching" if own.prefix_caching else "--no-enable-prefix-caching")
    if role is Role.PREFILL:
        # A step still in flight for a request just freed could write into blocks that a remote read is filling.
        arguments.append("--no-async-scheduling")
    arguments += ["--shutdown-timeout", str(grace_seconds(context, role) - PRE_STOP_SECONDS - EXIT_MARGIN_SECONDS)]
    return [*arguments, *connector.arguments(context, role)]


def _own_environment(context: Context, role: Role) -> Iterable[dict[str, Any]]:
    spec = context.spec
    yield field_env("POD_IP", "status.podIP")
    # Both the address that is bound and the one that the other role is told: only the pod's own address works.
    yield field_env("VLLM_NIXL_SIDE_CHANNEL_HOST", "status.podIP")
    yield {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(names.SIDE_CHANNEL_PORT)}
    # vLLM's own limit is ten minutes, less than large weights take to load.
    yield {"name": "VLLM_ENGINE_READY_TIMEOUT_S", "value": str(spec.engine.startup_timeout_seconds)}
    # vLLM closes idle connections after 5 s, under a request that the router is just sending on one.
    yield {"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": "120"}
    if spec.model.source is None:
        yield {"name": "HF_HOME", "value": f"{names.CACHE_DIRECTORY}/huggingface"}
    elif spec.model.source.pvc is not None:
        yield {"name": "HF_HUB_OFFLINE", "value": "1"}
    if spec.model.token_secret_ref is not None:
        yield secret_env("HF_TOKEN", spec.model.token_secret_ref.name, spec.model.token_secret_ref.key)
    yield from _s3_environment(context)
    if context.facts.efa:
        # Without it libfabric falls back to TCP in silence where the devices are missing.
        yield {"name": "FI_PROVIDER", "value": "efa"}
    if context.facts.role(role).accelerator is Accelerator.CPU:
        yield {"name": "UCX_TLS", "value": "tcp,self"}
        yield {"name": "VLLM_CPU_OMP_THREADS_BIND", "value": "nobind"}
    yield from connector.environment(context, role)


def _s3_environment(context: Context) -> Iterable[dict[str, Any]]:
    source = context.spec.model.source
    if source is None or source.s3 is None:
        return
    if source.s3.region is not None:
        yield {"name": "AWS_REGION", "value": source.s3.region}
    if source.s3.endpoint_url is not None:
        yield {"name": "AWS_ENDPOINT_URL", "value": source.s3.endpoint_url}
    if source.s3.credentials_secret_ref is not None:
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            yield secret_env(key, source.s3.credentials_secret_ref.name, key)


def _ports(context: Context, role: Role) -> list[dict[str, Any]]:
    ports: list[dict[str, Any]] = [{"name": "http", "containerPort": names.ENGINE_PORT, "protocol": "TCP"}]
    for rank in range(context.role(role).data_parallel_size):
        ports.append({"name": f"nixl-{rank}", "containerPort": names.SIDE_CHANNEL_PORT + rank, "protocol": "TCP"})
    return ports


def _resources(context: Context, role: Role) -> dict[str, Any]:
    facts, own = context.facts.role(role), context.role(role).resources
    requests, limits = dict(own.requests), dict(own.limits)
    devices = {facts.device_resource: facts.devices} if facts.device_resource else {}
    if facts.efa is EFAMode.DEVICE_PLUGIN and facts.efa_interfaces:
        devices[EFA_RESOURCE] = facts.efa_interfaces
    for resource, count in devices.items():
        # Extended resources cannot be overcommitted: both have to be the same.
        requests[resource] = limits[resource] = int(count)
    resources: dict[str, Any] = {}
    if requests:
        resources["requests"] = requests
    if limits:
        resources["limits"] = limits
    if facts.efa is EFAMode.DRA:
        resources["claims"] = [{"name": EFA_CLAIM}]
    return resources


def _security(context: Context) -> dict[str, Any]:
    profile = context.spec.security.profile
    if profile is None:
        profile = SecurityProfile.IPC_LOCK if context.facts.efa else SecurityProfile.NONE
    if profile is SecurityProfile.PRIVILEGED:
        return {"privileged": True}
    if profile is SecurityProfile.IPC_LOCK:
        return {"allowPrivilegeEscalation": False, "capabilities": {"add": ["IPC_LOCK"]}}
    return {"allowPrivilegeEscalation": False}


def _mounts(context: Context, role: Role) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [{"name": SHM_VOLUME, "mountPath": "/dev/shm"}]  # noqa: S108 (the pod's own)
    source = context.spec.model.source
    if source is None:
        mounts.append({"name": CACHE_VOLUME, "mountPath": names.CACHE_DIRECTORY})
    elif source.pvc is not None:
        mounts.append({"name": MODEL_VOLUME, "mountPath": names.MODELS_DIRECTORY, "readOnly": True})
    mounts += [*connector.mounts(context), *tls.engine_mounts(context)]
    return [*mounts, *(plain(mount) for mount in context.role(role).volume_mounts)]


def _probe(context: Context, *, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/health", "port": "http", **tls.engine_scheme(context)},
        "periodSeconds": period,
        # The answer comes from the process that also tokenizes and writes streams.
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
