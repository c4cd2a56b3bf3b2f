"""Documents of a DisaggregatedInference for tests: a minimal one, and changes to it by path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.desired import desired
from kvloop_operator.facts import Facts, OperatorSettings, resolve
from kvloop_operator.manifests.common import Manifest

TESTS = Path(__file__).parents[2]
RESOURCES = TESTS / "fixtures" / "resources"
EXAMPLES = TESTS.parent / "examples"


def document(**changes: Any) -> dict[str, Any]:
    """A minimal valid document; ``decode__replicas=2`` sets ``spec.decode.replicas``."""
    result: dict[str, Any] = {
        "apiVersion": "kvloop.io/v1alpha1",
        "kind": "DisaggregatedInference",
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"id": "Qwen/Qwen3-32B"},
            "engine": {"image": "my-registry/vllm-efa:v0.33.0"},
            "prefill": {"instanceType": "p5en.48xlarge", "tensorParallelSize": 8},
            "decode": {"instanceType": "p5en.48xlarge", "tensorParallelSize": 8},
        },
    }
    for path, value in changes.items():
        at, steps = result["spec"], path.split("__")
        for step in steps[:-1]:
            at = at.setdefault(step, {})
        at[steps[-1]] = value
    return result


def resource(**changes: Any) -> DisaggregatedInference:
    """``document`` as a resource."""
    return DisaggregatedInference.parse(document(**changes))


def facts_of(parsed: DisaggregatedInference, settings: OperatorSettings | None = None) -> Facts:
    """The facts of a resource in a cluster that has everything."""
    return resolve(parsed, settings or OperatorSettings())


def manifests(settings: OperatorSettings | None = None, **changes: Any) -> list[Manifest]:
    """The children of ``document(**changes)``."""
    parsed = resource(**changes)
    return desired(parsed, facts_of(parsed, settings))


def child(children: list[Manifest], kind: str, name: str) -> Manifest:
    """The one child of this kind and name."""
    (found,) = [each for each in children if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def engine_pod(children: list[Manifest], role: str) -> dict[str, Any]:
    """The pod specification of a role's engines, of the resource ``demo``."""
    spec: dict[str, Any] = child(children, "StatefulSet", f"demo-{role}")["spec"]["template"]["spec"]
    return spec


def engine(children: list[Manifest], role: str) -> dict[str, Any]:
    """The vLLM container of a role's engines, of the resource ``demo``."""
    container: dict[str, Any] = engine_pod(children, role)["containers"][0]
    return container


def argument(container: dict[str, Any], flag: str) -> str:
    """The value after ``flag`` on a container's command line."""
    arguments: list[str] = container["args"]
    return arguments[arguments.index(flag) + 1]


def environment(container: dict[str, Any]) -> dict[str, Any]:
    """A container's environment: the value, or where it comes from, by name."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def read(file: Path) -> Any:
    """The one YAML document of ``file``."""
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def fixtures(kind: str) -> list[Path]:
    """The resource files of one kind: good, bad or stalled."""
    return sorted((RESOURCES / kind).glob("*.yaml"))


def expected_field(file: Path) -> str:
    """The field that the first line of a bad or stalled file names."""
    return file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# field: ")
