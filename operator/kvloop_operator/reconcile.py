"""One pass over one resource: read, decide, write. Start reading the operator here.

::

    resource ─ parse ─ check ─▶ desired ─▶ apply children ─▶ observe ─ plan ─▶ act ─▶ ask routers ─▶ assess ─▶ status
       │ not valid, or cannot be deployed                                                              ▲
       └───────────────────────────────────────────────────────────────────────────────────────────────┘

Everything is read from the store; a pass that finds nothing to change writes nothing.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.apply import Children, Place, PredecessorRemains, Resisted
from kvloop_operator.check import check
from kvloop_operator.cluster.api import STATUS_MANAGER, Api
from kvloop_operator.cluster.errors import ApiError, Forbidden, NotFound
from kvloop_operator.cluster.kinds import EVENT, SECRET
from kvloop_operator.cluster.store import Key, Store, owned_by
from kvloop_operator.compare import needs_apply
from kvloop_operator.credentials import material_of
from kvloop_operator.desired import desired
from kvloop_operator.errors import Fault, InvalidResource
from kvloop_operator.facts import Facts, LiveConnector, OperatorSettings, resolve
from kvloop_operator.happenings import event
from kvloop_operator.live import Live, Object, Refusal, text
from kvloop_operator.manifests.common import Manifest
from kvloop_operator.observe import is_ready, is_terminating, live_connector
from kvloop_operator.pods import (
    engine_processes,
    replica_failure,
    router_pods,
    stuck_at,
    unexplained,
    unverified_pairs,
)
from kvloop_operator.reports import PairReport, Reports, Verdict, drain_reports, pair_reports
from kvloop_operator.revision import kv_revision
from kvloop_operator.rollout import Desired, Phase, Settings, Step
from kvloop_operator.rollout_actions import carry_out
from kvloop_operator.routers import Routers
from kvloop_operator.status import Assessment, Situation, assess

_log = logging.getLogger(__name__)

_DRAINING_SECONDS: Final = 1.0
_VERIFYING_SECONDS: Final = (1.0, 15.0)
_WATCHING_SECONDS: Final = 60.0
_MISSING_SECONDS: Final = 10.0
_EXPLAINING: Final = {
    "StatefulSet": ("FailedCreate",),
    "Pod": ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"),
}
_JUST_AFTER_SECONDS: Final = 0.1
_PREDECESSOR_SECONDS: Final = 1.0
_PROBLEM_SECONDS: Final = 15.0
_LAST_PROBLEM_SECONDS: Final = 600.0


@dataclass(slots=True)
class _Memory:
    """What is kept between passes. All of it can be had again: a new operator process starts without.

    secret: the router's Secret as last read; secret_read: since the last whole list.
    pairs: the newest report on each pair of pods. processes: the engines that these are about.
    polls: how often in a row a pair was not verified yet. asked: when the routers were asked last, in Unix seconds.
    resisted: writes that something else undoes. refused: how often in a row the API server refused a write.
    """

    uid: str
    secret: Object | None = None
    secret_read: bool = False
    pairs: dict[tuple[str, str], PairReport] = field(default_factory=dict)
    processes: dict[str, str] = field(default_factory=dict)
    polls: int = 0
    asked: float = 0.0
    resisted: dict[Place, Resisted] = field(default_factory=dict)
    refused: int = 0


@dataclass(slots=True)
class Reconciler:
    """Passes over resources. ``clock``: Unix seconds."""

    api: Api
    store: Store
    routers: Routers
    settings: OperatorSettings
    unschedulable_seconds: float
    clock: Callable[[], float]
    _memories: dict[Key, _Memory] = field(default_factory=dict)

    def read_secrets_anew(self) -> None:
        """Nobody watches Secrets: after a whole list each is read once more."""
        for memory in self._memories.values():
            memory.secret_read = False

    async def reconcile(self, key: Key) -> float | None:
        """One pass; gives in how many seconds another one is needed even if nothing changes. Raises ApiError."""
        found = self.store.resource(key)
        if found is None or is_terminating(found):
            # What it owns goes with it: the garbage collector follows the owner references.
            self._memories.pop(key, None)
            return None
        memory = self._memories.get(key)
        if memory is None or memory.uid != found["metadata"]["uid"]:
            memory = self._memories[key] = _Memory(found["metadata"]["uid"])
        try:
            return await _Pass(self, key, found, memory).run()
        except PredecessorRemains:
            return _PREDECESSOR_SECONDS
        except Forbidden as error:
            if error.namespace_ends:
                return None
            raise
        except NotFound as error:
            _log.info("gone meanwhile", extra={"resource": str(key), "error": str(error)})
            return _PREDECESSOR_SECONDS


@dataclass(slots=True)
class _Pass:
    owner: Reconciler
    key: Key
    found: Object
    memory: _Memory
    again: list[float] = field(default_factory=list)

    async def run(self) -> float | None:
        try:
            # What another version of the operator said is none of this one's business.
            document = {field: value for field, value in self.found.items() if field != "status"}
            resource = DisaggregatedInference.parse(document)
        except InvalidResource as error:
            return await self._say(None, faults=error.faults)
        facts = resolve(resource, self._settings(paused=resource.spec.paused, secret=await self._secret()))
        faults = tuple(check(resource, facts))
        if faults:
            return await self._say(resource, facts=facts, faults=faults)
        manifests = [_wire(manifest) for manifest in desired(resource, facts)]
        children = Children(self.owner.api, self.owner.store, self.key, self.memory.uid, self.memory.resisted)
        if not resource.spec.paused:
            await self._apply_children(children, manifests)
        reports = await self._ask_routers(resource, facts)
        step = None
        if not children.problems:
            step = await self._roll(resource, facts, manifests, children, reports)
        if children.problems:
            self.again.append(min(_PROBLEM_SECONDS * 2.0**self.memory.refused, _LAST_PROBLEM_SECONDS))
            self.memory.refused = min(self.memory.refused + 1, 16)
        else:
            self.memory.refused = 0
        return await self._say(
            resource,
            facts=facts,
            step=step,
            unreachable=tuple(why for name, why in reports.failures.items() if name in self._serving_routers()),
            children=children,
        )

    def _settings(self, *, paused: bool, secret: Object | None) -> OperatorSettings:
        settings = self.owner.settings
        return OperatorSettings(
            router_image=settings.router_image,
            bind_address=settings.bind_address,
            apis=settings.apis,
            secret_material=None if paused and secret is None else material_of(secret),
            operator_namespace=settings.operator_namespace,
            kv_heads=settings.kv_heads,
            live_template_version=self._live_template_version(),
            live_connectors=dict(self._live_connectors()),
        )

    def _live(self) -> Live:
        live = self.owner.store.live(self.key, self.memory.uid)
        secret = self.memory.secret
        if secret is None or not owned_by(secret, self.memory.uid):
            return live
        children = {**live.children, (SECRET.kind, secret["metadata"]["name"]): secret}
        return Live(children=children, pods=live.pods)

    def _live_template_version(self) -> str | None:
        for role in Role:
            place = "StatefulSet", names.engine_name(self.key.name, role)
            statefulset = self._live().children.get(place)
            if statefulset is not None:
                found = statefulset["metadata"].get("annotations", {}).get(names.ANNOTATION_TEMPLATE_VERSION)
                return str(found) if found is not None else None
        return None

    def _live_connectors(self) -> Iterator[tuple[Role, LiveConnector]]:
        for role in Role:
            found = self._live().children.get(("StatefulSet", names.engine_name(self.key.name, role)))
            connector = live_connector(found) if found is not None else None
            if connector is not None:
                yield role, connector

    async def _secret(self) -> Object | None:
        if not self.memory.secret_read:
            try:
                name = names.router_name(self.key.name)
                self.memory.secret = await self.owner.api.get(SECRET, self.key.namespace, name)
            except NotFound:
                self.memory.secret = None
            self.memory.secret_read = True
        return self.memory.secret

    async def _apply_children(self, children: Children, manifests: Sequence[Manifest]) -> None:
        live = self._live()
        for manifest in manifests:
            place = manifest["kind"], manifest["metadata"]["name"]
            if place[0] == "StatefulSet":
                continue
            written = await children.apply_one(manifest, live.children.get(place))
            if place[0] == SECRET.kind and written is not None:
                self.memory.secret = written
        await children.remove_unwanted(manifests, live)

    def _serving_routers(self) -> set[str]:
        """Those that have to answer: others may be starting, or on their way out."""
        pods = router_pods(self._live().pods)
        return {pod["metadata"]["name"] for pod in pods if is_ready(pod) and not is_terminating(pod)}

    def _forget_processes_that_ended(self, pods: Sequence[Object]) -> None:
        """What was seen of an engine says nothing about the one that its pod has started since."""
        before, now = self.memory.processes, engine_processes(pods, self.memory.processes)
        same = {uid for uid, process in now.items() if before.get(uid, process) in ("", process)}
        self.memory.pairs = {key: pair for key, pair in self.memory.pairs.items() if same.issuperset(key)}
        self.memory.processes = now

    async def _ask_routers(self, resource: DisaggregatedInference, facts: Facts) -> Reports:
        """What the routers say, asked while something drains or a pair is not verified yet, and else once a minute:
        what is reused can be found wrong at any time."""
        pods = self._live().pods
        self._forget_processes_that_ended(pods)
        draining = any(names.LABEL_DRAINING in pod["metadata"].get("labels", {}) for pod in pods)
        routers = router_pods(pods)
        unverified = resource.spec.router.canary.enabled and unverified_pairs(pods, self.memory.pairs)
        material, now = facts.secret_material, self.owner.clock()
        reuses = resource.spec.router.reuse and resource.spec.kv_transfer.bidirectional_kv_xfer
        watched = reuses and any(is_ready(pod) for pod in routers)
        if watched:
            self.again.append(_WATCHING_SECONDS)
        due = watched and now - self.memory.asked >= _WATCHING_SECONDS
        if not unverified:
            self.memory.polls = 0
        if material is None or not routers or not (draining or unverified or due):
            return Reports(routers=len(routers))
        self.memory.asked = now
        reports = await self.owner.routers.ask(routers, material.admin_token)
        leaving = {pod["metadata"]["name"] for pod in routers if is_terminating(pod)}
        staying = [report for report in reports.answered if report.router not in leaving]
        for key, pair in pair_reports(Reports(routers=len(staying), answered=tuple(staying))).items():
            known = self.memory.pairs.get(key)
            if known is None or pair.verdict is not Verdict.UNKNOWN:
                self.memory.pairs[key] = pair
        if draining:
            self.again.append(_DRAINING_SECONDS)
        if unverified:
            first, last = _VERIFYING_SECONDS
            self.again.append(min(first * 2 ** min(self.memory.polls // 5, 8), last))
            self.memory.polls += 1
        return reports

    async def _roll(
        self,
        resource: DisaggregatedInference,
        facts: Facts,
        manifests: Sequence[Manifest],
        children: Children,
        reports: Reports,
    ) -> Step | None:
        rollout = resource.spec.rollout
        wanted = Desired(
            replicas={Role.PREFILL: resource.spec.prefill.replicas, Role.DECODE: resource.spec.decode.replicas},
            kv_revision=kv_revision(resource, facts),
            settings=Settings(
                drain_timeout_seconds=rollout.drain_timeout_seconds,
                honour_handles_seconds=rollout.honour_handles_seconds,
                max_surge=rollout.max_surge,
                start_seconds=resource.spec.engine.startup_timeout_seconds + 600,
            ),
            paused=resource.spec.paused,
            suspend=resource.spec.suspend,
        )
        return await carry_out(
            wanted,
            statefulsets(manifests),
            children=children,
            live=self._live,
            drains=lambda: drain_reports(reports, self._live().pods),
            clock=self.owner.clock,
        )

    async def _refusals(self) -> tuple[Refusal, ...]:
        """Why pods that should be there were not made, or do not start."""
        live = self._live()
        of_routers = replica_failure(live, self.key.name)
        found = [of_routers] if of_routers is not None else []
        now = self.owner.clock()
        for kind, name in unexplained(live, self.key.name, now):
            fields = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
            events, _ = await self.owner.api.list(EVENT, self.key.namespace, fields=fields)
            told = [each for each in events if each.get("reason") in _EXPLAINING[kind]]
            latest = max(told, key=lambda each: str(each.get("lastTimestamp") or ""), default=None)
            if latest is not None:
                found.append(Refusal(kind, name, text(latest, "message")))
            self.again.append(_MISSING_SECONDS)
        moment = stuck_at(live.pods, now)
        if moment is not None:
            self.again.append(moment - now + _JUST_AFTER_SECONDS)
        return tuple(found)

    async def _say(
        self,
        resource: DisaggregatedInference | None,
        *,
        facts: Facts | None = None,
        faults: tuple[Fault, ...] = (),
        step: Step | None = None,
        unreachable: tuple[str, ...] = (),
        children: Children | None = None,
    ) -> float | None:
        live, now = self._live(), self.owner.clock()
        refusals = await self._refusals() if resource is not None and not faults else ()
        revision = kv_revision(resource, facts) if resource is not None and facts is not None and not faults else ""
        meta = self.found["metadata"]
        assessment = assess(
            Situation(
                name=self.key.name,
                namespace=self.key.namespace,
                generation=meta["generation"],
                previous=self.found.get("status") or {},
                resource=resource,
                facts=facts,
                faults=faults,
                wanted_revision=revision,
                live=Live(children=live.children, pods=live.pods, refusals=refusals),
                step=step,
                pairs=self.memory.pairs,
                unreachable=unreachable,
                problems=tuple(children.problems) if children is not None else (),
                unschedulable_seconds=self.owner.unschedulable_seconds,
                now=now,
            )
        )
        await self._write_status(assessment)
        moments = [step.again_at if step is not None else None, assessment.again_at]
        self.again += [max(moment - now, 0.1) for moment in moments if moment is not None]
        if step is not None and step.phase is Phase.PAUSED:
            self.again.clear()
        return min(self.again, default=None)

    async def _write_status(self, assessment: Assessment) -> None:
        meta = self.found["metadata"]
        paths = needs_apply(self.found, {"status": assessment.status}, manager=STATUS_MANAGER)
        if not paths:
            return
        written = await self.owner.api.apply_status(self.key.namespace, self.key.name, meta["uid"], assessment.status)
        self.owner.store.put(written)
        _log.info("status", extra={"resource": str(self.key), "paths": paths[:5]})
        for transition in assessment.transitions:
            try:
                await self.owner.api.create_event(event(self.found, transition, self.owner.clock()))
            except ApiError as error:
                _log.warning("an event was not written", extra={"resource": str(self.key), "error": str(error)})


def statefulsets(manifests: Sequence[Manifest]) -> Mapping[Role, Manifest]:
    """Each role's StatefulSet among a resource's manifests."""
    found = [manifest for manifest in manifests if manifest["kind"] == "StatefulSet"]
    return {Role(manifest["metadata"]["labels"][names.LABEL_ROLE]): manifest for manifest in found}


def _wire(manifest: Manifest) -> dict[str, Any]:
    """A manifest as it is applied: text in a Secret becomes what the API server keeps, so that it can be compared."""
    if manifest["kind"] != SECRET.kind or "stringData" not in manifest:
        return manifest
    data = {key: base64.b64encode(value.encode()).decode() for key, value in manifest["stringData"].items()}
    return {**{field: value for field, value in manifest.items() if field != "stringData"}, "data": data}
