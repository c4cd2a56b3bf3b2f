"""The whole status of a resource. Nothing in it changes while nothing changes: no clock, no counter, no order that
depends on anything but names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1.status import ConditionStatus
from kvloop_operator.facts import ENGINE_TEMPLATE_VERSIONS
from kvloop_operator.live import Object, text
from kvloop_operator.serving import router_tls
from kvloop_operator.status.findings import worst
from kvloop_operator.status.groups import Engines, Group, engines, handle_store, router
from kvloop_operator.status.reasons import ConditionType, Reason
from kvloop_operator.status.situation import Assessment, Situation, Transition, previous_condition
from kvloop_operator.status.transfer import Transfer, judge
from kvloop_operator.status.verdict import Told, Verdict, View, verdict

_LONGEST_MESSAGE = 1000
# The statuses of which people are told; all others only change with these.
_IS_NEWS: Mapping[ConditionType, tuple[str, ...]] = {
    ConditionType.READY: ("True", "False", "Unknown"),
    ConditionType.PAUSED: ("True",),
    ConditionType.KV_TRANSFER_VERIFIED: ("True", "False"),
    ConditionType.DEGRADED: ("True",),
    ConditionType.UPDATE_AVAILABLE: ("True",),
}

_Condition = tuple[ConditionType, ConditionStatus, Told]


def assess(situation: Situation) -> Assessment:
    """The status that follows from ``situation``."""
    roles = tuple([engines(situation, role) for role in Role])
    routers = router(situation)
    view = View(situation, roles, routers, judge(situation, roles, routers))
    told = verdict(view)
    conditions = [_document(situation, *each) for each in _conditions(view, told)]
    status: dict[str, Any] = {"observedGeneration": situation.generation, "conditions": conditions}
    for role in roles:
        if role.wanted is not None:
            status[role.role.value] = _role_status(situation, role, role.role.value, _revision(situation, role))
    if routers.wanted is not None:
        status[names.ROUTER] = _role_status(situation, routers, names.ROUTER, "")
    status.update(_rest(situation, view.transfer))
    moments = [group.until for group in (*roles, routers) if group.until is not None and group.until > situation.now]
    return Assessment(status, min(moments, default=None), tuple(_transitions(situation.previous, conditions)))


def _conditions(view: View, told: Verdict) -> Iterator[_Condition]:
    """Every condition, in order."""
    situation = view.situation
    yield ConditionType.READY, told.ready, told.told
    if told.reconciling is not None:
        yield ConditionType.RECONCILING, ConditionStatus.TRUE, told.reconciling
    if told.stalled is not None:
        yield ConditionType.STALLED, ConditionStatus.TRUE, told.stalled
    if situation.resource is not None and situation.resource.spec.paused:
        yield ConditionType.PAUSED, ConditionStatus.TRUE, Told(Reason.PAUSED, "spec.paused is true: nothing is changed")
    kinds = (ConditionType.PREFILL_READY, ConditionType.DECODE_READY)
    for kind, role in zip(kinds, view.roles, strict=True):
        if role.wanted is not None:
            yield kind, *_group(role, f"{role.role.value} engines", unmade=_unmade(view, told))
    if view.router.wanted is not None:
        yield ConditionType.ROUTER_READY, *_group(view.router, "routers", unmade=_unmade(view, told))
    if situation.wanted_revision:
        transfer = view.transfer
        yield ConditionType.KV_TRANSFER_VERIFIED, transfer.status, Told(transfer.reason, transfer.message)
        yield ConditionType.DEGRADED, *_degraded(view, told)
    else:
        # Nothing says against what to compare: what was known stays.
        yield from _carried_over(situation.previous, ConditionType.KV_TRANSFER_VERIFIED, ConditionType.DEGRADED)
    if situation.facts is not None:
        yield ConditionType.UPDATE_AVAILABLE, *_update(situation.facts.template_version)
    else:
        yield from _carried_over(situation.previous, ConditionType.UPDATE_AVAILABLE)


def _unmade(view: View, told: Verdict) -> Reason | None:
    """Why no pods are made; None where they are."""
    situation = view.situation
    if situation.resource is None or situation.faults or situation.problems:
        return told.told.reason
    return Reason.PAUSED if situation.resource.spec.paused else None


def _group(group: Group, what: str, *, unmade: Reason | None) -> tuple[ConditionStatus, Told]:
    """PrefillReady, DecodeReady or RouterReady."""
    if group.wanted == 0:
        if group.pods:
            return ConditionStatus.TRUE, Told(Reason.SCALING_DOWN, f"no {what} are wanted, and some are still there")
        return ConditionStatus.TRUE, Told(Reason.SUSPENDED, f"no {what} are wanted")
    cause = worst(group.findings)
    missing = f": {cause.message}" if cause is not None else ""
    if not group.short:
        return ConditionStatus.TRUE, Told(Reason.ALL_READY, f"all {what} are ready")
    some = f"{group.ready} of {group.wanted} {what} are ready{missing}"
    if group.ready:
        return ConditionStatus.TRUE, Told(Reason.PARTLY_READY, some)
    if cause is None and not group.pods and unmade is not None:
        return ConditionStatus.FALSE, Told(unmade, f"{some}, and none are made: see Ready")
    return ConditionStatus.FALSE, Told(cause.reason if cause is not None else Reason.STARTING, some)


def _degraded(view: View, told: Verdict) -> tuple[ConditionStatus, Told]:
    """Less serves than should, after it did."""
    if not view.suspended and not view.rolling:
        if view.paired and view.router.ready:
            lack = _lack(view, told)
        else:
            lack = Told(told.told.reason, f"it served before: {told.told.message}") if _served(view, told) else None
        if lack is not None:
            return ConditionStatus.TRUE, lack
    return ConditionStatus.FALSE, Told(Reason.AS_EXPECTED, "nothing that served is missing")


def _lack(view: View, told: Verdict) -> Told | None:
    """What is missing where a pair serves."""
    if view.missing and told.reconciling is None:
        cause = worst(each for group in view.missing for each in group.findings)
        counts = ", ".join(f"{group.name} {group.summary}" for group in view.missing)
        return Told(Reason.PARTLY_READY, f"{counts} ready: {cause.message}" if cause is not None else f"{counts} ready")
    store = handle_store(view.situation)
    if store.short and told.reconciling is None:
        cause = store.worst
        serves = f"{store.name} {store.summary} ready, and every turn is computed anew"
        return Told(Reason.PARTLY_READY, f"{serves}: {cause.message}" if cause is not None else serves)
    if view.transfer.failed:
        return Told(Reason.PAIR_FAILED, view.transfer.failed)
    if view.transfer.slow:
        return Told(Reason.SLOW_TRANSPORT, view.transfer.slow)
    if (
        view.transfer.reason in (Reason.TRANSFER_FAILED, Reason.WRONG_REUSE)
        and view.transfer.verified_revision == view.situation.wanted_revision
    ):
        return Told(view.transfer.reason, f"it served before: {view.transfer.message}")
    return None


def _served(view: View, told: Verdict) -> bool:
    """Whether this very spec was served, and is no longer."""
    previous = view.situation.previous
    if told.ready is ConditionStatus.TRUE or previous.get("observedGeneration") != view.situation.generation:
        return False
    if previous_condition(previous, ConditionType.DEGRADED).get("status") == ConditionStatus.TRUE:
        return True
    ready = view.previous_ready
    return ready.get("status") == ConditionStatus.TRUE and ready.get("reason") == Reason.SERVING


def _update(version: str) -> tuple[ConditionStatus, Told]:
    newest = ENGINE_TEMPLATE_VERSIONS[-1]
    if version == newest:
        return ConditionStatus.FALSE, Told(Reason.UP_TO_DATE, "the engines have the newest template")
    message = f"set rollout.engineTemplateVersion to {newest} to take the newer engine template; engines are restarted"
    return ConditionStatus.TRUE, Told(Reason.NEW_ENGINE_TEMPLATE, message)


def _carried_over(previous: Object, *kinds: ConditionType) -> Iterator[_Condition]:
    for kind in kinds:
        found = previous_condition(previous, kind)
        status, reason = text(found, "status"), text(found, "reason")
        if status in set(ConditionStatus) and reason in set(Reason):
            yield kind, ConditionStatus(status), Told(Reason(reason), text(found, "message"))


def _document(situation: Situation, kind: ConditionType, status: ConditionStatus, told: Told) -> dict[str, Any]:
    before = previous_condition(situation.previous, kind)
    since = text(before, "lastTransitionTime") if before.get("status") == status.value else ""
    message = told.message
    return {
        "type": kind.value,
        "status": status.value,
        "reason": told.reason.value,
        "message": message if len(message) <= _LONGEST_MESSAGE else f"{message[: _LONGEST_MESSAGE - 1]}…",
        "lastTransitionTime": since or datetime.fromtimestamp(situation.now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "observedGeneration": situation.generation,
    }


def _role_status(situation: Situation, group: Group, role: str, revision: str) -> dict[str, Any]:
    return {
        "replicas": len(group.pods),
        "desired": group.wanted or 0,
        "ready": group.ready,
        "updated": group.updated,
        "revision": revision,
        "selector": ",".join(f"{key}={value}" for key, value in names.selector(situation.name, role).items()),
        "summary": group.summary,
    }


def _revision(situation: Situation, role: Engines) -> str:
    return situation.wanted_revision or text(situation.previous, role.role.value, "revision")


def _rest(situation: Situation, transfer: Transfer) -> dict[str, Any]:
    rest: dict[str, Any] = {"kvTransfer": {"verifiedRevision": transfer.verified_revision, **_connector(situation)}}
    if situation.facts is not None:
        newest, current = ENGINE_TEMPLATE_VERSIONS[-1], situation.facts.template_version
        rest["engineTemplate"] = {"current": current, "offered": "" if newest == current else newest}
    else:
        before = situation.previous
        rest["engineTemplate"] = {name: text(before, "engineTemplate", name) for name in ("current", "offered")}
    if situation.resource is not None:
        spec = situation.resource.spec
        scheme, port = "http" if router_tls(spec) is None else "https", spec.router.service.port
        rest["url"] = f"{scheme}://{names.router_name(situation.name)}.{situation.namespace}.svc:{port}"
    else:
        rest["url"] = text(situation.previous, "url")
    return rest


def _connector(situation: Situation) -> dict[str, str]:
    facts, before = situation.facts, situation.previous
    if facts is None:
        return {name: text(before, "kvTransfer", name) for name in ("connector", "connectorMessage")}
    return {"connector": facts.connector.value, "connectorMessage": facts.connector_because}


def _transitions(previous: Object, conditions: Sequence[Object]) -> Iterator[Transition]:
    """An Event for each change of a status or a reason, but one for changes with the same reason."""
    told: set[str] = set()
    for condition in conditions:
        kind, status, reason = ConditionType(condition["type"]), condition["status"], condition["reason"]
        before = previous_condition(previous, kind)
        same = (before.get("status"), before.get("reason")) == (status, reason)
        if same or status not in _IS_NEWS.get(kind, ()) or reason in told:
            continue
        told.add(reason)
        yield Transition(_event_type(kind, status), Reason(reason), condition["message"])


def _event_type(kind: ConditionType, status: str) -> Literal["Normal", "Warning"]:
    bad = "True" if kind is ConditionType.DEGRADED else "False"
    informs = kind in (ConditionType.PAUSED, ConditionType.UPDATE_AVAILABLE)
    return "Normal" if informs or status != bad else "Warning"
