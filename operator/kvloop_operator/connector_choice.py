"""Which connector the engines get, where the resource leaves it to kvloop: KvloopConnector where its tests ran on a
released vLLM, vLLM's own everywhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvloop_connector.settings import Connector
from kvloop_operator.api.v1alpha1 import ConnectorChoice, DisaggregatedInferenceSpec, EnginePlugin
from kvloop_operator.engine_versions import EngineCapabilities, EngineVersion

BY_DEFAULT: Mapping[str, tuple[EngineVersion, ...]] = {"1": (EngineVersion(0, 32),)}
"""By engine template, the versions on which KvloopConnector is the default. One is added only with a new template: else
a newer operator would restart engines to give them another connector."""

_CONFLICTING = r"(--(prefix[-_]caching[-_]hash[-_]algo|decode[-_]context[-_]parallel[-_]size)|-dcp)([= ].*)?"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The connector, and, where it was left to kvloop and is vLLM's own, why; else nothing."""

    connector: Connector
    because: str = ""


def choose(spec: DisaggregatedInferenceSpec, engine: EngineCapabilities | None, template_version: str) -> Chosen:
    """The connector of the engines of ``spec``, which have this version, None where it is not known."""
    asked = spec.kv_transfer.connector
    if asked is not ConnectorChoice.AUTO:
        return Chosen(Connector(asked.value))
    because = _why_not(spec, engine, template_version)
    return Chosen(Connector.NIXL, because) if because else Chosen(Connector.KVLOOP)


def conflicting_arguments(arguments: Sequence[str]) -> list[int]:
    """Where ``arguments`` have what KvloopConnector sets itself, or was not tried with."""
    return [index for index, argument in enumerate(arguments) if re.fullmatch(_CONFLICTING, argument)]


def _why_not(spec: DisaggregatedInferenceSpec, engine: EngineCapabilities | None, template_version: str) -> str:
    tried = BY_DEFAULT.get(template_version, ())
    if engine is None or engine.version not in tried:
        versions = " and ".join(str(version) for version in tried)
        return f"KvloopConnector is the default with vLLM {versions} only" if tried else "this template has no default"
    if not spec.kv_transfer.bidirectional_kv_xfer:
        return "no KV is read back"
    if spec.kv_transfer.engine_plugin is EnginePlugin.DISABLED:
        return "kvTransfer.enginePlugin is Disabled"
    if conflicting := conflicting_arguments(spec.engine.args):
        return f"engine.args has {spec.engine.args[conflicting[0]].split('=')[0]}"
    if spec.prefill.data_parallel_size > 1 or spec.decode.data_parallel_size > 1:
        return "KvloopConnector was not tried with data parallelism"
    return ""
