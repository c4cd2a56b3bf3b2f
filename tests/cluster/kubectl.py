"""kubectl, the real one, for one identity on one cluster."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import parts
from tests.cluster.build import location
from tests.cluster.errors import CommandFailedError
from tests.cluster.waiting import DEADLINE_SECONDS

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Runs kubectl with one kubeconfig, in one namespace where `namespace` is given."""

    kubeconfig: Path
    namespace: str | None = None

    def __call__(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Run kubectl and return what it prints. Raises CommandFailedError, with its message."""
        command = [str(location(parts.KUBECTL) / "kubectl"), f"--kubeconfig={self.kubeconfig}"]
        if self.namespace is not None:
            command.append(f"--namespace={self.namespace}")
        command += map(str, arguments)
        finished = subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            # Discovery is cached, but not in the home folder, where it would outlive the cluster.
            env=os.environ | {"KUBECACHEDIR": str(self.kubeconfig.with_name("cache"))},
            text=True,
            capture_output=True,
            check=False,
        )
        if finished.returncode:
            raise CommandFailedError(f"{' '.join(command)}: exit {finished.returncode}\n{finished.stderr.strip()}")
        return finished.stdout

    def json(self, *arguments: str) -> Any:
        """Run kubectl with `--output=json` and return the parsed answer."""
        return json.loads(self(*arguments, "--output=json"))

    def apply(self, *manifests: Manifest, server_side: bool = False) -> None:
        """Apply objects, in order."""
        items = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self("apply", "--filename=-", *(["--server-side"] if server_side else []), stdin=items)

    def get(self, kind: str, name: str) -> Any:
        """One object."""
        return self.json("get", kind, name)

    def list(self, kind: str, *, selector: str = "") -> Sequence[Any]:
        """The objects of a kind, by label selector."""
        items: Sequence[Any] = self.json("get", kind, f"--selector={selector}")["items"]
        return items

    def wait(
        self,
        condition: str,
        *names: str,
    ) -> None:
        """Wait for a state: `condition` as in `kubectl wait --for`, `names` as `kind/name`."""
        self("wait", f"--for={condition}", f"--timeout={DEADLINE_SECONDS}s", *names)
