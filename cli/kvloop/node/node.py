"""The local node: start reading here.

``LocalNode`` holds what is wanted (manifests) and what is there (pods), and one task that brings the second to the
first whenever either changed. What to do next is decided in ``converge``; how a pod comes about, in ``pod_plan``.
"""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import aiohttp

from kvloop.node import engines_file
from kvloop.node.addresses import PodNetwork
from kvloop.node.converge import Create, Delete, Existing, is_rolled_out, next_steps
from kvloop.node.engines_file import EnginePod
from kvloop.node.errors import NodeUnavailable, NoSuchPod, PodsNotReady, UnsupportedManifest
from kvloop.node.images import ProcessImage
from kvloop.node.model import PodIdentity, PodTemplate
from kvloop.node.pod import Pod, PodStatus, PodSurroundings
from kvloop.node.pod_plan import Place, plan_pod
from kvloop.node.restarts import BackOff
from kvloop.node.workloads import Wanted, Workload, read_manifests

Key = tuple[str, str, str]

_HASH_LABEL = {"StatefulSet": "controller-revision-hash", "Deployment": "pod-template-hash"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How this node behaves. Times in seconds.

    probe_period_limit: startup and readiness probes are asked at least this often; None keeps the manifest's periods.
    shutdown_grace: how long pods get when the whole node stops; preStop hooks do not run then.
    host_paths: absolute paths that mean the machine's own file wherever a manifest names them.
    """

    back_off: BackOff = field(default_factory=BackOff)
    probe_period_limit: float | None = None
    shutdown_grace: float = 5
    host_paths: tuple[Path, ...] = ()


@dataclass(slots=True)
class _State:
    """What the node knows of one workload beyond its manifest: old templates, and the revision before an update."""

    current: str
    templates: dict[str, PodTemplate] = field(default_factory=dict)


class LocalNode:
    """``async with LocalNode(manifests, images, state_dir=…) as node: await node.ready()``.

    state_dir: pods' directories, logs, and ``engines.json``; it is made if need be and stays.
    Raises, on entry, ``UnsupportedManifest`` for manifests that it cannot honour, and ``NodeUnavailable`` where it
    cannot run.
    """

    def __init__(
        self,
        manifests: Iterable[Mapping[str, Any]],
        images: Mapping[str, ProcessImage],
        *,
        state_dir: Path,
        settings: NodeSettings | None = None,
    ) -> None:
        self.state_dir = state_dir.resolve()
        self.engines_file = engines_path(self.state_dir)
        self.settings = settings or NodeSettings()
        self._manifests = list(manifests)
        self._images = dict(images)
        self._wanted = Wanted(workloads=(), objects=read_manifests(()).objects, notices=())
        self._states: dict[Key, _State] = {}
        self._pods: dict[str, tuple[Key, int | None, Pod]] = {}
        self._engines: list[dict[str, str]] | None = None
        self._changed = asyncio.Event()
        self._news = asyncio.Condition()
        self._closing = False
        self._lock: TextIO | None = None

    async def __aenter__(self) -> Self:
        if sys.platform != "linux":
            raise NodeUnavailable("the local node needs Linux: loopback networks and parent-death signals")
        self._network = PodNetwork.claim()
        try:
            self._claim_state_dir()
            self._want(self._manifests)
            self._publish_engines()
        except BaseException:
            self._let_go()
            raise
        # Connections are not kept: a probe asks whether the container takes new ones.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._converge()
        self._tasks.create_task(self._converge_for_ever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        for _, _, pod in self._pods.values():
            pod.stop(self.settings.shutdown_grace, hooks=False)
        self._changed.set()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._session.close()
            self._let_go()

    @property
    def notices(self) -> tuple[str, ...]:
        """What the manifests ask for and this node leaves out, one sentence each."""
        return self._wanted.notices

    def apply(self, manifests: Iterable[Mapping[str, Any]]) -> None:
        """Converge to ``manifests`` from now on; ``ready`` waits for it. Nothing changes when it raises."""
        self._want(manifests)
        self._refresh_files()
        self._converge()
        self._changed.set()

    def pods(self) -> tuple[PodStatus, ...]:
        """All pods, by name, those that terminate included."""
        return tuple(self._pods[name][2].status() for name in sorted(self._pods))

    async def delete_pod(self, name: str, *, grace: float | None = None) -> None:
        """End a pod, as ``kubectl delete pod``, and wait until it is gone. Its workload makes another one."""
        if name not in self._pods:
            raise NoSuchPod(f"there is no pod {name!r} on this node")
        pod = self._pods[name][2]
        pod.stop(grace)
        await self.wait_for(lambda: all(entry[2] is not pod for entry in self._pods.values()))

    async def ready(self, *, timeout_seconds: float | None = None, restarts: int = 3) -> None:
        """Wait until everything wanted runs, is Ready and up to date, and nothing else is there.

        Raises ``PodsNotReady`` when the time is over, or when a pod that is not Ready was restarted so often.
        """

        def settled() -> bool:
            for status in self.pods():
                if not status.ready and _all_restarts(status) >= restarts:
                    raise PodsNotReady(f"{status.name} keeps failing: {_describe(status)}")
            return self._is_settled()

        try:
            async with asyncio.timeout(timeout_seconds):
                await self.wait_for(settled)
        except TimeoutError:
            late = [f"{s.name}: {_describe(s)}" for s in self.pods() if not s.ready]
            raise PodsNotReady("; ".join(["not ready in time", *late])) from None

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Wait until ``predicate`` holds; it is asked after every change of a pod."""
        async with self._news:
            await self._news.wait_for(predicate)

    def _want(self, manifests: Iterable[Mapping[str, Any]]) -> None:
        wanted = read_manifests(manifests)
        if len({workload.namespace for workload in wanted.workloads}) > 1:
            raise UnsupportedManifest("metadata.namespace", "a local node runs the workloads of one namespace")
        place = self._place()
        for workload in wanted.workloads:
            trial = PodIdentity(
                name=workload.name,
                namespace=workload.namespace,
                uid=str(uuid.UUID(int=0)),
                address=f"{self._network.prefix}.2",
                host_address=self._network.host_address,
            )
            plan_pod(workload.template, trial, objects=wanted.objects, place=place)
        self._wanted = wanted
        keys = {workload.key for workload in wanted.workloads}
        self._states = {key: state for key, state in self._states.items() if key in keys}
        for workload in wanted.workloads:
            state = self._states.setdefault(workload.key, _State(current=workload.revision))
            state.templates[workload.revision] = workload.template

    def _claim_state_dir(self) -> None:
        """Nobody else's while this node lives; what a killed node left of its pods goes."""
        pods = self.state_dir / "pods"
        self.state_dir.mkdir(parents=True, exist_ok=True)
        self._lock = (self.state_dir / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise NodeUnavailable(f"another node runs in {self.state_dir}") from None
        shutil.rmtree(pods, ignore_errors=True)
        # Secrets lie below.
        pods.mkdir(mode=0o700)

    def _let_go(self) -> None:
        self._network.close()
        if self._lock is not None:
            self._lock.close()

    async def _converge_for_ever(self) -> None:
        while not self._closing or self._pods:
            await self._changed.wait()
            self._changed.clear()
            if not self._closing:
                self._converge()
            self._publish_engines()
            async with self._news:
                self._news.notify_all()

    def _publish_engines(self) -> None:
        entries = engines_file.engine_entries(map(_engine, self.pods()))
        if entries != self._engines:
            engines_file.write(self.engines_file, entries)
            self._engines = entries

    def _converge(self) -> None:
        wanted = {workload.key for workload in self._wanted.workloads}
        for key, _, pod in list(self._pods.values()):
            if key not in wanted and not pod.terminating:
                pod.stop()
        for workload in self._wanted.workloads:
            state, existing = self._states[workload.key], self._existing(workload.key)
            if is_rolled_out(workload, existing):
                state.current = workload.revision
                state.templates = {workload.revision: workload.template}
            for step in next_steps(workload, existing, current=state.current):
                match step:
                    case Create():
                        self._create(workload, step)
                    case Delete():
                        self._pods[step.name][2].stop()

    def _create(self, workload: Workload, step: Create) -> None:
        uid = str(uuid.uuid4())
        suffix = f"{step.revision}-{uid[:5]}" if step.ordinal is None else str(step.ordinal)
        identity = PodIdentity(
            name=f"{workload.name}-{suffix}",
            namespace=workload.namespace,
            uid=uid,
            address=self._network.take(),
            host_address=self._network.host_address,
        )
        template = self._states[workload.key].templates[step.revision]
        labels = {**template.labels, _HASH_LABEL[workload.kind]: step.revision}
        if step.ordinal is not None:
            labels |= {
                "apps.kubernetes.io/pod-index": str(step.ordinal),
                "statefulset.kubernetes.io/pod-name": identity.name,
            }
        plan = plan_pod(replace(template, labels=labels), identity, objects=self._wanted.objects, place=self._place())
        around = PodSurroundings(
            images=self._images,
            logs=self.state_dir / "logs",
            back_off=self.settings.back_off,
            probe_period_limit=self.settings.probe_period_limit,
            session=self._session,
            changed=self._changed.set,
        )
        pod = Pod(plan, around, workload=workload.name, revision=step.revision)
        self._pods[identity.name] = (workload.key, step.ordinal, pod)
        self._tasks.create_task(self._run(pod))

    async def _run(self, pod: Pod) -> None:
        try:
            await pod.run()
        finally:
            del self._pods[pod.plan.identity.name]
            self._network.give_back(pod.plan.identity.address)
            self._changed.set()

    def _existing(self, key: Key) -> list[Existing]:
        # Insertion order is the order of creation.
        return [
            Existing(
                name=name,
                revision=pod.revision,
                ready=pod.status().ready,
                terminating=pod.terminating,
                ordinal=ordinal,
                created=created,
            )
            for created, (name, (owner, ordinal, pod)) in enumerate(self._pods.items())
            if owner == key
        ]

    def _is_settled(self) -> bool:
        if any(pod.terminating for _, _, pod in self._pods.values()):
            return False
        for workload in self._wanted.workloads:
            existing = self._existing(workload.key)
            if len(existing) != workload.replicas or not all(pod.ready for pod in existing):
                return False
            if next_steps(workload, existing, current=self._states[workload.key].current):
                return False
        wanted = {workload.key for workload in self._wanted.workloads}
        return all(key in wanted for key, _, _ in self._pods.values())

    def _refresh_files(self) -> None:
        for key, _, pod in self._pods.values():
            if pod.terminating or key not in self._states:
                continue
            template = self._states[key].templates[pod.revision]
            try:
                plan = plan_pod(template, pod.plan.identity, objects=self._wanted.objects, place=self._place())
            except UnsupportedManifest:
                # The pod's ConfigMap went; it keeps the files that it started with.
                continue
            pod.refresh(plan.files)

    def _place(self) -> Place:
        return Place(
            directory=self.state_dir / "pods",
            images=self._images,
            host_paths=(self.state_dir, *self.settings.host_paths),
        )


def engines_path(state_dir: Path) -> Path:
    """Where a node with this state directory writes its engines file; known before the node starts."""
    return state_dir.resolve() / "engines.json"


def _engine(status: PodStatus) -> EnginePod:
    return EnginePod(
        name=status.name,
        uid=status.uid,
        address=status.address,
        labels=status.labels,
        ports=status.ports,
        restarts=status.restarts,
        ready=status.ready,
    )


def _all_restarts(status: PodStatus) -> int:
    return sum(container.restarts for container in status.containers)


def _describe(status: PodStatus) -> str:
    logs = ", ".join(str(container.log) for container in status.containers)
    return f"{status.state}{f' ({status.message})' if status.message else ''}, log: {logs}"
