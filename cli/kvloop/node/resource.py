"""A resource for the local node: what the operator would make of it, with facts of this machine instead of a cluster's.

For real engines the resource is first fitted to a CPU; every change is told, none is silent.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvloop import cpu_engine
from kvloop.node.errors import NodeError
from kvloop.node.images import ProcessImage
from kvloop.node.node import engines_path
from kvloop.node.stand_in import EngineEnvironment, EngineKind, real_engine, router, simulated_engine, tiny_model
from kvloop.resources import examine, load
from kvloop_connector.settings import Connector
from kvloop_operator.api.v1alpha1 import ConnectorChoice, DisaggregatedInference
from kvloop_operator.api.v1alpha1.arguments import own_arguments
from kvloop_operator.check import notes
from kvloop_operator.desired import desired
from kvloop_operator.facts import Facts, OperatorSettings, SecretMaterial
from kvloop_operator.manifests.common import Context, plain
from kvloop_operator.manifests.connector import streams_carry_handles

BIND_ADDRESS = "$(POD_IP)"
"""A pod's own address: all pods of this machine share its interfaces."""

_DEFAULT_MODEL_LENGTH = 8192
_CPU_BLOCK_SIZES = range(cpu_engine.BLOCK_SIZE, 1024 + 1, cpu_engine.BLOCK_SIZE)


Settings = Mapping[str, Mapping[str, Any]]
"""Values by part of ``spec`` and field, in wire names."""


