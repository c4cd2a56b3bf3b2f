"""What the whole comes to: serving, waiting for something, or stuck, and why. Start reading here: ``verdict``.

The first of these that holds is told: the spec cannot be acted on, a write was refused, a rollout is stuck, it is
paused, it rolls, it is suspended, engines are missing, routers are missing, KV does not move; else it serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.api.v1alpha1.status import ConditionStatus
from kvloop_operator.compare import needs_apply, statefulset_needs_apply
from kvloop_operator.desired import desired
from kvloop_operator.facts import Facts
from kvloop_operator.live import Object, text
from kvloop_operator.manifests.common import Manifest
from kvloop_operator.rollout.facts import Phase
from kvloop_operator.status.findings import Finding, worst
from kvloop_operator.status.groups import Engines, Group, router_is_rolling
from kvloop_operator.status.reasons import REMEDIES, ConditionType, Reason
from kvloop_operator.status.situation import Situation, previous_condition
from kvloop_operator.status.transfer import Transfer

_COUNTS = re.compile(r" \((?:running turns|not every router)[^)]*\)")

# What the planner takes for broken at once, and may pass all the same while it is not grave.
_MAY_PASS = (Reason.IMAGE_PULL_FAILED, Reason.UNSCHEDULABLE, Reason.CRASHING, Reason.OUT_OF_MEMORY)

PREVIOUS_SERVE = "the previous engines go on serving"


@dataclass(frozen=True, slots=True)
class Told:
    """A reason and a message."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conditions Ready, Reconciling and Stalled; None: absent."""

    ready: ConditionStatus
    told: Told
    reconciling: Told | None = None
    stalled: Told | None = None


@dataclass(frozen=True, slots=True)
class View:
    """The situation, arranged."""

    situation: Situation
    roles: Sequence[Engines]
    router: Group
    transfer: Transfer

    @property
    def previous_ready(self) -> Object:
        return previous_condition(self.situation.previous, ConditionType.READY)

    @property
    def phase(self) -> Phase | None:
        return self.situation.step.phase if self.situation.step is not None else None

    @property
    def suspended(self) -> bool:
        return any(role.wanted == 0 for role in self.roles)

    @property
    def rolling(self) -> bool:
        return any(role.outdated for role in self.roles)

    @property
    def unsettled(self) -> bool:
        """Whether a StatefulSet's controller has yet to see what was written: which pods are outdated is not known."""
        states = [role.statefulset for role in self.roles if role.statefulset is not None]
        return any(state.template_wanted and not state.settled for state in states)

    @property
    def serves(self) -> bool:
        """Whether there is a ready pair of any one KV revision, and a router."""
        prefill, decode = (role.ready_revisions() for role in self.roles)
        return not prefill.isdisjoint(decode) and self.router.ready > 0

    @property
    def paired(self) -> bool:
        """Whether there is a ready pair of the wanted KV revision."""
        return all(self.situation.wanted_revision in role.ready_revisions() for role in self.roles)

    @property
    def missing(self) -> list[Group]:
        """Groups that lack pods."""
        return [group for group in (*self.roles, self.router) if group.short]

    @property
    def reached(self) -> bool:
        """Whether the spec was fulfilled before as it is now: what is missing since is not on its first way up."""
        previous = self.situation.previous
        return (
            previous.get("observedGeneration") == self.situation.generation
            and self.previous_ready.get("status") == ConditionStatus.TRUE
            and not previous_condition(previous, ConditionType.RECONCILING)
        )


def verdict(view: View) -> Verdict:
    """What the whole comes to."""
    situation = view.situation
    if situation.resource is None or situation.faults:
        told = (
            "; ".join(map(str, situation.faults)) or "it cannot be read; compare the installed CRD with the operator's"
        )
        return _stalled(Reason.INVALID_SPEC, _and_what_runs(view, told))
    if situation.problems:
        told = "; ".join(problem.message for problem in situation.problems[:3])
        return _stalled(situation.problems[0].reason, told)
    return (
        _blocked(view)
        or _paused(view, situation.resource, situation.facts)
        or _rolling(view)
        or _suspended(view, situation.resource)
        or _stuck(view)
        or _unsettled(view)
        or _engines_missing(view)
        or _router_missing(view)
        or _not_transferring(view)
        or _serving(view)
    )


def _stalled(reason: Reason, message: str) -> Verdict:
    told = Told(reason, message)
    return Verdict(ConditionStatus.FALSE, told, stalled=told)


def _waiting(reason: Reason, message: str) -> Verdict:
    told = Told(reason, message)
    return Verdict(ConditionStatus.UNKNOWN, told, reconciling=told)


