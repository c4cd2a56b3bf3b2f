"""Desired state: (resource, facts) -> manifests. Start reading here.

resource ─ resolve ─> facts ─ check ─> nothing wrong ─ desired ─> manifests, in the order in which they are applied
"""

from __future__ import annotations

from collections.abc import Iterator

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import DisaggregatedInference, EFAMode
from kvloop_operator.facts import POD_MONITOR_API, Facts
from kvloop_operator.manifests import engine, handle_store, policies, router
from kvloop_operator.manifests.common import Context, Manifest
from kvloop_operator.revision import kv_revision


def desired(resource: DisaggregatedInference, facts: Facts) -> list[Manifest]:
    """Every child of ``resource``, fresh, in the order in which they are applied: what others refer to comes first.

    The resource has to be valid and ``check`` to find nothing: what cannot be known is left out here in silence.
    """
    context = Context(resource, facts, kv_revision(resource, facts))
    return [manifest for manifest in _children(context) if manifest is not None]


def _children(context: Context) -> Iterator[Manifest | None]:
    yield policies.engine_service_account(context)
    yield router.service_account(context)
    yield router.role(context)
    yield router.role_binding(context)
    yield router.secret(context)
    yield router.config_map(context)
    if context.spec.network.policy.enabled:
        yield from (policies.engine_network_policy(context, role) for role in Role)
        yield policies.router_network_policy(context)
        yield policies.store_network_policy(context)
    for role in Role:
        if context.facts.role(role).efa is EFAMode.DRA:
            yield engine.efa_claim_template(context, role)
    yield from (engine.service(context, role) for role in Role)
    yield router.service(context)
    yield handle_store.service(context)
    yield handle_store.deployment(context)
    yield from (engine.statefulset(context, role) for role in Role)
    yield router.deployment(context)
    for role in Role:
        name = names.engine_name(context.name, role)
        yield policies.disruption_budget(context, name, role, context.role(role).disruption_budget)
    router_budget = context.spec.router.disruption_budget
    yield policies.disruption_budget(context, names.router_name(context.name), names.ROUTER, router_budget)
    if context.spec.monitoring.pod_monitor and POD_MONITOR_API in context.facts.apis:
        yield from (policies.pod_monitor(context, names.engine_name(context.name, role), role) for role in Role)
        yield policies.pod_monitor(context, names.router_name(context.name), names.ROUTER)
