"""A small world for the planner: StatefulSet controller, kubelet, scheduler, routers and time.

The controller follows ``pkg/controller/statefulset/stateful_set_control.go`` (1.36) for RollingUpdate with a partition
and podManagementPolicy Parallel, with the feature MaxUnavailableStatefulSet off and on: which revision a pod comes back
at, that one pod is replaced at a time, and when the current revision becomes the update revision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvloop_connector.settings import Role
from kvloop_operator.rollout import (
    Action,
    ApplyStatefulSet,
    Breakage,
    DeletePod,
    Desired,
    DrainReport,
    Fault,
    MarkDraining,
    Observed,
    Pod,
    RoleState,
    Settings,
    StatefulSet,
    Step,
    UnmarkDraining,
)

Plan = Callable[[Desired, Observed, float], Step | None]

ROLES = (Role.PREFILL, Role.DECODE)
TICK = 10.0
HANDLE_TTL = 50.0
STEPS_A_RECONCILE = 8


@dataclass(slots=True)
class Stateful:
    """A StatefulSet: what is written, and what its controller has made of it."""

    replicas: int
    partition: int
    template: str
    kv: str
    current: str
    current_kv: str
    update: str
    settled: bool = True


@dataclass(slots=True)
class World:
    """Everything but the planner; ``tick`` moves it on, ``reconcile`` lets the planner act.

    templates: version of each role's template beside the KV revision.
    broken_kv: revisions whose engines never start.
    accelerators: how many pods of a role can run at a time.
    """

    plan: Plan
    wanted: dict[Role, int]
    surge: int = 0
    kv: int = 0
    templates: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 0))
    broken_kv: dict[str, Fault] = field(default_factory=dict)
    accelerators: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 99))
    paused: bool = False
    suspend: bool = False
    max_unavailable_feature: bool = False
    load_ticks: int = 2
    now: float = 1000.0
    routers_up: bool = True
    traffic: bool = True
    turn_seconds: float = TICK
    operator_delay: int = 0
    controller_delay: int = 0
    crash_after: int | None = None
    sets: dict[Role, Stateful] = field(default_factory=dict)
    pods: dict[Role, dict[int, Pod]] = field(default_factory=lambda: {role: {} for role in ROLES})
    scheduled: dict[str, float] = field(default_factory=dict)
    turns: dict[str, list[float]] = field(default_factory=dict)
    handles: dict[str, list[float]] = field(default_factory=dict)
    routers_know: set[str] = field(default_factory=set)
    names: int = 0
    writes: int = 0
    last: Step | None = None
    due: float = 0.0
    changed: bool = True
    reports: Mapping[str, DrainReport] = field(default_factory=dict)
    before_action: Callable[[Action], None] = lambda action: None
    after_reconcile: Callable[[], None] = lambda: None

    # What the user and the operator see.

    @property
    def kv_revision(self) -> str:
        return f"kv{self.kv}"

    def template(self, role: Role) -> str:
        return f"{role}-{self.kv_revision}-{self.templates[role]}"

    def replicas_wanted(self, role: Role) -> int:
        return 0 if self.suspend else self.wanted[role]

    def settings(self) -> Settings:
        return Settings(
            drain_timeout_seconds=60, honour_handles_seconds=20, max_surge=self.surge, start_seconds=40 * TICK
        )

    def desired(self) -> Desired:
        return Desired(dict(self.wanted), self.kv_revision, self.settings(), paused=self.paused, suspend=self.suspend)

    def observed(self) -> Observed:
        return Observed({role: self._state(role) for role in ROLES}, self._reports())

    def _state(self, role: Role) -> RoleState:
        stateful = self.sets.get(role)
        if stateful is None:
            return RoleState()
        return RoleState(
            StatefulSet(
                replicas=stateful.replicas,
                partition=stateful.partition,
                template_wanted=stateful.template == self.template(role),
                settled=stateful.settled,
                current_revision=stateful.current,
                update_revision=stateful.update,
            ),
            tuple(self.pods[role].values()),
        )

    def _reports(self) -> Mapping[str, DrainReport]:
        if not self.routers_up:
            return {}
        reports = {}
        for pod in self.everybody():
            if pod.draining_since is not None:
                deadlines = self.live_handles(pod)
                reports[pod.uid] = DrainReport(
                    running_turns=len(self.turns.get(pod.uid, ())),
                    live_handles=len(deadlines),
                    last_deadline=max(deadlines, default=None),
                    acknowledged=pod.uid in self.routers_know,
                )
        return reports

    def everybody(self) -> list[Pod]:
        return [pod for role in ROLES for pod in self.pods[role].values()]

    def live_handles(self, pod: Pod) -> list[float]:
        return [deadline for deadline in self.handles.get(pod.uid, ()) if deadline > self.now]

    def is_condemned(self, role: Role, pod: Pod) -> bool:
        """Whether the StatefulSet controller may delete the pod by what is written now."""
        stateful = self.sets[role]
        return pod.ordinal >= stateful.replicas or (
            pod.ordinal >= stateful.partition and pod.template_revision != stateful.template
        )

    # Time.

    def tick(self) -> None:
        self.now += TICK
        self._run_pods()
        self._run_turns()
        if self.controller_delay:
            self.controller_delay -= 1
        else:
            for role in self.sets:
                self._run_controller(role)
        if self.operator_delay:
            self.operator_delay -= 1
        else:
            self.reconcile()

    def reconcile(self) -> None:
        """The operator: plans when something has changed, the routers' reports included, and when it is due."""
        reports = self._reports()
        if not (self.changed or reports != self.reports or self.now >= self.due):
            return
        self.changed = False
        for _ in range(STEPS_A_RECONCILE):
            observed = self.observed()
            self.reports = observed.reports
            self.last = self.plan(self.desired(), observed, self.now)
            if self.last is None or not self.last.actions:
                self.due = float("inf") if self.last is None or self.last.again_at is None else self.last.again_at
                break
            for action in self.last.actions:
                if self.crash_after is not None:
                    self.crash_after -= 1
                    if self.crash_after < 0:
                        self.crash_after, self.changed = None, True
                        return
                self.act(action)
        else:
            raise AssertionError(f"the planner does not come to rest within one reconcile: {self.last}")
        self.after_reconcile()

    # What the operator does.

    def act(self, action: Action) -> None:
        self.before_action(action)
        self.writes += 1
        self.changed = True
        role = action.role
        if isinstance(action, ApplyStatefulSet):
            self._apply(action)
            return
        pod = next(pod for pod in self.pods[role].values() if pod.uid == action.uid)
        if isinstance(action, MarkDraining):
            self.pods[role][pod.ordinal] = replace(pod, draining_since=float(action.since))
        elif isinstance(action, UnmarkDraining):
            self.pods[role][pod.ordinal] = replace(pod, draining_since=None)
        elif isinstance(action, DeletePod):
            self.delete(role, pod)

    def _apply(self, action: ApplyStatefulSet) -> None:
        role, template = action.role, self.template(action.role)
        if role not in self.sets:
            self.sets[role] = Stateful(
                action.replicas, action.partition, template, self.kv_revision, template, self.kv_revision, template
            )
            return
        stateful = self.sets[role]
        stateful.replicas, stateful.partition = action.replicas, action.partition
        stateful.template, stateful.kv = template, self.kv_revision
        stateful.settled = False

    def delete(self, role: Role, pod: Pod) -> None:
        if not pod.terminating:
            self.pods[role][pod.ordinal] = replace(pod, terminating=True, ready=False)
            self.changed = True

    # The StatefulSet controller.

    def _run_controller(self, role: Role) -> None:
        stateful, pods = self.sets[role], self.pods[role]
        if not stateful.settled or stateful.update != stateful.template:
            stateful.update, stateful.settled, self.changed = stateful.template, True, True
        for ordinal in range(stateful.replicas):
            if ordinal not in pods:
                old = ordinal < stateful.partition
                revision, kv = (stateful.current, stateful.current_kv) if old else (stateful.update, stateful.kv)
                pods[ordinal] = self._new_pod(role, ordinal, revision, kv)
        for pod in list(pods.values()):
            if pod.ordinal >= stateful.replicas:
                self.delete(role, pod)
        self._replace_one(role)
        if len(pods) == stateful.replicas and all(
            pod.ready and pod.template_revision == stateful.update for pod in pods.values()
        ):
            if stateful.current != stateful.update:
                self.changed = True
            stateful.current, stateful.current_kv = stateful.update, stateful.kv

    def _replace_one(self, role: Role) -> None:
        stateful, pods = self.sets[role], self.pods[role]
        if self.max_unavailable_feature and not all(pods[ordinal].ready for ordinal in range(stateful.replicas)):
            return
        for ordinal in range(stateful.replicas - 1, stateful.partition - 1, -1):
            pod = pods[ordinal]
            if pod.template_revision != stateful.update and not pod.terminating:
                self.delete(role, pod)
                return
            if not pod.ready:
                return

    def _new_pod(self, role: Role, ordinal: int, revision: str, kv: str) -> Pod:
        self.names += 1
        self.changed = True
        return Pod(f"{role}-{ordinal}", f"u{self.names}", ordinal, revision, kv, ready=False, not_ready_since=self.now)

    # Scheduler and kubelet.

    def _run_pods(self) -> None:
        for role in ROLES:
            pods = self.pods[role]
            for pod in list(pods.values()):
                if pod.terminating and not self._running(pod):
                    del pods[pod.ordinal]
                    self.changed = True
            if any(pod.uid not in self.scheduled for pod in pods.values()):
                self._schedule(role)
            for pod in list(pods.values()):
                if not pod.terminating and not pod.ready and pod.uid in self.scheduled:
                    self._start(role, pod)

    def _schedule(self, role: Role) -> None:
        pods = self.pods[role]
        free = self.accelerators[role] - sum(pod.uid in self.scheduled for pod in pods.values())
        for pod in sorted(pods.values(), key=lambda pod: pod.not_ready_since):
            if pod.uid in self.scheduled or pod.terminating:
                continue
            if free > 0:
                free -= 1
                self.scheduled[pod.uid] = self.now + self.load_ticks * TICK
                if pod.broken is not None:
                    self._change(role, replace(pod, broken=None))
            elif pod.broken is None:
                self._change(role, replace(pod, broken=Breakage(Fault.UNSCHEDULABLE, "no accelerator is free")))

    def _start(self, role: Role, pod: Pod) -> None:
        fault = self.broken_kv.get(pod.kv_revision)
        if fault is not None:
            if pod.broken is None:
                self._change(role, replace(pod, broken=Breakage(fault, "it does not start")))
        elif self.now >= self.scheduled[pod.uid]:
            self._change(role, replace(pod, ready=True, broken=None))

    def _change(self, role: Role, pod: Pod) -> None:
        self.pods[role][pod.ordinal] = pod
        self.changed = True

    def fail(self, role: Role, ordinal: int, *, ticks: int, fault: Fault | None) -> None:
        """The engine of a pod ends by itself; it is ready again after so many ticks. Its turns and handles are lost."""
        pod = self.pods[role].get(ordinal)
        if pod is None or pod.terminating or pod.uid not in self.scheduled:
            return
        self.turns.pop(pod.uid, None)
        self.handles.pop(pod.uid, None)
        self.scheduled[pod.uid] = self.now + ticks * TICK
        broken = None if fault is None else Breakage(fault, "it ended")
        self._change(role, replace(pod, ready=False, not_ready_since=self.now, broken=broken))

    # Routers and turns.

    def _running(self, pod: Pod) -> bool:
        return any(end > self.now for end in self.turns.get(pod.uid, ()))

    def _run_turns(self) -> None:
        for uid, ends in self.turns.items():
            if ends and ends[0] <= self.now:
                over = [end for end in ends if end <= self.now]
                self.turns[uid] = [end for end in ends if end > self.now]
                self.handles[uid] = [*self.handles.get(uid, ()), *(end + HANDLE_TTL for end in over)][-2:]
        if self.traffic:
            self._start_turn()
        # What routers know of labels is one tick old when they choose engines.
        self.routers_know = {pod.uid for pod in self.everybody() if pod.draining_since is not None}

    def _start_turn(self) -> None:
        """Every engine that has a partner gets a turn, if it has fewer than two."""
        free = {
            role: [pod for pod in self.pods[role].values() if pod.ready and pod.uid not in self.routers_know]
            for role in ROLES
        }
        revisions = [{pod.kv_revision for pod in free[role]} for role in ROLES]
        for role in ROLES:
            for pod in free[role]:
                ends = self.turns.setdefault(pod.uid, [])
                if len(ends) < 2 and pod.kv_revision in revisions[0] and pod.kv_revision in revisions[1]:
                    ends.append(self.now + self.turn_seconds)


def at_rest(plan: Plan, prefill: int, decode: int, **settings: object) -> World:
    """A world in which everything is as wanted and ready."""
    world = World(plan, {Role.PREFILL: prefill, Role.DECODE: decode}, **settings)  # type: ignore[arg-type]
    for role in ROLES:
        template, count = world.template(role), world.wanted[role]
        world.sets[role] = Stateful(count, count, template, "kv0", template, "kv0", template)
        for ordinal in range(count):
            pod = world._new_pod(role, ordinal, template, "kv0")
            world.pods[role][ordinal] = replace(pod, ready=True)
            world.scheduled[pod.uid] = world.now
    return world
