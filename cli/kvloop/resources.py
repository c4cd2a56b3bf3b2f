"""Reading resources from files, and everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.api.v1alpha1.faults import shown
from kvloop_operator.check import Note, check, notes
from kvloop_operator.errors import Fault, InvalidResource
from kvloop_operator.facts import Facts, OperatorSettings, resolve


@dataclass(frozen=True, slots=True)
class Loaded:
    """One document of a file: a resource that can be deployed, or what is wrong with it.

    resource, facts: None where ``faults`` is not empty.
    """

    file: Path
    resource: DisaggregatedInference | None
    facts: Facts | None
    faults: tuple[Fault, ...]
    notes: tuple[Note, ...] = ()

    def lines(self) -> list[str]:
        """One line a fault."""
        return [f"{self.file}: {fault}" for fault in self.faults]


class _Loader(yaml.SafeLoader):
    """YAML as Kubernetes reads it: JSON's types only, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"the key {key} stands here twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# A date is text in JSON.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load(file: Path, settings: OperatorSettings) -> list[Loaded]:
    """Every document of ``file``. A file that cannot be read, is no YAML or holds nothing is a fault too."""
    try:
        documents = list(_documents(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        return [_refused(file, Fault("-", shown(str(file)), f"cannot be read: {error}", "check the path"))]
    except yaml.YAMLError as error:
        return [_refused(file, Fault("-", "-", f"not YAML: {' '.join(str(error).split())}", "correct it"))]
    if not documents:
        return [_refused(file, Fault("-", "-", "no document in it", f"write a {names.KIND}"))]
    return [examine(file, document, settings) for document in documents]


def examine(file: Path, document: object, settings: OperatorSettings) -> Loaded:
    """One document, through the models and the checks; ``settings`` are those of the cluster that it is for."""
    if not isinstance(document, dict):
        return _refused(file, Fault("-", shown(document), "not a map", f"write a {names.KIND}"))
    if document.get("kind") != names.KIND:
        kind = document.get("kind")
        fault = Fault("kind", shown(kind) if kind is not None else "(absent)", f"not a {names.KIND}", "remove it")
        return _refused(file, fault)
    try:
        resource = DisaggregatedInference.parse(document)
    except InvalidResource as error:
        return Loaded(file, None, None, error.faults)
    facts = resolve(resource, settings)
    faults = tuple(check(resource, facts))
    if faults:
        return Loaded(file, None, None, faults)
    return Loaded(file, resource, facts, (), tuple(notes(resource, facts)))


def _documents(text: str) -> Iterator[object]:
    for document in yaml.load_all(text, Loader=_Loader):
        if document is not None:
            yield document


def _refused(file: Path, fault: Fault) -> Loaded:
    return Loaded(file, None, None, (fault,))
