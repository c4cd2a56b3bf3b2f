"""The kinds of objects that the operator reads and writes, and their paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvloop_operator import names
from kvloop_operator.facts import POD_MONITOR_API, RESOURCE_CLAIM_API


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of namespaced object.

    watched: kept up to date by a watch. The others are read by name, or only when everything is read anew.
    optional: name of the API where a cluster may lack it; one of ``facts.OPTIONAL_APIS``.
    """

    kind: str
    api_version: str
    plural: str
    watched: bool = True
    optional: str | None = None

    @property
    def group(self) -> str:
        """API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Path below the API server's root; of all namespaces where none is given."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        where = "" if namespace is None else f"/namespaces/{namespace}"
        return f"{root}{where}/{self.plural}" + ("" if name is None else f"/{name}")


RESOURCE: Final = Kind(kind=names.KIND, api_version=names.API_VERSION, plural=names.PLURAL)
POD: Final = Kind(kind="Pod", api_version="v1", plural="pods")
SECRET: Final = Kind(kind="Secret", api_version="v1", plural="secrets", watched=False)
EVENT: Final = Kind(kind="Event", api_version="v1", plural="events", watched=False)
STATEFULSET: Final = Kind(kind="StatefulSet", api_version="apps/v1", plural="statefulsets")

CHILDREN: Final = (
    STATEFULSET,
    Kind(kind="Deployment", api_version="apps/v1", plural="deployments"),
    Kind(kind="Service", api_version="v1", plural="services"),
    Kind(kind="ConfigMap", api_version="v1", plural="configmaps"),
    Kind(kind="ServiceAccount", api_version="v1", plural="serviceaccounts"),
    Kind(kind="Role", api_version="rbac.authorization.k8s.io/v1", plural="roles"),
    Kind(kind="RoleBinding", api_version="rbac.authorization.k8s.io/v1", plural="rolebindings"),
    Kind(kind="PodDisruptionBudget", api_version="policy/v1", plural="poddisruptionbudgets"),
    Kind(kind="NetworkPolicy", api_version="networking.k8s.io/v1", plural="networkpolicies"),
    Kind(
        kind="ResourceClaimTemplate",
        api_version="resource.k8s.io/v1",
        plural="resourceclaimtemplates",
        watched=False,
        optional=RESOURCE_CLAIM_API,
    ),
    Kind(
        kind="PodMonitor",
        api_version="monitoring.coreos.com/v1",
        plural="podmonitors",
        watched=False,
        optional=POD_MONITOR_API,
    ),
)
"""What a resource is made into, beside its Secret."""

BY_NAME: Final = {kind.kind: kind for kind in (RESOURCE, POD, SECRET, EVENT, *CHILDREN)}