class InvalidFile(NodeError):
    """The file holds no single resource that can run here; the message has one line a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDeployment:
    """Everything that a local node needs to run a resource.

    engine_version: vLLM's, as it is told to people.
    notices: what is different from what the file says, one sentence each.
    host_paths: files of this machine that manifests name.
    """

    resource: DisaggregatedInference
    facts: Facts
    engine: EngineKind
    engine_version: str
    manifests: list[dict[str, Any]]
    images: dict[str, ProcessImage]
    notices: tuple[str, ...]
    host_paths: tuple[Path, ...]

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        model = self.resource.spec.model
        return model.served_name or model.id or ""

    def with_settings(self, settings: Settings) -> LocalDeployment:
        """The same deployment and the same secrets, with other values in the resource."""
        resource = DisaggregatedInference.parse(_overlaid(plain(self.resource), settings))
        return replace(self, resource=resource, manifests=desired(resource, self.facts))


def prepare(
    file: Path, *, engine: EngineKind, state_dir: Path, time_scale: float = 1.0, settings: Settings | None = None
) -> LocalDeployment:
    """Read, check and render the one resource in ``file``, with ``settings`` in place of what it says.

    Raises ``InvalidFile``; and ``NoEngineEnvironment`` where real engines are asked for and there are none.
    """
    operator_settings = _operator_settings(state_dir)
    loaded = load(file, operator_settings)
    lines = [line for document in loaded for line in document.lines()]
    if lines:
        raise InvalidFile("\n".join(lines))
    if len(loaded) != 1:
        raise InvalidFile(f"{file}: {len(loaded)} resources; a local node runs one")
    [document] = loaded
    # An empty list of faults means that both are there.
    assert document.resource is not None  # noqa: S101
    assert document.facts is not None  # noqa: S101
    facts = document.facts
    resource = DisaggregatedInference.parse(_overlaid(plain(document.resource), settings or {}))
    if engine is EngineKind.SIM:
        if resource.spec.kv_transfer.connector is ConnectorChoice.KVLOOP:
            fault = "spec.kvTransfer.connector: simulated engines have NixlConnector only"
            raise InvalidFile(f"{file}: {fault}; use it, or --engine vllm")
        facts = replace(facts, connector=Connector.NIXL, connector_because="simulated engines have no other")
        version = told = str(facts.engine.version) if facts.engine is not None else "0.33.0"
        image = simulated_engine(
            state_dir / "bin",
            version=version,
            time_scale=time_scale,
            stream_handles=streams_carry_handles(Context(resource, facts, "")),
        )
        simulated = "engines are SIMULATED: no model runs, texts are made up, times follow a model of timing"
        notices = [simulated, *(str(note) for note in notes(resource, facts))]
        host_paths: tuple[Path, ...] = ()
    else:
        environment = EngineEnvironment.find()
        model = _model_folder(resource) or tiny_model(environment)
        fitted, changes = fit_to_cpu(plain(resource), model=model, version=environment.version)
        again = examine(file, fitted, operator_settings)
        if again.resource is None or again.facts is None:
            raise InvalidFile("\n".join(again.lines()))
        resource, facts = again.resource, _with_plugin(again.facts)
        image = real_engine(environment, state_dir)
        notices = [*changes, "an engine that waits sleeps 1 ms instead of spinning, so that several share few cores"]
        told = environment.version
        if environment.unofficial:
            told += " (unofficial)"
            notices.insert(0, f"engines are UNOFFICIAL: vLLM {environment.version}'s code on parts of another release")
        host_paths = (model,)
    return LocalDeployment(
        resource=resource,
        facts=facts,
        engine=engine,
        engine_version=told,
        manifests=desired(resource, facts),
        images={resource.spec.engine.image: image, facts.router_image: router()},
        notices=tuple(notices),
        host_paths=host_paths,
    )


def fit_to_cpu(document: dict[str, Any], *, model: Path, version: str) -> tuple[dict[str, Any], list[str]]:
    """The resource as real engines on a CPU can run it, and what was changed. ``document`` is left as it is."""
    spec = {**document["spec"]}
    changes = list(_changes(spec, model=model, version=version))
    return {**document, "spec": spec}, changes


def _changes(spec: dict[str, Any], *, model: Path, version: str) -> Iterator[str]:
    own_model = spec["model"]
    served = own_model.get("servedName") or own_model.get("id") or model.name
    engine = spec["engine"] = {**spec["engine"]}
    length = engine.setdefault("maxModelLen", _DEFAULT_MODEL_LENGTH)
    if own_model.get("id") != str(model):
        yield f"the model is {model.name}, with random weights: what it says means nothing"
        if length > _DEFAULT_MODEL_LENGTH:
            length = engine["maxModelLen"] = _DEFAULT_MODEL_LENGTH
            yield f"spec.engine.maxModelLen is {length}: a CPU takes seconds for a thousand tokens"
    spec["model"] = {"id": str(model), "servedName": served}
    wanted = {"version": version, "dtype": "float32"}
    if engine.get("blockSize") not in _CPU_BLOCK_SIZES:
        wanted["blockSize"] = str(cpu_engine.BLOCK_SIZE)
    for key, value in wanted.items():
        if str(engine.get(key)) != value:
            yield f"spec.engine.{key} is {value}, which is what runs on this CPU"
        engine[key] = int(value) if key == "blockSize" else value
    arguments = engine["args"] = list(engine.get("args", []))
    for words in _words(cpu_engine.arguments(max_model_len=length)):
        if not own_arguments(words[:1]) and words[0] not in arguments:
            arguments += words
    transfer = spec["kvTransfer"] = {**spec.get("kvTransfer", {})}
    transfer["extraConfig"] = {**cpu_engine.EXTRA_TRANSFER_CONFIG, **transfer.get("extraConfig", {})}
    network = spec["network"] = {**spec.get("network", {})}
    network["efa"] = {"mode": "Disabled"}
    for name in ("prefill", "decode"):
        role = spec[name] = {**spec.get(name, {})}
        if role.get("accelerator") != "cpu":
            yield f"spec.{name}.accelerator is cpu, with one rank: there is no other here"
        role["accelerator"] = "cpu"
        for key in ("instanceType", "tensorParallelSize", "dataParallelSize", "efaInterfaces", "resources"):
            role.pop(key, None)


def _words(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with its values."""
    words: list[str] = []
    for word in arguments:
        if word.startswith("--") and words:
            yield words
            words = []
        words.append(word)
    if words:
        yield words


def _overlaid(document: dict[str, Any], settings: Settings) -> dict[str, Any]:
    spec = {**document["spec"]}
    for part, values in settings.items():
        spec[part] = {**spec.get(part, {}), **values}
    return {**document, "spec": spec}


def _operator_settings(state_dir: Path) -> OperatorSettings:
    return OperatorSettings(
        bind_address=BIND_ADDRESS,
        discovery="file",
        engines_file=str(engines_path(state_dir)),
        apis=frozenset(),
        secret_material=SecretMaterial(
            admin_token=secrets.token_urlsafe(24), digest_key=secrets.token_hex(32), seal_key=secrets.token_hex(32)
        ),
    )


def _model_folder(resource: DisaggregatedInference) -> Path | None:
    name = resource.spec.model.id
    return Path(name).resolve() if name is not None and Path(name).is_dir() else None


def _with_plugin(facts: Facts) -> Facts:
    """The engine plug-in puts the handle on the streams of engines that leave it out."""
    if facts.engine is None:
        return facts
    return replace(facts, engine=replace(facts.engine, stream_handles=True))
