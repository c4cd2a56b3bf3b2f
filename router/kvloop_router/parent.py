"""Serves with several workers: the process that starts them and speaks for them, and the loop that has them agree."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import orjson

from kvloop_router import listening
from kvloop_router.config import Config
from kvloop_router.findings import Findings, together
from kvloop_router.secret_files import read_token
from kvloop_router.socket_client import Silent
from kvloop_router.worker_api import FINDINGS
from kvloop_router.workers import Worker, Workers, port_held
from kvloop_router.workers_api import WorkersApi
from kvloop_router.workers_metrics import Totals

_log = logging.getLogger(__name__)
_ROUND_SECONDS = 1.0


async def serve(config: Config, log_level: str) -> int:
    """Until SIGTERM, and until the workers' turns have ended then; gives the exit status. Raises InvalidConfig."""
    token = read_token(Path(config.admin.token_file))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvloop-router-")))
        port = stack.enter_context(port_held(config.listen.host, config.listen.port))
        totals, agreement = Totals(), Agreement()
        workers = Workers(
            config.for_worker(port),
            token=token,
            log_level=log_level,
            directory=directory,
            pod_socket=str(directory / "pod.sock"),
            findings=lambda: agreement.known,
            ended=totals.end,
        )
        api = WorkersApi(workers, totals, token)
        await listening.to_parent(stack, api.pod(), str(directory / "pod.sock"))
        serves = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            helpers = (
                group.create_task(_stopped(stop, workers)),
                group.create_task(agreement.run(workers)),
                group.create_task(_announced(serves, stack, api, config, port)),
            )
            status = await workers.run(serves)
            for helper in helpers:
                helper.cancel()
    return status


async def _stopped(stop: asyncio.Event, workers: Workers) -> None:
    await stop.wait()
    _log.info("draining")
    workers.stop()


async def _announced(serves: asyncio.Event, stack: AsyncExitStack, api: WorkersApi, config: Config, port: int) -> None:
    """Answer on the admin port, once there is somebody to ask."""
    await serves.wait()
    admin = await listening.listen(stack, api.admin(), config.admin.host, config.admin.port)
    _log.info("serving", extra={"address": (config.listen.host, port), "admin_address": admin})


class Agreement:
    """What the workers know together: told to each every second, and at once when somebody has found something."""

    def __init__(self) -> None:
        self.known = Findings()
        self._with: dict[int, _Told] = {}

    async def run(self, workers: Workers) -> None:
        """Until cancelled."""
        while True:
            if not await self._round(workers):
                await asyncio.sleep(_ROUND_SECONDS)

    async def _round(self, workers: Workers) -> bool:
        """Ask and tell each; whether there is something new to be told."""
        serving = workers.serving
        told = {worker.ident: self._with.get(worker.ident, _Told()) for worker in serving}
        news = await asyncio.gather(
            *(self._ask(workers, worker, told[worker.ident], plays=worker is serving[0]) for worker in serving)
        )
        gone, self._with = self._with.keys() - told.keys(), told
        if not any(news) and not gone:
            return False
        known = together(self.known, [each.findings for each in told.values() if each.findings is not None])
        if known == self.known:
            return False
        self.known = known
        return True

    async def _ask(self, workers: Workers, worker: Worker, told: _Told, *, plays: bool) -> bool:
        """Whether it says something new."""
        known = self.known
        findings = None if told.heard is known else known.told()
        said = orjson.dumps({"plays": plays, "known": told.state, "findings": findings})
        try:
            answer = await worker.client.post(FINDINGS, said)
        except Silent:
            workers.silent(worker)
            return False
        workers.heard(worker)
        if answer.status != HTTPStatus.OK:
            return False
        says = orjson.loads(answer.body)
        told.heard, told.state = known, says["known"]
        if says["findings"] is None:
            return False
        told.findings = Findings.heard(says["findings"])
        return True


@dataclass(slots=True)
class _Told:
    """What one worker has told last, in which state of its knowledge, and what it has heard."""

    heard: Findings | None = None
    state: str = ""
    findings: Findings | None = None
