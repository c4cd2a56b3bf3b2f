"""What an engine's pod needs for its connector: settings, and, for KvloopConnector, the package and the seal key.

The package comes without another image for the engine: an init container of the router's image copies it to a volume.
VLLM_PLUGINS stays as the user has it: unset, vLLM loads every plug-in that it finds, its platform's and kvloop's; set
to kvloop's, it would hide the platform's, whose names only the image knows.
"""

from __future__ import annotations

from typing import Any

from kvloop_connector.settings import VERIFIED_ARGUMENTS, Connector, Role, Verification, transfer_config_argument
from kvloop_operator import names
from kvloop_operator.manifests.common import Context
from kvloop_operator.revision import transfer_settings

_CONNECTOR_VOLUME = "kvloop-connector"
_SEAL_VOLUME = "kvloop-seal"
_USER = 65532
_PLUG_IN = "kvloop_stream_handle"

# An image may have a PYTHONPATH of its own, which a variable of the container would replace.
_SCRIPT = f'export PYTHONPATH="{names.CONNECTOR_DIRECTORY}${{PYTHONPATH:+:$PYTHONPATH}}"; exec "$0" "$@"'


def is_kvloops(context: Context) -> bool:
    """Whether the engines run KvloopConnector."""
    return context.spec.kv_transfer.connector is Connector.KVLOOP


def streams_carry_handles(context: Context) -> bool:
    """Whether streamed answers carry the handle: by the engine itself, or by the plug-in that comes with it."""
    engine = context.facts.engine
    if engine is None or engine.stream_handles:
        return engine is not None
    variables = [*context.spec.engine.env, *context.spec.decode.env]
    filters = [variable.value or "" for variable in variables if variable.name == "VLLM_PLUGINS"]
    loaded = not filters or _PLUG_IN in filters[-1].split(",")
    return is_kvloops(context) and engine.kvloop_connector and loaded


def command(context: Context) -> list[str]:
    """What the engine's container runs, before its arguments."""
    return ["sh", "-c", _SCRIPT, "vllm"] if is_kvloops(context) else ["vllm"]


def arguments(context: Context, role: Role) -> list[str]:
    """The last arguments of an engine of ``role``."""
    settings = transfer_settings(context.resource, context.facts)
    if not is_kvloops(context):
        return ["--kv-transfer-config", transfer_config_argument(settings, role)]
    key_file = f"{names.SEAL_DIRECTORY}/{names.SEAL_KEY_KEY}"
    verification = Verification(key_file=key_file, revision=context.revision)
    config = transfer_config_argument(settings, role, verification=verification)
    return [*VERIFIED_ARGUMENTS, "--kv-transfer-config", config]


def init_containers(context: Context, role: Role) -> list[dict[str, Any]]:
    """What runs before the engine."""
    if not is_kvloops(context):
        return []
    # As much as it may use, so that the pod's class of service is the engine's.
    resources = {"cpu": "100m", "memory": "128Mi"}
    container: dict[str, Any] = {
        "name": names.CONNECTOR_CONTAINER,
        "image": _image(context, role),
        "command": ["python3", "-m", "kvloop_connector.delivery", names.CONNECTOR_DIRECTORY],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": _CONNECTOR_VOLUME, "mountPath": names.CONNECTOR_DIRECTORY}],
    }
    if context.spec.router.image_pull_policy is not None:
        container["imagePullPolicy"] = context.spec.router.image_pull_policy.value
    return [container]


def mounts(context: Context) -> list[dict[str, Any]]:
    """What the engine's container sees of it."""
    if not is_kvloops(context):
        return []
    return [
        {"name": _CONNECTOR_VOLUME, "mountPath": names.CONNECTOR_DIRECTORY, "readOnly": True},
        {"name": _SEAL_VOLUME, "mountPath": names.SEAL_DIRECTORY, "readOnly": True},
    ]


def volumes(context: Context) -> list[dict[str, Any]]:
    """The volumes of ``mounts``."""
    if not is_kvloops(context):
        return []
    items = [{"key": names.SEAL_KEY_KEY, "path": names.SEAL_KEY_KEY}]
    # Nobody knows which user an engine's image runs as.
    secret = {"secretName": context.facts.secret_name, "defaultMode": 0o444, "items": items}
    return [
        {"name": _CONNECTOR_VOLUME, "emptyDir": {"sizeLimit": "16Mi"}},
        {"name": _SEAL_VOLUME, "secret": secret},
    ]


def _image(context: Context, role: Role) -> str:
    """The router's image; but engines are not restarted because another version of kvloop has another one."""
    live = context.facts.live_connectors.get(role)
    if live is not None and live.kv_revision == context.revision:
        return live.image
    return context.facts.router_image
