"""What the API server cannot know about how KV travels, and who proves and keeps it: checks, as in ``check``."""

from __future__ import annotations

from collections.abc import Iterator

from kvloop_connector.settings import Connector, Role
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.api.v1alpha1.faults import shown
from kvloop_operator.connector_choice import conflicting_arguments
from kvloop_operator.engine_versions import KVLOOP_CONNECTOR
from kvloop_operator.errors import Fault
from kvloop_operator.facts import Facts
from kvloop_operator.manifests import connector
from kvloop_operator.manifests.common import Context


def connector_starts(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """KvloopConnector ends an engine at its start where it was not tried or has nothing to prove."""
    spec = resource.spec
    if facts.connector is not Connector.KVLOOP:
        return
    if facts.engine is not None and not facts.engine.kvloop_connector:
        tried = " and ".join(str(version) for version in KVLOOP_CONNECTOR)
        fault = f"KvloopConnector was tried with vLLM {tried} only"
        value = shown(spec.engine.version or spec.engine.image)
        yield Fault(version_field(resource), value, fault, "use such an image, or kvTransfer.connector NixlConnector")
    if not spec.kv_transfer.bidirectional_kv_xfer:
        fault = "KvloopConnector has nothing to prove where no KV is read back"
        yield Fault("spec.kvTransfer.bidirectionalKvXfer", "false", fault, "remove it, or use NixlConnector")
    for index in conflicting_arguments(spec.engine.args):
        field, fault = f"spec.engine.args[{index}]", "KvloopConnector sets this itself, or was not tried with it"
        yield Fault(field, shown(spec.engine.args[index]), fault, "remove it and its value, or use NixlConnector")


def plugin_works(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Where it was not tried the plug-in does nothing, and what depends on it would be ignored."""
    spec, context = resource.spec.kv_transfer, Context(resource, facts, "")
    if connector.is_kvloops(context):
        return
    if connector.has_plugin(context) and facts.engine is not None and not facts.engine.kvloop_connector:
        tried = " and ".join(str(version) for version in KVLOOP_CONNECTOR)
        fault = f"kvloop's engine plug-in was tried with vLLM {tried} only, and does nothing on {facts.engine.version}"
        yield Fault("spec.kvTransfer.enginePlugin", shown(spec.engine_plugin.value), fault, "remove it")


def leases_are_there(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Without them nothing is ever renewed."""
    longest, context = resource.spec.kv_transfer.longest_lease_seconds, Context(resource, facts, "")
    if longest is None or connector.has_leases(context, Role.DECODE):
        return
    remedy = "remove it, or set kvTransfer.enginePlugin to Enabled"
    if connector.has_plugin(context):
        remedy = f"remove it, or {connector.obstacle_to_leases(context, Role.DECODE)}"
    yield Fault("spec.kvTransfer.longestLeaseSeconds", shown(longest), "nothing is renewed on these engines", remedy)


def handshake_is_checked(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Without it engines that cannot exchange KV do so all the same."""
    key = "enforce_handshake_compat"
    value = resource.spec.kv_transfer.extra_config.get(key)
    if value not in (None, "true"):
        field, fault = f"spec.kvTransfer.extraConfig.{key}", "engines that differ would read one another's KV"
        yield Fault(field, shown(value), fault, "remove it")


def version_field(resource: DisaggregatedInference) -> str:
    """Path of the field that says which vLLM version it is."""
    return "spec.engine.image" if resource.spec.engine.version is None else "spec.engine.version"
