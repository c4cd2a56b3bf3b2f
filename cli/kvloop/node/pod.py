"""One pod: its files, its init containers in order, then its containers side by side."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from kvloop.node.addresses import is_port_free
from kvloop.node.container import Container, ContainerStatus, Surroundings
from kvloop.node.health import hasten
from kvloop.node.images import ProcessImage
from kvloop.node.model import ContainerPlan, PlannedFile, PodPlan
from kvloop.node.restarts import BackOff


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStatus:
    """A pod at one moment. ``restarts`` counts the starts of its containers beyond the first."""

    name: str
    uid: str
    workload: str
    revision: str
    address: str
    labels: Mapping[str, str]
    ports: Mapping[str, int]
    ready: bool
    terminating: bool
    restarts: int
    state: str
    message: str
    containers: tuple[ContainerStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSurroundings:
    """What a pod needs from its node. ``probe_period_limit`` is in seconds; None keeps the manifest's periods."""

    images: Mapping[str, ProcessImage]
    logs: Path
    back_off: BackOff
    probe_period_limit: float | None
    session: aiohttp.ClientSession
    changed: Callable[[], None]


class Pod:
    """Runs until ``stop`` was asked for."""

    def __init__(self, plan: PodPlan, around: PodSurroundings, *, workload: str, revision: str) -> None:
        self.plan = plan
        self.workload = workload
        self.revision = revision
        self.terminating = False
        self._around = around
        self._message = ""
        self._init = [self._container(container, "OnFailure") for container in plan.init_containers]
        self._main = [self._container(container, plan.restart_policy) for container in plan.containers]
        self._done: list[Container] = []

    def _container(self, plan: ContainerPlan, restart_policy: str) -> Container:
        return Container(
            self._with_probes(plan),
            Surroundings(
                address=self.plan.identity.address,
                image=self._around.images[plan.image],
                log=self._around.logs / self.plan.identity.name / f"{plan.name}.log",
                restart_policy=restart_policy,
                grace=self.plan.grace,
                back_off=self._around.back_off,
                session=self._around.session,
                changed=self._around.changed,
            ),
        )

    def _with_probes(self, plan: ContainerPlan) -> ContainerPlan:
        limit = self._around.probe_period_limit
        if limit is None:
            return plan
        return replace(plan, probes=hasten(plan.probes, period_limit=limit))

    def stop(self, grace: float | None = None, *, hooks: bool = True) -> None:
        """End the pod within ``grace`` seconds, by default its own. A later call can only shorten the time."""
        self.terminating = True
        limit = self.plan.grace if grace is None else grace
        for container in (*self._init, *self._main):
            container.stop(limit, hooks=hooks and limit > 0)
        self._around.changed()

    async def run(self) -> None:
        """Start the pod and stay until all its containers are gone for good; its directory goes with it."""
        try:
            await asyncio.to_thread(self._materialise)
            self._check_ports()
            for container in self._init:
                await container.run()
                if self.terminating:
                    return
                self._done.append(container)
            async with asyncio.TaskGroup() as group:
                for container in self._main:
                    group.create_task(container.run())
        finally:
            shutil.rmtree(self.plan.directory, ignore_errors=True)

    def refresh(self, files: tuple[PlannedFile, ...]) -> None:
        """Bring the files of volumes up to date with changed ConfigMaps and Secrets."""
        for file in files:
            if not file.path.exists() or file.path.read_bytes() != file.content:
                _write(file)

    def status(self) -> PodStatus:
        containers = tuple(container.status for container in (*self._init, *self._main))
        state, message = self._state()
        return PodStatus(
            name=self.plan.identity.name,
            uid=self.plan.identity.uid,
            workload=self.workload,
            revision=self.revision,
            address=self.plan.identity.address,
            labels=self.plan.labels,
            ports={name: port for container in self.plan.containers for name, port in container.ports},
            ready=not self.terminating and all(container.status.ready for container in self._main),
            terminating=self.terminating,
            restarts=sum(container.status.restarts for container in self._main),
            state=state,
            message=message or self._message,
            containers=containers,
        )

    def _state(self) -> tuple[str, str]:
        """One word for people, as kubectl shows it, and what is behind it."""
        if self.terminating:
            return "Terminating", ""
        if len(self._done) < len(self._init):
            current = self._init[len(self._done)].status
            word = current.reason if current.reason and not current.running else f"{len(self._done)}/{len(self._init)}"
            return f"Init:{word}", current.message
        for container in self._main:
            if not container.status.running and container.status.reason:
                return container.status.reason, container.status.message
        return "Running", ""

    def _materialise(self) -> None:
        for directory in self.plan.directories:
            directory.mkdir(parents=True, exist_ok=True)
        for file in self.plan.files:
            _write(file)
        (self._around.logs / self.plan.identity.name).mkdir(parents=True, exist_ok=True)

    def _check_ports(self) -> None:
        for container in self.plan.containers:
            for _, port in container.ports:
                if not is_port_free(self.plan.identity.address, port):
                    self._message = f"port {port} is taken: another process of this machine listens on all addresses"
                    self._around.changed()


def _write(file: PlannedFile) -> None:
    file.path.parent.mkdir(parents=True, exist_ok=True)
    draft = file.path.with_name(f".{file.path.name}.new")
    draft.write_bytes(file.content)
    draft.chmod(file.mode)
    draft.replace(file.path)
