"""What the operator may do: exactly what it needs, by API group and resource."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_KEPT: Final = ("get", "list", "watch", "create", "patch")
_DROPPED: Final = (*_KEPT, "delete")
_UNWATCHED: Final = ("get", "list", "create", "patch", "delete")
RIGHTS: Final = {
    ("kvloop.io", "disaggregatedinferences"): ("list", "watch"),
    ("kvloop.io", "disaggregatedinferences/status"): ("patch",),
    ("apps", "statefulsets"): _KEPT,
    ("apps", "deployments"): _DROPPED,
    ("", "services"): _DROPPED,
    ("", "configmaps"): _KEPT,
    ("", "serviceaccounts"): _DROPPED,
    ("policy", "poddisruptionbudgets"): _KEPT,
    ("networking.k8s.io", "networkpolicies"): _DROPPED,
    ("rbac.authorization.k8s.io", "roles"): _KEPT,
    ("rbac.authorization.k8s.io", "rolebindings"): _KEPT,
    ("resource.k8s.io", "resourceclaimtemplates"): _UNWATCHED,
    ("monitoring.coreos.com", "podmonitors"): _UNWATCHED,
    ("", "secrets"): ("get", "create", "patch"),
    ("", "pods"): ("get", "list", "watch", "patch", "delete"),
    ("", "events"): ("list", "create"),
}


def rights(rules: Sequence[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    """What a list of rules allows: verbs by API group and resource."""
    found: dict[tuple[str, str], set[str]] = {}
    for rule in rules:
        assert rule.keys() == {"apiGroups", "resources", "verbs"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return found
