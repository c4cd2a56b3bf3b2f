"""What has to hold in the world at every moment, whatever happens in it: one named invariant each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from kvloop_connector.settings import Role
from kvloop_operator.rollout import Action, ApplyStatefulSet, DeletePod, Fault, MarkDraining, Phase, Pod, UnmarkDraining
from tests.unit.operator.rollout_world import ROLES, World


class Invariant(StrEnum):
    PAIR_STAYS = "a compatible ready pair serves at every moment while replicas allow"
    DRAINED_FIRST = "no undrained pod goes before its bound"
    ONE_STEP = "one step is in flight"
    DRAINS_UNDONE = "cancelled drains are undone"
    WANTED_STAYS = "no pod that is wanted goes"
    PARTITION_AT_REST = "the partition equals replicas at rest"
    CONVERGES = "it ends in a fair world"
    QUIET_AT_REST = "there is no write at rest"
    PAUSED = "nothing is written while paused"
    BLOCKED_SAYS_SO = "a broken revision stops the rollout and the step says so"


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant


@dataclass(slots=True)
class Monitor:
    """Watches every action before it is done, and the world after each reconcile.

    taken: ordinals that the planner has emptied and that are not ready again.
    """

    world: World
    taken: set[tuple[Role, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.world.before_action = self.before
        self.world.after_reconcile = self.after

    def template_was_edited(self) -> None:
        """What was in flight for the old template is no step of the new one."""
        self.taken.clear()

    # Before an action.

    def before(self, action: Action) -> None:
        if self.world.paused:
            raise Broken(Invariant.PAUSED, f"{action}")
        if isinstance(action, ApplyStatefulSet):
            self._before_apply(action)
            return
        pod = next((pod for pod in self.world.pods[action.role].values() if pod.uid == action.uid), None)
        if pod is None or pod.terminating:
            raise Broken(Invariant.QUIET_AT_REST, f"{action}: no such pod")
        if isinstance(action, MarkDraining):
            if not self.world.now - 1 < action.since <= self.world.now:
                raise Broken(Invariant.DRAINED_FIRST, f"{action}: the bound would end at another time")
            self._before_mark(action.role, pod)
        elif isinstance(action, UnmarkDraining):
            if pod.draining_since is None:
                raise Broken(Invariant.QUIET_AT_REST, f"{action} changes nothing")
        elif isinstance(action, DeletePod):
            self._goes(action.role, pod)

    def _before_apply(self, action: ApplyStatefulSet) -> None:
        world, role = self.world, action.role
        stateful = world.sets.get(role)
        if stateful is None:
            return
        template = world.template(role)
        if (stateful.replicas, stateful.partition, stateful.template) == (action.replicas, action.partition, template):
            raise Broken(Invariant.QUIET_AT_REST, f"{action} changes nothing")
        if action.replicas < min(stateful.replicas, world.replicas_wanted(role)):
            raise Broken(Invariant.WANTED_STAYS, f"{action} with {world.replicas_wanted(role)} wanted")
        for pod in world.pods[role].values():
            outdated = pod.template_revision != template
            goes = pod.ordinal >= action.replicas or (pod.ordinal >= action.partition and outdated)
            if goes and not pod.terminating and not world.is_condemned(role, pod):
                self._goes(role, pod)

    def _goes(self, role: Role, pod: Pod) -> None:
        world = self.world
        outdated = pod.template_revision != world.template(role)
        if not outdated and pod.ordinal < world.replicas_wanted(role):
            raise Broken(Invariant.WANTED_STAYS, f"{pod}")
        if pod.broken is None and not self._is_drained(pod):
            raise Broken(Invariant.DRAINED_FIRST, f"{pod} at {world.now}, turns {world.turns.get(pod.uid)}")
        self.taken.add((role, pod.ordinal))

    def _is_drained(self, pod: Pod) -> bool:
        world = self.world
        if pod.draining_since is None:
            return False
        waited = world.now - pod.draining_since
        if waited >= world.settings().drain_timeout_seconds:
            return True
        honoured = waited >= world.settings().honour_handles_seconds or not world.live_handles(pod)
        return world.routers_up and pod.uid in world.routers_know and not world.turns.get(pod.uid) and honoured

    def _before_mark(self, role: Role, pod: Pod) -> None:
        world = self.world
        if pod.draining_since is not None:
            raise Broken(Invariant.QUIET_AT_REST, f"{pod} drains already")
        outdated = pod.template_revision != world.template(role)
        leaves = pod.ordinal >= world.replicas_wanted(role)
        if not outdated and not leaves:
            raise Broken(Invariant.WANTED_STAYS, f"{pod}")
        if world.suspend or not all(world.wanted.values()):
            return
        draining = {(role, other.ordinal) for role, other in self._living() if other.draining_since is not None}
        if not leaves and self._outstanding() - draining - {(role, pod.ordinal)}:
            raise Broken(Invariant.ONE_STEP, f"{pod} while {self._outstanding()}")

    def _outstanding(self) -> set[tuple[Role, int]]:
        world = self.world
        for role, ordinal in list(self.taken):
            pod = world.pods[role].get(ordinal)
            surge = [other for other in world.pods[role].values() if other.ordinal >= world.replicas_wanted(role)]
            replaced = pod is not None and (pod.ready or (_is_unschedulable(pod) and any(s.ready for s in surge)))
            if replaced or ordinal >= world.replicas_wanted(role):
                self.taken.discard((role, ordinal))
        return self.taken

    # After a reconcile.

    def after(self) -> None:
        self._outstanding()
        world = self.world
        if world.paused or not all(role in world.sets and world.sets[role].settled for role in ROLES):
            return
        for role, pod in self._living():
            needed = pod.template_revision == world.template(role) and pod.ordinal < world.replicas_wanted(role)
            if pod.draining_since is not None and needed:
                raise Broken(Invariant.DRAINS_UNDONE, f"{pod}")
        ready = [(role, pod) for role, pod in self._living() if pod.ready]
        kept = [(role, pod) for role, pod in ready if pod.draining_since is None]
        if _has_pair(ready) and not _has_pair(kept) and not self._outage_is_allowed():
            raise Broken(Invariant.PAIR_STAYS, f"{ready}")

    def _living(self) -> list[tuple[Role, Pod]]:
        world = self.world
        return [
            (role, pod)
            for role in ROLES
            for pod in world.pods[role].values()
            if not pod.terminating and not world.is_condemned(role, pod)
        ]

    def _outage_is_allowed(self) -> str:
        """Where nothing can be kept: a role at zero; or a role whose next pod to go, which is its highest outdated one,
        has no other to take its place, even after waiting."""
        world = self.world
        if not all(world.replicas_wanted(role) for role in ROLES):
            return "a role is at zero"
        for role in ROLES:
            outdated = [pod for pod in world.pods[role].values() if pod.template_revision != world.template(role)]
            tried = world.sets[role].replicas >= world.wanted[role] + world.surge
            if outdated and tried and not self._may_serve_without(max(outdated, key=lambda pod: pod.ordinal)):
                return f"{role} has nothing to put in place"
        for role in ROLES:
            for pod in world.pods[role].values():
                if _is_unschedulable(pod):
                    return f"{pod.name} may need the accelerator"
        return ""

    def _may_serve_without(self, gone: Pod) -> bool:
        world = self.world
        revisions: dict[Role, set[str]] = {role: set() for role in ROLES}
        for role in ROLES:
            stateful = world.sets[role]
            for ordinal in range(stateful.replicas):
                pod = world.pods[role].get(ordinal)
                if pod is None or pod.terminating or world.is_condemned(role, pod):
                    revisions[role].add(stateful.current_kv if ordinal < stateful.partition else stateful.kv)
                elif pod.uid != gone.uid and not self._is_unable(pod):
                    revisions[role].add(pod.kv_revision)
        return bool(revisions[Role.PREFILL] & revisions[Role.DECODE])

    def _is_unable(self, pod: Pod) -> bool:
        if pod.ready:
            return False
        return pod.broken is not None or self.world.now >= pod.not_ready_since + self.world.settings().start_seconds

    # At the end.

    def settle(self, ticks: int) -> int:
        """Let time pass in a fair world until the planner has nothing to do; how many ticks that took."""
        world = self.world
        for tick in range(ticks):
            world.tick()
            if world.last is None and not world.changed:
                self._check_rest()
                return tick
        raise Broken(Invariant.CONVERGES, f"{world.last} {world.sets} {world.everybody()}")

    def _check_rest(self) -> None:
        world = self.world
        for role in ROLES:
            stateful, count = world.sets[role], world.replicas_wanted(role)
            pods = list(world.pods[role].values())
            if stateful.partition != stateful.replicas:
                raise Broken(Invariant.PARTITION_AT_REST, f"{role} {stateful}")
            as_wanted = all(
                pod.ready and pod.template_revision == world.template(role) and pod.draining_since is None
                for pod in pods
            )
            if stateful.replicas != count or len(pods) != count or not as_wanted:
                raise Broken(Invariant.CONVERGES, f"{role} {stateful} {pods}")
        writes = world.writes
        for _ in range(3):
            world.changed = True
            world.tick()
        if world.writes != writes:
            raise Broken(Invariant.QUIET_AT_REST, f"{world.last}")

    def settle_blocked(self, ticks: int) -> None:
        """Let time pass with a wanted revision that cannot start: the planner stops, says so and writes nothing."""
        world = self.world
        quiet, writes = 0, -1
        for _ in range(ticks):
            world.tick()
            quiet = quiet + 1 if world.writes == writes else 0
            writes = world.writes
            if quiet >= 60:
                break
        else:
            raise Broken(Invariant.CONVERGES, f"{world.last}")
        starting = any(world.replicas_wanted(role) for role in ROLES)
        if starting and (world.last is None or world.last.phase is not Phase.BLOCKED):
            raise Broken(Invariant.BLOCKED_SAYS_SO, f"{world.last}")


def _is_unschedulable(pod: Pod) -> bool:
    return pod.broken is not None and pod.broken.fault is Fault.UNSCHEDULABLE


def _has_pair(pods: Iterable[tuple[Role, Pod]]) -> bool:
    revisions: dict[Role, set[str]] = {role: set() for role in ROLES}
    for role, pod in pods:
        revisions[role].add(pod.kv_revision)
    return bool(revisions[Role.PREFILL] & revisions[Role.DECODE])
