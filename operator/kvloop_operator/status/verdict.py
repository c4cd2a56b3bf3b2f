"""What the whole comes to: serving, waiting for something, or stuck, and why. Start reading here: ``verdict``.

The first of these that holds is told: the spec cannot be acted on, a write was refused, a rollout is stuck, it is
paused, it rolls, it is suspended, engines are missing, routers are missing, KV does not move; else it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvloop_operator.api.v1alpha1.status import ConditionStatus
from kvloop_operator.live import Object, text
from kvloop_operator.rollout.facts import Phase
from kvloop_operator.status.findings import Finding, worst
from kvloop_operator.status.groups import Engines, Group, router_is_rolling
from kvloop_operator.status.reasons import ConditionType, Reason
from kvloop_operator.status.situation import Situation, previous_condition
from kvloop_operator.status.transfer import Transfer

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
    def serves_wanted(self) -> bool:
        return all(self.situation.wanted_revision in role.ready_revisions() for role in self.roles)

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
        return _stalled(Reason.INVALID_SPEC, _and_what_runs(view, "; ".join(map(str, situation.faults))))
    if situation.problems:
        return _stalled(situation.problems[0].reason, situation.problems[0].message)
    return (
        _blocked(view)
        or _paused(view)
        or _rolling(view)
        or _suspended(view)
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
    """A first try's failure counts where it had been found grave before: the tries alternate with waiting."""
    stalled = bool(previous_condition(view.situation.previous, ConditionType.STALLED))
    return finding.grave or (finding.first_try and (stalled or view.reached))


def _blocked(view: View) -> Verdict | None:
    """A rollout, or a scaling down, that cannot go on."""
    changing = view.rolling or any(role.extra for role in view.roles)
    if view.phase is Phase.BLOCKED and changing:
        cause = worst(each for role in view.roles for each in role.current)
    elif view.rolling:
        cause = worst(each for role in view.roles for each in role.current if each.reason is Reason.PODS_REFUSED)
        if cause is None:
            return None
    elif router_is_rolling(view.situation) and view.router.ready:
        cause = view.router.worst
        if cause is None or not _is_grave(view, cause):
            return None
    else:
        return None
    if cause is not None and not _is_grave(view, cause) and cause.reason not in (Reason.LOADING_MODEL, Reason.STARTING):
        return _waiting(Reason.ROLLING_OUT, cause.message)
    step = view.situation.step
    message = cause.message if cause is not None and _is_grave(view, cause) else step.reason if step else ""
    return _stalled(Reason.ROLLOUT_BLOCKED, _and_what_runs(view, message))


def _paused(view: View) -> Verdict | None:
    if view.phase is not Phase.PAUSED:
        return None
    as_wanted = view.router.exists and all(
        role.exists and not role.outdated and len(role.living) == role.wanted for role in view.roles
    )
    if as_wanted and not view.unsettled:
        return None
    told = Told(Reason.PAUSED, "the spec is not acted on while spec.paused is true; set it to false")
    return Verdict(ConditionStatus.UNKNOWN, told)


def _rolling(view: View) -> Verdict | None:
    if view.rolling:
        draining = [name for role in view.roles for name in role.draining]
        if draining and view.phase is Phase.ROLLING:
            return _waiting(Reason.DRAINING, f"{_listed(draining)} to be replaced once running turns are over")
        return _waiting(Reason.ROLLING_OUT, _step(view))
    if view.unsettled:
        previous = view.previous_ready
        reconciling = previous_condition(view.situation.previous, ConditionType.RECONCILING)
        told = Told(Reason.ROLLING_OUT, "waiting for the StatefulSet controller to see what has changed")
        if text(reconciling, "reason") in set(Reason):
            told = Told(Reason(text(reconciling, "reason")), text(reconciling, "message"))
        if previous.get("status") == ConditionStatus.TRUE and text(previous, "reason") in set(Reason):
            ready = Told(Reason(text(previous, "reason")), text(previous, "message"))
            return Verdict(ConditionStatus.TRUE, ready, reconciling=told)
        return Verdict(ConditionStatus.UNKNOWN, told, reconciling=told)
    return None


def _suspended(view: View) -> Verdict | None:
    if not view.suspended:
        return None
    if view.phase is Phase.SCALING or any(role.extra for role in view.roles):
        return _waiting(*_scaling(view))
    broken = worst(each for each in view.router.findings if _is_grave(view, each))
    if broken is not None:
        return _stalled(broken.reason, broken.message)
    which = (
        "suspend is true" if view.situation.resource and view.situation.resource.spec.suspend else "a role is at zero"
    )
    return Verdict(
        ConditionStatus.TRUE, Told(Reason.SUSPENDED, f"{which}: no engine serves, and the router answers 503")
    )


def _engines_missing(view: View) -> Verdict | None:
    if view.serves_wanted:
        return None
    cause = worst(each for role in view.roles if not role.ready for each in role.findings)
    if cause is not None and _is_grave(view, cause):
        return _stalled(cause.reason, cause.message)
    waits = cause is not None and cause.reason not in (Reason.LOADING_MODEL, Reason.STARTING)
    if view.phase is Phase.BLOCKED and view.situation.step is not None and not waits:
        return _stalled(Reason.START_TIMED_OUT, f"{view.situation.step.reason}; see its events and log")
    if cause is not None:
        return _waiting(cause.reason, cause.message)
    if view.phase is Phase.SCALING:
        return _waiting(*_scaling(view))
    return _waiting(Reason.STARTING, _step(view))


def _router_missing(view: View) -> Verdict | None:
    rolling = router_is_rolling(view.situation)
    if view.router.ready and not rolling:
        return None
    cause = view.router.worst
    if view.router.ready:
        return _waiting(Reason.ROLLING_OUT, cause.message if cause is not None else "routers are being replaced")
    if cause is None:
        return _waiting(Reason.STARTING, "the router's pods are being made")
    if _is_grave(view, cause):
        return _stalled(cause.reason, cause.message)
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
    words = " and ".join(f"{role.ready} of {role.wanted} {role.role.value}" for role in view.roles)
    ready = Told(Reason.SERVING, f"{words} engines serve")
    if view.phase is Phase.SCALING or any(role.extra for role in view.roles):
        return Verdict(ConditionStatus.TRUE, ready, reconciling=Told(*_scaling(view)))
    missing = [each for group in (*view.roles, view.router) if group.short for each in group.findings]
    cause = worst(missing)
    if view.reached or not any(group.short for group in (*view.roles, view.router)):
        return Verdict(ConditionStatus.TRUE, ready)
    if cause is not None and _is_grave(view, cause):
        return Verdict(ConditionStatus.TRUE, ready)
    told = Told(cause.reason, cause.message) if cause is not None else Told(Reason.STARTING, _step(view))
    return Verdict(ConditionStatus.TRUE, ready, reconciling=told)


def _scaling(view: View) -> tuple[Reason, str]:
    draining = [name for role in view.roles for name in role.draining]
    if draining:
        return Reason.DRAINING, f"{_listed(draining)} to end once running turns are over, as fewer are wanted"
    down = any(role.extra for role in view.roles)
    return (Reason.SCALING_DOWN if down else Reason.SCALING_UP), _step(view)


def _step(view: View) -> str:
    return view.situation.step.reason if view.situation.step is not None else "pods are being made"


def _listed(pods: Sequence[str]) -> str:
    return f"waiting for {', '.join(pods)}"
