"""How many replicas each role should have now, and which pods leave for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvloop_connector.settings import Role
from kvloop_operator.rollout.facts import Pod
from kvloop_operator.rollout.slots import ROLES, Row, View
from kvloop_operator.rollout.waves import slot_name, unschedulable


def is_rolling(view: View, wanted: Mapping[Role, int]) -> bool:
    """Whether pods that stay are still outdated. Where a role is at zero nothing serves, and nothing is kept."""
    return all(wanted.values()) and any(view.rows[role].outdated(wanted[role]) for role in ROLES)


def target(view: View, row: Row, wanted: int, *, rolling: bool) -> int:
    """Replicas that the role keeps at least for now, before a surge.

    During a rollout an extra pod is kept as surge allows; where one pod is wanted, one extra is kept in any case: it is
    what makes a rollout without an outage possible. Extras that are broken at the wanted revision are kept: without
    them nothing would tell that the revision is broken, and the next pods would go for it.
    """
    replicas = row.statefulset.replicas
    if not rolling or replicas <= wanted:
        return wanted
    if any(_is_evidence(view, slot.pod) for slot in row.slots[wanted:] if not slot.outdated and slot.pod is not None):
        return replicas
    return min(replicas, wanted + max(view.settings.max_surge, 1 if wanted == 1 else 0))


def _is_evidence(view: View, pod: Pod) -> bool:
    return view.unable(pod) and not unschedulable(pod)


def surge(view: View, wanted: Mapping[Role, int]) -> dict[Role, int]:
    """Replicas with surge pods, which come up at the wanted revision because they are above the partition."""
    roles = [role for role in ROLES if view.rows[role].outdated(wanted[role])]
    if any(pod.kv_revision != view.wanted_kv for role in roles for pod in view.rows[role].pods):
        roles = list(ROLES)
    return {role: wanted[role] + (view.settings.max_surge if role in roles else 0) for role in ROLES}


@dataclass(frozen=True, slots=True)
class Departure:
    """Pods that leave because fewer replicas are wanted. ``hold``: what they wait for; where that is not empty, none
    leaves. ``blocked``: waiting does not help."""

    pods: Mapping[Role, list[Pod]] = field(default_factory=dict)
    hold: str = ""
    blocked: bool = False

    def uids(self) -> frozenset[str]:
        return frozenset(pod.uid for pods in self.pods.values() for pod in pods)


NO_DEPARTURE = Departure()


def departure(view: View, targets: Mapping[Role, int]) -> Departure:
    """The pods above the target that may leave now, of both roles or else of one."""
    extras = {role: view.rows[role].living(targets[role]) for role in ROLES}
    if not any(extras.values()):
        return NO_DEPARTURE
    refusal = NO_DEPARTURE
    for roles in (ROLES, *((role,) for role in ROLES)):
        pods = {role: extras[role] for role in roles if extras[role]}
        if not pods:
            continue
        verdict = _refusal(view, targets, pods)
        if verdict is None:
            return Departure(pods)
        refusal = refusal if refusal.hold else verdict
    return refusal


def _refusal(view: View, targets: Mapping[Role, int], pods: Mapping[Role, list[Pod]]) -> Departure | None:
    if not all(targets.values()):
        return None
    starting = [pod for role in pods for pod in pods[role] if pod.ready and pod.draining_since is None]
    if starting:
        for role in pods:
            for slot in view.rows[role].slots[: targets[role]]:
                if slot.pod is None or view.recovering(slot.pod):
                    return Departure(hold=f"{slot_name(role, slot)} to be ready before {starting[0].name} goes")
    gone = Departure(pods).uids()
    if not view.serves() or view.serves(gone):
        return None
    if view.may_serve(gone):
        return Departure(hold="another pair to be ready before the last one goes")
    if any(unschedulable(pod) for role in ROLES for pod in view.rows[role].pods if pod.ordinal < targets[role]):
        # What stays may be waiting for the very accelerators that the others hold.
        return None
    return Departure(hold="a repair: the pods that stay cannot serve", blocked=True)
