"""The pods of a role, or of the router: how many there are, how many serve, and what is wrong with the others."""

from __future__ import annotations

from dataclasses import dataclass

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.live import Object, count, part, text
from kvloop_operator.manifests.common import Context
from kvloop_operator.manifests.engine import statefulset
from kvloop_operator.observe import is_ready, is_terminating, pod_of, pods_of, statefulset_of
from kvloop_operator.rollout.facts import Pod, StatefulSet
from kvloop_operator.serving import has_own_store
from kvloop_operator.status.findings import Finding, finding, refused, terminating_until, worst
from kvloop_operator.status.situation import Situation


@dataclass(frozen=True, slots=True)
class Group:
    """Pods that do the same.

    exists: whether the StatefulSet or Deployment is there. wanted: None where neither it nor the spec says how many.
    pods: names of those that are not on their way out. updated: those of them at the wanted revision.
    findings: what is wrong, per pod, and with making pods; those of pods at the wanted revision only in ``current``.
    until: when time alone changes a finding.
    """

    name: str
    exists: bool
    wanted: int | None
    pods: tuple[str, ...]
    ready: int
    updated: int
    findings: tuple[Finding, ...]
    current: tuple[Finding, ...]
    until: float | None

    @property
    def worst(self) -> Finding | None:
        return worst(self.findings)

    @property
    def short(self) -> bool:
        """Whether fewer are ready than are wanted."""
        return self.ready < (self.wanted or 0)

    @property
    def summary(self) -> str:
        return f"{self.ready}/{self.wanted or 0}"


@dataclass(frozen=True, slots=True)
class Engines(Group):
    """The engines of one role.

    revision: the KV revision that they should have. statefulset: as the planner sees it, None where there is none or
        nothing says what it should be. living: those that are not on their way out.
    """

    role: Role
    revision: str
    statefulset: StatefulSet | None
    living: tuple[Pod, ...]

    @property
    def outdated(self) -> bool:
        """Whether an engine has, or will get back, another template than the wanted one."""
        own = self.statefulset
        if own is None or not own.template_wanted:
            return own is not None
        if not own.settled:
            return any(pod.kv_revision != self.revision for pod in self.living)
        return any(pod.template_revision != own.update_revision for pod in self.living)

    @property
    def extra(self) -> bool:
        """Whether there are more pods than are wanted."""
        return self.wanted is not None and len(self.living) > self.wanted

    @property
    def draining(self) -> tuple[str, ...]:
        return tuple([pod.name for pod in self.living if pod.draining_since is not None])

    def ready_revisions(self) -> frozenset[str]:
        """KV revisions of the engines that are ready."""
        return frozenset([pod.kv_revision for pod in self.living if pod.ready])


def engines(situation: Situation, role: Role) -> Engines:
    """The engines of ``role``."""
    name = names.engine_name(situation.name, role)
    found = situation.live.children.get(("StatefulSet", name))
    own = _statefulset(situation, role)
    pods = sorted(pods_of(situation.live, name), key=lambda pod: text(pod, "metadata", "name"))
    living = tuple([pod_of(pod) for pod in pods if not is_terminating(pod)])
    outdated = frozenset(
        [pod.uid for pod in living if own is not None and pod.template_revision != own.update_revision]
    )
    refusal = refused(situation.live.refusals, kind="StatefulSet", name=name)
    findings = _findings(situation, pods)
    return Engines(
        name=name,
        exists=found is not None,
        wanted=_wanted_engines(situation, role, found),
        pods=tuple([pod.name for pod in living]),
        ready=sum(pod.ready for pod in living),
        updated=_updated_engines(situation, role, own, living),
        findings=(*[each for _, each in findings], *([refusal] if refusal is not None else [])),
        current=(*[each for uid, each in findings if uid not in outdated], *([refusal] if refusal is not None else [])),
        until=_until(findings, pods),
        role=role,
        revision=situation.wanted_revision,
        statefulset=own,
        living=living,
    )


