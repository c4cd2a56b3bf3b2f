"""Where engine pods may run: on the instance type asked for, and near the other role."""

from __future__ import annotations

from typing import Any

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import PlacementMode
from kvloop_operator.instance_types import node_label_values
from kvloop_operator.manifests.common import Context, plain

INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def affinity(context: Context, role: Role) -> dict[str, Any]:
    """The user's affinity, with the instance type and the other role's topology domain added."""
    own = context.role(role)
    result: dict[str, Any] = plain(own.affinity) if own.affinity is not None else {}
    if own.instance_type is not None:
        _require_instance_type(result.setdefault("nodeAffinity", {}), own.instance_type)
    _add_same_domain(result, context)
    return result


def placement_mode(context: Context) -> PlacementMode:
    """How strictly both roles stay in one topology domain; never Auto."""
    mode = context.spec.network.placement.mode
    if mode is not PlacementMode.AUTO:
        return mode
    # A node without the label takes no pod at all where the domain is required, and only EFA cannot cross zones.
    return PlacementMode.REQUIRED if context.facts.efa else PlacementMode.PREFERRED


def _require_instance_type(node_affinity: dict[str, Any], name: str) -> None:
    # Terms are alternatives: the requirement has to stand in each of them.
    terms = node_affinity.get(_REQUIRED, {}).get("nodeSelectorTerms") or [{}]
    node_affinity[_REQUIRED] = {
        "nodeSelectorTerms": [
            {**term, "matchExpressions": [*term.get("matchExpressions", []), _instance_type_requirement(name)]}
            for term in terms
        ]
    }


def _instance_type_requirement(name: str) -> dict[str, Any]:
    return {"key": INSTANCE_TYPE_LABEL, "operator": "In", "values": node_label_values(name)}


def _add_same_domain(result: dict[str, Any], context: Context) -> None:
    mode = placement_mode(context)
    if mode is PlacementMode.DISABLED:
        return
    term = {
        "topologyKey": context.spec.network.placement.topology_key,
        "labelSelector": {
            "matchLabels": {names.LABEL_DEPLOYMENT: context.name},
            "matchExpressions": [{"key": names.LABEL_ROLE, "operator": "In", "values": [role.value for role in Role]}],
        },
    }
    pod_affinity = result.setdefault("podAffinity", {})
    if mode is PlacementMode.REQUIRED:
        pod_affinity.setdefault(_REQUIRED, []).append(term)
    else:
        pod_affinity.setdefault(_PREFERRED, []).append({"weight": 100, "podAffinityTerm": term})