def _and_what_runs(view: View, message: str) -> str:
    return f"{message}; {PREVIOUS_SERVE}" if view.serves else message


def _is_grave(view: View, finding: Finding) -> bool:
    """A first try's failure counts where it was found grave before: the tries alternate with waiting."""
    return finding.grave or (
        finding.first_try and bool(previous_condition(view.situation.previous, ConditionType.STALLED))
    )


def _gravest(view: View, *groups: Iterable[Finding]) -> Finding | None:
    """By what it is stuck: the worst of the first group that has any.

    What was told already counts as what is grave by itself, so that tries which alternate with waiting change nothing.
    What counts only because anything grave was told comes after both.
    """
    told = text(previous_condition(view.situation.previous, ConditionType.STALLED), "message")
    grave = [[each for each in group if _is_grave(view, each)] for group in groups]
    standing = [[each for each in group if each.grave or told.startswith(each.message)] for group in grave]
    return next((each for each in (*map(worst, standing), *map(worst, grave)) if each is not None), None)


def _blocked(view: View) -> Verdict | None:
    """A rollout, or a scaling down, that cannot go on."""
    changing = view.rolling or any(role.extra for role in view.roles)
    current = [each for role in view.roles for each in role.current]
    if view.phase is Phase.BLOCKED and changing:
        cause = _gravest(view, current) or worst(current)
    elif view.rolling:
        # The planner knows nothing of pods that were never made.
        cause = worst(each for each in current if each.reason is Reason.PODS_REFUSED)
        if cause is None:
            return None
    elif view.router.ready and router_is_rolling(view.situation):
        cause = _gravest(view, view.router.findings)
        if cause is None:
            return None
    else:
        return None
    if cause is not None and _is_grave(view, cause):
        return _stalled(Reason.ROLLOUT_BLOCKED, _and_what_runs(view, cause.message))
    if cause is not None and cause.reason in _MAY_PASS:
        return _waiting(Reason.ROLLING_OUT, cause.message)
    return _stalled(Reason.ROLLOUT_BLOCKED, _and_what_runs(view, _step(view)))


def _paused(view: View, resource: DisaggregatedInference, facts: Facts | None) -> Verdict | None:
    """What is not as the spec says stays so; where all is, it is judged as ever."""
    if not resource.spec.paused or facts is None:
        return None
    counted = all(len(role.living) == role.wanted and not role.outdated for role in view.roles)
    if counted and not view.unsettled and all(_is_applied(view.situation, each) for each in desired(resource, facts)):
        return None
    told = Told(Reason.PAUSED, "the spec is not acted on while spec.paused is true; set it to false")
    return Verdict(ConditionStatus.UNKNOWN, told)


def _is_applied(situation: Situation, manifest: Manifest) -> bool:
    live = situation.live.children.get((manifest["kind"], manifest["metadata"]["name"]))
    if live is None:
        return False
    differs = statefulset_needs_apply if manifest["kind"] == "StatefulSet" else needs_apply
    return not differs(live, manifest)


def _rolling(view: View) -> Verdict | None:
    if not view.rolling:
        return None
    draining = [name for role in view.roles for name in role.draining]
    if draining and view.phase is Phase.ROLLING:
        return _waiting(Reason.DRAINING, f"{_listed(draining)} to be replaced once running turns are over")
    cause = worst(each for role in view.roles for each in role.current)
    return _waiting(Reason.ROLLING_OUT, cause.message if cause is not None else _step(view))


def _suspended(view: View, resource: DisaggregatedInference) -> Verdict | None:
    if not view.suspended:
        return None
    if view.phase is Phase.SCALING or any(role.extra for role in view.roles):
        return _waiting(*_scaling(view))
    broken = _gravest(view, view.router.findings)
    if broken is not None:
        return _stalled(broken.reason, broken.message)
    if not (view.router.exists and all(role.exists for role in view.roles)):
        return _waiting(Reason.STARTING, _step(view))
    missing = _router_missing(view)
    if missing is not None:
        return missing
    which = "spec.suspend is true" if resource.spec.suspend else "a role is at zero"
    return Verdict(
        ConditionStatus.TRUE, Told(Reason.SUSPENDED, f"{which}: no engine serves, and the router answers 503")
    )


