"""helm, the real one: renders charts and, with a kubeconfig, installs them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.cluster import build, parts
from tests.cluster.build import location
from tests.cluster.errors import CommandFailedError
from tests.cluster.paths import REPOSITORY

CHART: Final = REPOSITORY / "charts" / "kvloop"
CRDS_CHART: Final = REPOSITORY / "charts" / "kvloop-crds"
CRD: Final = REPOSITORY / "crds" / "kvloop.io_disaggregatedinferences.yaml"

Manifest = dict[str, Any]
Values = Mapping[str, Any]


def require() -> None:
    """Raise ClusterUnavailableError where helm has not been unpacked yet."""
    build.require([parts.KUBECTL])


@dataclass(frozen=True, slots=True)
class Helm:
    """Runs helm, which keeps its files in `folder`; on a cluster where a kubeconfig is given, in a namespace there."""

    folder: Path
    kubeconfig: Path | None = None
    namespace: str = "kvloop-system"

    def __call__(self, *arguments: str | Path, values: Values | None = None) -> str:
        """Run helm and return what it prints. Raises CommandFailedError, with its message."""
        command = [str(location(parts.KUBECTL) / "helm"), f"--namespace={self.namespace}", *map(str, arguments)]
        if values is not None:
            command.append("--values=-")
        homes = {f"HELM_{kind}_HOME": str(self.folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        # Nothing that the machine is set up for may reach a cluster of somebody else's.
        kubeconfig = {"KUBECONFIG": str(self.kubeconfig) if self.kubeconfig else os.devnull}
        finished = subprocess.run(
            command,
            input="" if values is None else json.dumps(values),
            env=os.environ | homes | kubeconfig,
            text=True,
            capture_output=True,
            check=False,
        )
        if finished.returncode:
            raise CommandFailedError(f"{' '.join(command)}: exit {finished.returncode}\n{finished.stderr.strip()}")
        return finished.stdout

    def render(self, chart: Path, *flags: str, values: Values | None = None, release: str = "kvloop") -> list[Manifest]:
        """The objects of a release, as a cluster without optional APIs would get them."""
        return documents(self("template", release, chart, *flags, values=values or {}))


class _Loader(yaml.CSafeLoader):
    """Refuses a key that is said twice, of which YAML keeps the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if repeated := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"said twice: {repeated}", node.start_mark)
        return super().construct_mapping(node, deep)


# A lone "=" had a meaning in YAML 1.1 that no reader of Kubernetes knows, PyYAML's neither.
_Loader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: str(node.value))


def documents(text: str) -> list[Manifest]:
    """The objects in a stream of YAML documents."""
    return [document for document in yaml.load_all(text, _Loader) if document is not None]


def find(manifests: Sequence[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one object of a kind, or of a kind and a name."""
    (found,) = [
        each for each in manifests if each["kind"] == kind and (name is None or each["metadata"]["name"] == name)
    ]
    return found


def kinds(manifests: Sequence[Manifest]) -> list[str]:
    """The kinds of objects, sorted."""
    return sorted(each["kind"] for each in manifests)


def read_values(chart: Path) -> Manifest:
    """The defaults of a chart."""
    values: Manifest = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    return values
