"""What an engine's pod needs for its connector: settings; kvloop's package, where a part of it runs in the engine; and
the seal key, for KvloopConnector.

The package comes without another image for the engine: an init container of the router's image copies it to a volume.
Which plug-ins vLLM loads stays as it is: where ``VLLM_PLUGINS`` is set, by the user or the image, kvloop's are added;
where it is not, all that are found are loaded, and the engine itself adds the one that vLLM loads by name only
(``kvloop_connector.engine.allow_leases``).
"""

from __future__ import annotations

import re
from typing import Any

from kvloop_connector.lease_requests import ALLOW_VARIABLE, PLUGIN, WORKER_EXTENSION
from kvloop_connector.settings import (
    VERIFIED_ARGUMENTS,
    Connector,
    Retention,
    Role,
    Verification,
    transfer_config_argument,
)
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import EnginePlugin
from kvloop_operator.manifests.common import Context, init_container
from kvloop_operator.revision import transfer_settings

_CONNECTOR_VOLUME = "kvloop-connector"
_SEAL_VOLUME = "kvloop-seal"
_USER = 65532
_STREAM_PLUGIN = "kvloop_stream_handle"
_WORKER_EXTENSION_FLAG = r"--worker[-_]extension[-_]cls(=.*)?"

# An image may have a PYTHONPATH of its own, which a variable of the container would replace.
_PATH = f'export PYTHONPATH="{names.CONNECTOR_DIRECTORY}${{PYTHONPATH:+:$PYTHONPATH}}"'
# Set but empty it means: none.
_PLUGINS = 'test -z "${{VLLM_PLUGINS+set}}" || export VLLM_PLUGINS="$VLLM_PLUGINS,{added}"'
_RUN = 'exec "$0" "$@"'


def is_kvloops(context: Context) -> bool:
    """Whether the engines run KvloopConnector."""
    return context.facts.connector is Connector.KVLOOP


def has_plugin(context: Context) -> bool:
    """Whether kvloop's package is brought into the engines."""
    return is_kvloops(context) or context.spec.kv_transfer.engine_plugin is EnginePlugin.ENABLED


def has_leases(context: Context, role: Role) -> bool:
    """Whether what engines of ``role`` retain can be released and renewed."""
    return has_plugin(context) and obstacle_to_leases(context, role) is None


def obstacle_to_leases(context: Context, role: Role) -> str | None:
    """Path of the field for which engines of ``role`` with kvloop's plug-in have no leases, or None.

    vLLM takes one worker extension, and the user's own stays. Of several engines behind one server, as they are with
    data parallelism, only the first one's answer is to be had.
    """
    for part, arguments in (("engine", context.spec.engine.args), (role.value, context.role(role).args)):
        for index, argument in enumerate(arguments):
            if re.fullmatch(_WORKER_EXTENSION_FLAG, argument):
                return f"spec.{part}.args[{index}]"
    return f"spec.{role}.dataParallelSize" if context.role(role).data_parallel_size > 1 else None


def streams_carry_handles(context: Context) -> bool:
    """Whether streamed answers carry the handle: by the engine itself, or by the plug-in."""
    engine = context.facts.engine
    if engine is None or engine.stream_handles:
        return engine is not None
    return has_plugin(context) and engine.kvloop_connector


def command(context: Context, role: Role) -> list[str]:
    """What the engine's container runs, before its arguments."""
    if not has_plugin(context):
        return ["vllm"]
    added = [_STREAM_PLUGIN, *([PLUGIN] if has_leases(context, role) else [])]
    script = "; ".join([_PATH, _PLUGINS.format(added=",".join(added)), _RUN])
    return ["sh", "-c", script, "vllm"]


def arguments(context: Context, role: Role) -> list[str]:
    """The last arguments of an engine of ``role``."""
    found = list(VERIFIED_ARGUMENTS) if is_kvloops(context) else []
    if has_leases(context, role):
        found += ["--worker-extension-cls", WORKER_EXTENSION]
    verification = None
    if is_kvloops(context):
        key_file = f"{names.SEAL_DIRECTORY}/{names.SEAL_KEY_KEY}"
        verification = Verification(key_file=key_file, revision=context.revision)
    config = transfer_config_argument(
        transfer_settings(context.resource, context.facts),
        role,
        verification=verification,
        retention=_retention(context),
    )
    return [*found, "--kv-transfer-config", config]


def environment(context: Context, role: Role) -> list[dict[str, Any]]:
    """Variables of an engine of ``role``."""
    return [{"name": ALLOW_VARIABLE, "value": "1"}] if has_leases(context, role) else []


def init_containers(context: Context, role: Role) -> list[dict[str, Any]]:
    """What runs before the engine."""
    if not has_plugin(context):
        return []
    container = init_container(
        names.CONNECTOR_CONTAINER,
        image=_image(context, role),
        pull_policy=context.spec.router.image_pull_policy,
        user=_USER,
        command=["python3", "-m", "kvloop_connector.delivery", names.CONNECTOR_DIRECTORY],
        mounts=[{"name": _CONNECTOR_VOLUME, "mountPath": names.CONNECTOR_DIRECTORY}],
    )
    return [container]


def mounts(context: Context) -> list[dict[str, Any]]:
    """What the engine's container sees of it."""
    found: list[dict[str, Any]] = []
    if has_plugin(context):
        found.append({"name": _CONNECTOR_VOLUME, "mountPath": names.CONNECTOR_DIRECTORY, "readOnly": True})
    if is_kvloops(context):
        found.append({"name": _SEAL_VOLUME, "mountPath": names.SEAL_DIRECTORY, "readOnly": True})
    return found


def volumes(context: Context) -> list[dict[str, Any]]:
    """The volumes of ``mounts``."""
    found: list[dict[str, Any]] = []
    if has_plugin(context):
        found.append({"name": _CONNECTOR_VOLUME, "emptyDir": {"sizeLimit": "16Mi"}})
    if is_kvloops(context):
        items = [{"key": names.SEAL_KEY_KEY, "path": names.SEAL_KEY_KEY}]
        # Nobody knows which user an engine's image runs as.
        secret = {"secretName": context.facts.secret_name, "defaultMode": 0o444, "items": items}
        found.append({"name": _SEAL_VOLUME, "secret": secret})
    return found


def _retention(context: Context) -> Retention:
    transfer = context.spec.kv_transfer
    return Retention(
        longest_lease_seconds=transfer.longest_lease_seconds if has_plugin(context) else None,
        share_limit=transfer.retained_share_limit if is_kvloops(context) else None,
    )


def _image(context: Context, role: Role) -> str:
    """The router's image; but engines are not restarted because another version of kvloop has another one."""
    live = context.facts.live_connectors.get(role)
    if live is not None and live.kv_revision == context.revision:
        return live.image
    return context.facts.router_image
