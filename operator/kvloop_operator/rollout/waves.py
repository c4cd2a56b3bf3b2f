"""Which outdated pods go next, together.

A wave takes pods of both roles in proportion, so that the ratio of prefill to decode stays about the same at either
revision. Candidates are tried from the widest to the narrowest; one that leaves a pair is taken. Where none does and
waiting cannot change that, or where nothing serves anyway, everything outdated goes at once: the outage is then as
short as it can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvloop_connector.settings import Role
from kvloop_operator.rollout.facts import Fault, Pod
from kvloop_operator.rollout.slots import ROLES, Slot, View


@dataclass(frozen=True, slots=True)
class Wave:
    """The highest outdated slots of each role. A slot without a pod is in it too: nothing has to leave there."""

    slots: Mapping[Role, tuple[Slot, ...]] = field(default_factory=dict)

    def pods(self) -> list[tuple[Role, Pod]]:
        return [(role, slot.pod) for role, slots in self.slots.items() for slot in slots if slot.pod is not None]

    def uids(self) -> frozenset[str]:
        return frozenset(pod.uid for _, pod in self.pods())

    def ordinals(self, role: Role) -> frozenset[int]:
        return frozenset(slot.ordinal for slot in self.slots.get(role, ()))


NO_WAVE = Wave()


@dataclass(frozen=True, slots=True)
class Hindrance:
    """Why no wave may start. ``blocked``: waiting does not help."""

    reason: str
    blocked: bool = False


def hindrance(view: View, targets: Mapping[Role, int], wanted: Mapping[Role, int]) -> Hindrance | None:
    """The last step has to have landed: everything at the wanted revision is ready, and nothing is on its way out.

    A surge pod that finds no accelerator is no hindrance: the rollout goes on without it. Nor is a pod that finds none
    where a surge pod has taken its place.
    """
    waiting = None
    for role in ROLES:
        row = view.rows[role]
        surged = any(pod.ready for pod in row.living(wanted[role]))
        for slot in row.slots[: targets[role]]:
            if slot.outdated or (slot.pod is not None and slot.pod.ready):
                continue
            if slot.pod is None:
                waiting = waiting or Hindrance(f"{slot_name(role, slot)} is being replaced")
            elif not view.unable(slot.pod):
                waiting = waiting or Hindrance(f"{slot.pod.name} is starting")
            elif not unschedulable(slot.pod) or (slot.ordinal < wanted[role] and not surged):
                return Hindrance(f"{slot.pod.name} at the wanted revision {_why(slot.pod)}", blocked=True)
        if row.leftovers:
            waiting = waiting or Hindrance(f"{row.leftovers[0].name} is ending")
    return waiting


def unschedulable(pod: Pod) -> bool:
    return pod.broken is not None and pod.broken.fault is Fault.UNSCHEDULABLE


def _why(pod: Pod) -> str:
    return f"is broken ({pod.broken.detail})" if pod.broken is not None else "does not become ready"


def in_flight(view: View, targets: Mapping[Role, int]) -> bool:
    """Whether a wave has been started and its pods are still there."""
    return any(
        slot.pod is not None and slot.pod.draining_since is not None
        for role in ROLES
        for slot in view.rows[role].outdated(targets[role])
    )


def started_wave(view: View, targets: Mapping[Role, int]) -> Wave:
    """What is left of a wave whose other pods are already being replaced. It never grows; it is empty where going on
    would take the last pair away."""
    wave = Wave({role: tuple(_labelled(view.rows[role].outdated(targets[role]))) for role in ROLES})
    uids = wave.uids()
    lost = (view.serves() and not view.serves(uids)) or (view.may_serve() and not view.may_serve(uids))
    return NO_WAVE if lost else wave


def _labelled(slots: list[Slot]) -> list[Slot]:
    """The slots down to the lowest labelled pod that no unlabelled one stands above."""
    taken = 0
    for index, slot in enumerate(slots):
        if slot.pod is not None:
            if slot.pod.draining_since is None:
                break
            taken = index + 1
    return slots[:taken]


def next_wave(view: View, targets: Mapping[Role, int]) -> tuple[Wave, str]:
    """The wave to start or to go on with, or none and what it waits for; none and nothing where all is updated."""
    outdated = {role: view.rows[role].outdated(targets[role]) for role in ROLES}
    if not any(outdated.values()):
        return NO_WAVE, ""
    everything = Wave({role: tuple(slots) for role, slots in outdated.items()})
    if not view.may_serve():
        return everything, ""
    serves, recovering = view.serves(), False
    for wave in _candidates(view, targets, outdated):
        gone = wave.uids()
        if not view.may_serve(gone):
            continue
        if serves and not view.serves(gone):
            recovering = True
            continue
        return wave, ""
    if recovering:
        return NO_WAVE, f"{', '.join(_recovering(view))} to be ready, so that a pair keeps serving"
    return everything, ""


def _candidates(view: View, targets: Mapping[Role, int], outdated: Mapping[Role, list[Slot]]) -> Iterator[Wave]:
    kv_changes = any(_changes_kv(view, slot) for slots in outdated.values() for slot in slots)
    taken = _slice(targets, outdated) if kv_changes else {role: min(1, len(outdated[role])) for role in ROLES}
    # What drains already stays in, so that a scaling does not undo a drain.
    draining = {role: len(_labelled(outdated[role])) for role in ROLES}
    yield Wave({role: tuple(slots[: max(taken[role], draining[role])]) for role, slots in outdated.items()})
    for role in sorted(ROLES, key=lambda role: -len(outdated[role])):
        # Where the KV revision changes, pods of one role alone serve nobody: one is enough to see that they start.
        first_of_role = len(outdated[role]) == targets[role]
        if outdated[role] and (first_of_role or not kv_changes):
            yield Wave({role: (outdated[role][0],)})


def _changes_kv(view: View, slot: Slot) -> bool:
    return (slot.pod.kv_revision if slot.pod is not None else slot.heir) != view.wanted_kv


def _slice(targets: Mapping[Role, int], outdated: Mapping[Role, list[Slot]]) -> dict[Role, int]:
    """One pod of the smaller role, and of the other as many as keep the ratio."""
    lead, other = sorted(ROLES, key=lambda role: (targets[role], -len(outdated[role])))
    lead_stays = max(len(outdated[lead]) - 1, 0)
    other_stays = -(-lead_stays * targets[other] // max(targets[lead], 1))
    return {lead: len(outdated[lead]) - lead_stays, other: max(len(outdated[other]) - other_stays, 0)}


def _recovering(view: View) -> list[str]:
    return [
        slot_name(role, slot)
        for role in ROLES
        for slot in view.rows[role].slots
        if slot.pod is None or view.recovering(slot.pod)
    ]


def slot_name(role: Role, slot: Slot) -> str:
    return slot.pod.name if slot.pod is not None else f"{role}-{slot.ordinal}"
