"""One container of a pod: its process, its probes, its end, and its next start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from kvloop.node.health import Health, ProbeKind
from kvloop.node.images import ProcessImage
from kvloop.node.model import ContainerPlan
from kvloop.node.prober import Target, passes
from kvloop.node.process import Process, StartFailed
from kvloop.node.restarts import BackOff, is_restarted

_MINIMUM_GRACE_AFTER_HOOK_SECONDS = 2
_EXIT_CODE_OF_A_FAILED_START = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerStatus:
    """A container at one moment. ``reason`` is Kubernetes' word where it has one, empty while all is well."""

    name: str
    log: Path
    running: bool = False
    ready: bool = False
    restarts: int = 0
    exit_code: int | None = None
    reason: str = "ContainerCreating"
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a container needs from its pod and node."""

    address: str
    image: ProcessImage
    log: Path
    restart_policy: str
    grace: float
    back_off: BackOff
    session: aiohttp.ClientSession
    changed: Callable[[], None]


class Container:
    """Runs until ``stop`` was asked for, or until the restart policy lets it rest."""

    def __init__(self, plan: ContainerPlan, surroundings: Surroundings) -> None:
        self.plan = plan
        self.status = ContainerStatus(name=plan.name, log=surroundings.log)
        self._around = surroundings
        self._health = Health(probes=plan.probes)
        self._wake = asyncio.Event()
        self._started = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._hooks = True
        self._deadline = float("inf")
        self._target = Target(
            address=surroundings.address,
            image=surroundings.image,
            environment=plan.environment,
            directory=plan.working_dir,
        )

    def stop(self, grace: float, *, hooks: bool) -> None:
        """End the container within ``grace`` seconds, for good. A later call can only shorten the time."""
        self._deadline = min(self._deadline, _now() + grace)
        self._hooks = self._hooks and hooks
        self._stop_asked.set()
        self._wake.set()

    async def run(self) -> int:
        """Gives the last exit status."""
        quick_ends = 0
        while not self._stop_asked.is_set():
            began = _now()
            code = await self._run_once()
            restarted = not self._stop_asked.is_set() and is_restarted(self._around.restart_policy, code)
            if not restarted:
                self._report(reason="Completed" if code == 0 else self.status.reason or "Error")
                return code
            quick_ends = self._around.back_off.ends_in_a_row(quick_ends, ran=_now() - began)
            delay = self._around.back_off.delay(quick_ends)
            self._report(reason="CrashLoopBackOff" if delay else self.status.reason, restarts=self.status.restarts + 1)
            await self._pause(delay)
        return self.status.exit_code or 0

    async def _run_once(self) -> int:
        """One life of the process: start it, watch it, end it if it has to; gives its exit status."""
        self._health = Health(probes=self.plan.probes)
        self._started.clear()
        try:
            process = await Process.start(
                self.plan.argv,
                environment=self.plan.environment,
                directory=self.plan.working_dir,
                log=self._around.log,
            )
        except (StartFailed, OSError) as error:
            code = _EXIT_CODE_OF_A_FAILED_START
            self._report(running=False, ready=False, exit_code=code, reason="StartError", message=str(error))
            return code
        try:
            self._report(running=True, ready=False, reason="", message="")
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch_exit(process))
                probers = [group.create_task(self._probe(kind, process)) for kind in ProbeKind]
                self._judge(process)
                while process.exit_code is None and self._health.failed is None and not self._stop_asked.is_set():
                    await self._woken()
                for prober in probers:
                    prober.cancel()
                if process.exit_code is None:
                    await self._end(process)
                code = await watcher
        finally:
            await process.destroy()
        failed = self._health.failed
        if failed is not None and not self._stop_asked.is_set():
            reason, message = "Unhealthy", f"the {failed} probe failed"
        else:
            reason, message = "" if code == 0 else "Error", "" if code == 0 else f"exit status {code}"
        self._report(running=False, ready=False, exit_code=code, reason=reason, message=message)
        return code

    async def _watch_exit(self, process: Process) -> int:
        code = await process.wait()
        self._wake.set()
        return code

    async def _probe(self, kind: ProbeKind, process: Process) -> None:
        probe = self._health.probe(kind)
        if probe is None:
            return
        await asyncio.sleep(probe.initial_delay)
        if kind is not ProbeKind.STARTUP:
            await self._started.wait()
        while self._health.is_due(kind):
            success = await passes(
                probe.check, self._target, session=self._around.session, timeout_seconds=probe.timeout
            )
            self._health = self._health.after(kind, success)
            self._judge(process)
            await asyncio.sleep(probe.period)

    def _judge(self, process: Process) -> None:
        """Act on what the probes say by now."""
        if self._health.failed is not None:
            self._wake.set()
        if self._health.started:
            self._started.set()
        when_ready = self._around.image.when_ready
        if self._health.ready and not self.status.ready and when_ready is not None:
            when_ready(process.tree())
        if self._health.ready is not self.status.ready:
            self._report(ready=self._health.ready)

    async def _end(self, process: Process) -> None:
        """preStop, SIGTERM, and SIGKILL when the grace period is over. ``stop`` may shorten the time meanwhile."""
        failed = self._health.failed
        probe = self._health.probe(failed) if failed is not None else None
        grace = self._around.grace if probe is None or probe.grace is None else probe.grace
        deadline = _now() + grace
        self._report(ready=False)
        async with asyncio.TaskGroup() as group:
            hook = group.create_task(self._run_hook(grace))
            terminated = False
            while process.exit_code is None:
                deadline = min(deadline, self._deadline)
                hook_over = hook.done() or not self._hooks or self.plan.pre_stop is None
                if not terminated and (hook_over or _now() >= deadline):
                    terminated = True
                    process.terminate()
                    if not hook_over:
                        deadline = self._deadline = _now() + _MINIMUM_GRACE_AFTER_HOOK_SECONDS
                elif terminated and _now() >= deadline:
                    process.kill()
                    await process.wait()
                else:
                    await self._woken(deadline - _now())
            hook.cancel()

    async def _run_hook(self, limit: float) -> None:
        if self.plan.pre_stop is not None and self._hooks:
            await passes(self.plan.pre_stop, self._target, session=self._around.session, timeout_seconds=limit)
        self._wake.set()

    async def _pause(self, seconds: float) -> None:
        over = _now() + seconds
        while not self._stop_asked.is_set() and (left := over - _now()) > 0:
            await self._woken(left)

    async def _woken(self, timeout_seconds: float | None = None) -> None:
        """Wait until something happened, or the time is over."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _report(self, **changes: Any) -> None:
        """Note ``changes`` of the status and tell the pod where there are any."""
        status = replace(self.status, **changes)
        if status != self.status:
            self.status = status
            self._around.changed()


def _now() -> float:
    return asyncio.get_running_loop().time()