def router(situation: Situation) -> Group:
    """The routers."""
    name = names.router_name(situation.name)
    wanted = situation.resource.spec.router.replicas if situation.resource is not None else None
    return _deployed(situation, name, names.ROUTER, wanted)


def handle_store(situation: Situation) -> Group:
    """The server in which routers share handles; none is wanted where the resource makes none."""
    wanted = int(has_own_store(situation.resource.spec)) if situation.resource is not None else 0
    return _deployed(situation, names.store_name(situation.name), names.STORE, wanted)


def _deployed(situation: Situation, name: str, role: str, wanted: int | None) -> Group:
    deployment = situation.live.children.get(("Deployment", name))
    pods = sorted(
        (pod for pod in situation.live.pods if text(pod, "metadata", "labels", names.LABEL_ROLE) == role),
        key=lambda pod: text(pod, "metadata", "name"),
    )
    living = [pod for pod in pods if not is_terminating(pod) and not _has_ended(pod)]
    if wanted is None and deployment is not None:
        wanted = count(deployment, "spec", "replicas")
    if len(living) >= (wanted or 0):
        # A ReplicaSet makes another pod in place of one that has ended, and leaves that one lying.
        pods = [pod for pod in pods if not _has_ended(pod)]
    refusal = refused(situation.live.refusals, kind="ReplicaSet", name=name)
    findings = _findings(situation, pods)
    told = (*[each for _, each in findings], *([refusal] if refusal is not None else []))
    return Group(
        name=name,
        exists=deployment is not None,
        wanted=wanted,
        pods=tuple([text(pod, "metadata", "name") for pod in living]),
        ready=sum(is_ready(pod) for pod in living),
        updated=count(deployment, "status", "updatedReplicas"),
        findings=told,
        current=told,
        until=_until(findings, pods),
    )


def _has_ended(pod: Object) -> bool:
    return text(pod, "status", "phase") in ("Failed", "Succeeded")


def router_is_rolling(situation: Situation) -> bool:
    """Whether routers of another configuration are still being replaced."""
    deployment = situation.live.children.get(("Deployment", names.router_name(situation.name)))
    if deployment is None:
        return False
    unseen = part(deployment, "status").get("observedGeneration") != part(deployment, "metadata").get("generation")
    total = count(deployment, "status", "replicas")
    return unseen or count(deployment, "status", "updatedReplicas") < total


def _statefulset(situation: Situation, role: Role) -> StatefulSet | None:
    if situation.resource is None or situation.facts is None or situation.faults or not situation.wanted_revision:
        return None
    context = Context(situation.resource, situation.facts, situation.wanted_revision)
    return statefulset_of(situation.live, statefulset(context, role))


def _findings(situation: Situation, pods: list[Object]) -> list[tuple[str, Finding]]:
    found = []
    for pod in pods:
        each = finding(
            pod,
            unschedulable_seconds=situation.unschedulable_seconds,
            now=situation.now,
            refusals=situation.live.refusals,
        )
        if each is not None:
            found.append((text(pod, "metadata", "uid"), each))
    return found


def _until(findings: list[tuple[str, Finding]], pods: list[Object]) -> float | None:
    moments = [each.until for _, each in findings if each.until is not None]
    stuck = {each.subject for _, each in findings}
    for pod in pods:
        end = terminating_until(pod)
        if end is not None and text(pod, "metadata", "name") not in stuck:
            moments.append(end)
    return min(moments, default=None)


def _wanted_engines(situation: Situation, role: Role, statefulset: Object | None) -> int | None:
    if situation.resource is None:
        return None if statefulset is None else count(statefulset, "spec", "replicas")
    spec = situation.resource.spec
    own = spec.prefill if role is Role.PREFILL else spec.decode
    return 0 if spec.suspend else own.replicas


def _updated_engines(situation: Situation, role: Role, own: StatefulSet | None, living: tuple[Pod, ...]) -> int:
    if own is None or not own.settled:
        # Which revision the wanted template has is not known yet, or no longer.
        return max(0, min(count(situation.previous, role.value, "updated"), len(living)))
    if not own.template_wanted:
        return 0
    return sum(pod.template_revision == own.update_revision for pod in living)
