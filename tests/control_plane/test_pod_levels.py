"""Which pod-security level admits which pods, by the real admission: docs/install.md tells people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.desired import desired
from kvloop_operator.facts import OperatorSettings, resolve
from tests.cluster.cluster import Cluster
from tests.cluster.errors import CommandFailedError
from tests.cluster.kubectl import Kubectl
from tests.unit.operator.documents import EXAMPLES, read

_EFA: Final = EXAMPLES / "minimal.yaml"
_PRIVILEGED: Final = EXAMPLES / "p5en-efa.yaml"
_TCP: Final = EXAMPLES / "g6e-no-efa.yaml"


def _pod(file: Path, role: str) -> dict[str, Any]:
    """A pod as the StatefulSet or Deployment of a role would have it."""
    resource = DisaggregatedInference.parse(read(file))
    owners = desired(resource, resolve(resource, OperatorSettings()))
    (template,) = (
        each["spec"]["template"]
        for each in owners
        if each["kind"] in ("StatefulSet", "Deployment") and each["metadata"]["labels"][names.LABEL_ROLE] == role
    )
    spec = {
        key: value for key, value in template["spec"].items() if key not in ("serviceAccountName", "priorityClassName")
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def _admit(kubectl: Kubectl, pod: dict[str, Any]) -> None:
    kubectl("create", "--dry-run=server", "--filename=-", stdin=json.dumps(pod))


@pytest.mark.parametrize(
    ("file", "role", "level", "stricter"),
    [
        (_EFA, names.ROUTER, "restricted", None),
        (_PRIVILEGED, names.ROUTER, "restricted", None),
        (_TCP, Role.PREFILL, "baseline", "restricted"),
        (_TCP, Role.DECODE, "baseline", "restricted"),
        (_EFA, Role.PREFILL, "privileged", "baseline"),
        (_EFA, Role.DECODE, "privileged", "baseline"),
        (_PRIVILEGED, Role.DECODE, "privileged", "baseline"),
    ],
    ids=lambda each: each.stem if isinstance(each, Path) else str(each),
)
def test_a_level_admits_a_pod_and_the_next_stricter_one_does_not(
    control_plane: Cluster, file: Path, role: str, level: str, stricter: str | None
) -> None:
    pod = _pod(file, str(role))
    with control_plane.namespace(labels={"pod-security.kubernetes.io/enforce": level}) as admitting:
        _admit(admitting, pod)
    if stricter is None:
        return
    with (
        control_plane.namespace(labels={"pod-security.kubernetes.io/enforce": stricter}) as refusing,
        pytest.raises(CommandFailedError, match="violates PodSecurity"),
    ):
        _admit(refusing, pod)