def _stuck(view: View) -> Verdict | None:
    """A role, or the router, without a ready pod, where waiting does not help."""
    stuck = _gravest(view, *(group.findings for group in (*view.roles, view.router) if not group.ready))
    if stuck is not None:
        return _stalled(stuck.reason, stuck.message)
    cause = worst(each for role in view.roles if not role.ready for each in role.findings)
    if view.phase is Phase.BLOCKED and not view.paired and (cause is None or cause.reason not in _MAY_PASS):
        return _stalled(Reason.START_TIMED_OUT, f"{_step(view)}; {REMEDIES[Reason.START_TIMED_OUT]}")
    return None


def _unsettled(view: View) -> Verdict | None:
    """While the StatefulSet controller has yet to see what was written, what was said before holds if it still may."""
    if not view.unsettled or not view.paired or not view.router.ready:
        return None
    told = _told_before(view, ConditionType.RECONCILING)
    if told is None:
        counts = [len(role.living) - (role.wanted or 0) for role in view.roles]
        down, up = any(each > 0 for each in counts), any(each < 0 for each in counts)
        reason = Reason.SCALING_DOWN if down else Reason.SCALING_UP if up else Reason.ROLLING_OUT
        told = Told(reason, "waiting for the StatefulSet controller to see what has changed")
    ready = _told_before(view, ConditionType.READY)
    if ready is None or view.previous_ready.get("status") != ConditionStatus.TRUE:
        return Verdict(ConditionStatus.UNKNOWN, told, reconciling=told)
    return Verdict(ConditionStatus.TRUE, ready, reconciling=told)


def _told_before(view: View, kind: ConditionType) -> Told | None:
    found = previous_condition(view.situation.previous, kind)
    reason = text(found, "reason")
    return Told(Reason(reason), text(found, "message")) if reason in set(Reason) else None


def _engines_missing(view: View) -> Verdict | None:
    if view.paired:
        return None
    cause = worst(each for role in view.roles if not role.ready for each in role.findings)
    if cause is not None:
        return _waiting(cause.reason, cause.message)
    if view.phase is Phase.SCALING:
        return _waiting(*_scaling(view))
    return _waiting(Reason.STARTING, _step(view))


def _router_missing(view: View) -> Verdict | None:
    cause = view.router.worst
    if view.router.ready and not router_is_rolling(view.situation):
        return None
    if view.router.ready:
        return _waiting(Reason.ROLLING_OUT, cause.message if cause is not None else "routers are being replaced")
    if cause is None:
        return _waiting(Reason.STARTING, "the router's pods are being made")
    return _waiting(cause.reason, cause.message)


def _not_transferring(view: View) -> Verdict | None:
    transfer = view.transfer
    if transfer.verified:
        return None
    told = Told(transfer.reason, transfer.message)
    if transfer.grave:
        return Verdict(ConditionStatus.FALSE, told, stalled=told)
    waits = transfer.reason is not Reason.CANARY_DISABLED
    return Verdict(ConditionStatus.UNKNOWN, told, reconciling=told if waits else None)


def _serving(view: View) -> Verdict:
    ready = Told(Reason.SERVING, f"{' and '.join(map(_counted, view.roles))} engines serve")
    if view.phase is Phase.SCALING or any(role.extra for role in view.roles):
        return Verdict(ConditionStatus.TRUE, ready, reconciling=Told(*_scaling(view)))
    cause = worst(each for group in view.missing for each in group.findings)
    if not view.missing or view.reached or (cause is not None and _is_grave(view, cause)):
        return Verdict(ConditionStatus.TRUE, ready)
    if cause is not None:
        return Verdict(ConditionStatus.TRUE, ready, reconciling=Told(cause.reason, cause.message))
    more = ", ".join(f"{group.name} from {len(group.pods)} to {group.wanted}" for group in view.missing)
    return Verdict(ConditionStatus.TRUE, ready, reconciling=Told(Reason.SCALING_UP, f"making pods: {more}"))


def _counted(role: Engines) -> str:
    return f"{role.ready} of {role.wanted} {role.role.value}" if role.short else f"{role.ready} {role.role.value}"


def _scaling(view: View) -> tuple[Reason, str]:
    draining = [name for role in view.roles for name in role.draining]
    if draining:
        return Reason.DRAINING, f"{_listed(draining)} to end once running turns are over, as fewer are wanted"
    down = any(role.extra for role in view.roles)
    return (Reason.SCALING_DOWN if down else Reason.SCALING_UP), _step(view)


def _step(view: View) -> str:
    """What the planner does or waits for, without its counts of turns, which never stand still."""
    step = view.situation.step
    if step is None or not all(role.exists for role in view.roles):
        return "the engines' pods are being made"
    return _COUNTS.sub("", step.reason)


def _listed(pods: Sequence[str]) -> str:
    return f"waiting for {', '.join(pods)}"
