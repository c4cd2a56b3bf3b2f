"""What every builder needs: the context of one resource, and the metadata of its children."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import DisaggregatedInference, DisaggregatedInferenceSpec, RoleSpec
from kvloop_operator.api.v1alpha1.engine import PullPolicy
from kvloop_operator.facts import Facts

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Context:
    """A valid resource, its facts and its KV revision."""

    resource: DisaggregatedInference
    facts: Facts
    revision: str

    @property
    def name(self) -> str:
        return self.resource.metadata.name

    @property
    def spec(self) -> DisaggregatedInferenceSpec:
        return self.resource.spec

    def role(self, role: Role) -> RoleSpec:
        """The specification of one role."""
        return self.spec.prefill if role is Role.PREFILL else self.spec.decode

    def replicas(self, role: Role) -> int:
        """How many engines of a role are wanted now."""
        return 0 if self.spec.suspend else self.role(role).replicas


def metadata(context: Context, name: str, role: str, *, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Metadata of a child, owned by the resource where the cluster has given it a uid."""
    owner = context.resource.metadata
    result: dict[str, Any] = {"name": name, "labels": names.labels(context.name, role)}
    if owner.namespace is not None:
        result["namespace"] = owner.namespace
    if annotations:
        result["annotations"] = dict(annotations)
    if owner.uid is not None:
        result["ownerReferences"] = [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": owner.name,
                "uid": owner.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return result


def plain(part: BaseModel) -> Any:
    """A part of the resource as the user wrote it, in wire names."""
    return part.model_dump(mode="json", by_alias=True, exclude_unset=True)


def field_env(name: str, path: str) -> dict[str, Any]:
    """An environment variable from a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def secret_env(name: str, secret: str, key: str) -> dict[str, Any]:
    """An environment variable from a Secret."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def restricted_pod(user: int) -> dict[str, Any]:
    """The security context of a pod for the restricted profile, run by ``user``, whose group may read volumes."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def init_container(
    name: str,
    *,
    image: str,
    pull_policy: PullPolicy | None,
    user: int | None,
    command: Sequence[str],
    mounts: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """What runs before an engine, without any privilege. ``user``: None for the image's own."""
    runs_as = {} if user is None else {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user}
    # As much as it may use, so that the pod's class of service is the engine's.
    resources = {"cpu": "100m", "memory": "128Mi"}
    container: dict[str, Any] = {
        "name": name,
        "image": image,
        "command": list(command),
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {
            **runs_as,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": list(mounts),
    }
    if pull_policy is not None:
        container["imagePullPolicy"] = pull_policy.value
    return container
