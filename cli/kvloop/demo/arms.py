"""Two routers before the same engines, one of them with reuse off. Pure."""

from __future__ import annotations

from copy import deepcopy
from enum import StrEnum
from typing import Any

from kvloop.node.resource import LocalDeployment
from kvloop_operator import names

_SUFFIX = "-reuse-off"


class Arm(StrEnum):
    """Whether the router uses the handles of earlier turns; ``off`` releases each unused."""

    OFF = "off"
    ON = "on"


def router_workload(deployment: LocalDeployment, arm: Arm) -> str:
    """The name of an arm's router Deployment."""
    name = names.router_name(deployment.resource.metadata.name)
    return name if arm is Arm.ON else f"{name}{_SUFFIX}"


def with_both_arms(deployment: LocalDeployment) -> LocalDeployment:
    """``deployment`` with reuse on, and beside its router a second one that differs in ``reuse`` and name only."""
    on = deployment.with_settings({"router": {"reuse": True}})
    off = deployment.with_settings({"router": {"reuse": False}})
    name = names.router_name(deployment.resource.metadata.name)
    own = [m for m in off.manifests if m["kind"] in ("ConfigMap", "Deployment") and m["metadata"]["name"] == name]
    on.manifests.extend(_renamed(manifest, name) for manifest in own)
    return on


def _renamed(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """Under its own name, and reading the ConfigMap of that name; the Secret is shared."""
    copy = deepcopy(manifest)
    copy["metadata"]["name"] = f"{name}{_SUFFIX}"
    if copy["kind"] == "Deployment":
        for volume in copy["spec"]["template"]["spec"]["volumes"]:
            for source in volume.get("projected", {}).get("sources", [volume]):
                if source.get("configMap", {}).get("name") == name:
                    source["configMap"]["name"] = f"{name}{_SUFFIX}"
    return copy
