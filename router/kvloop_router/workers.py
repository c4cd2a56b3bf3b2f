"""The processes of a router with several workers: started, watched, started anew, told to end.

All of them listen on the same port, and the system spreads connections over those that do (``SO_REUSEPORT``, by a hash
of the addresses, socket(7)), so that a burst does not go to whoever wakes first. One that dies takes its connections
with it and gets no new ones. The parent holds the port, without listening.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from kvloop_router.config import Config
from kvloop_router.findings import Findings
from kvloop_router.place import Place, encode
from kvloop_router.socket_client import SocketClient

_log = logging.getLogger(__name__)

SERVES = b"serves\n"
"""What a worker writes to its standard output once it does."""
_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 30.0
_LIVED_SECONDS = 60.0
"""A worker that ends after so long is not one that cannot serve."""
_START_SECONDS = 120.0
_HUNG_SECONDS = 30.0
"""Both: as long as a cluster lets the probes of a router fail."""


@dataclass(slots=True)
class Worker:
    """One process. ident: never that of another. answered: when it last did, on the parent's clock."""

    number: int
    ident: int
    process: Process
    client: SocketClient
    answered: float = 0.0
    serves: bool = False


def wait_before(failures: int) -> float:
    """Seconds until a worker is started that failed so many times in a row."""
    return min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** min(failures, 16))


@contextmanager
def port_held(host: str, port: int) -> Iterator[int]:
    """Keep a port for the workers, who may listen there beside; gives its number. Raises OSError where it is taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        # Who listens there with others' leave would share his connections with whoever joins.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
    with socket.socket(family, kind, protocol) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
        yield held.getsockname()[1]


class Workers:
    """The processes of one router.

    config: of each. directory: for their sockets. findings: what they know together. ended: told who has.
    """

    def __init__(
        self,
        config: Config,
        *,
        token: str,
        log_level: str,
        directory: Path,
        pod_socket: str,
        findings: Callable[[], Findings],
        ended: Callable[[int], None],
    ) -> None:
        self._config = config
        self._token = token
        self._log_level = log_level
        self._directory = directory
        self._pod_socket = pod_socket
        self._findings = findings
        self._ended = ended
        self._idents = count()
        self._there: dict[int, Worker] = {}
        self._stopping = asyncio.Event()
        self.restarts = 0

    @property
    def serving(self) -> tuple[Worker, ...]:
        """Those that serve, the same one first as long as it does."""
        return tuple(sorted((each for each in self._there.values() if each.serves), key=lambda each: each.ident))

    async def run(self, first_serves: asyncio.Event) -> int:
        """Until all have ended after ``stop``; gives 0 then, and something else where no worker can serve.

        The first is started alone: what is wrong is said once, by it.
        """
        first = await self._start(0)
        if not await self._comes_to_serve(first):
            status = await self._end(first)
            return 0 if self._stopping.is_set() else max(status, 1)
        first_serves.set()
        async with asyncio.TaskGroup() as keepers:
            keepers.create_task(self._keep(0, first))
            for number in range(1, self._config.workers):
                keepers.create_task(self._keep(number, None))
        return 0

    def stop(self) -> None:
        """Have all workers end as a router of one process does: once their turns have."""
        self._stopping.set()
        for worker in self._there.values():
            with suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGTERM)

    def heard(self, worker: Worker) -> None:
        """It has answered."""
        worker.answered = asyncio.get_running_loop().time()

    def silent(self, worker: Worker) -> None:
        """It has not; killed where it has not for long, so that it can be started anew."""
        lasting = asyncio.get_running_loop().time() - worker.answered
        if lasting > _HUNG_SECONDS and not self._stopping.is_set():
            _log.error("a worker hangs", extra={"worker": worker.number, "seconds": round(lasting, 1)})
            with suppress(ProcessLookupError):
                worker.process.kill()

    async def _keep(self, number: int, worker: Worker | None) -> None:
        """Have a worker of this number serve, until ``stop``."""
        loop = asyncio.get_running_loop()
        failures = 0
        while worker is not None or not self._stopping.is_set():
            began = loop.time()
            try:
                worker = worker or await self._start(number)
            except OSError as error:
                # No process or no memory is left for it: the others go on.
                _log.error("a worker cannot be started", extra={"worker": number, "error": str(error)})
                await self._rest(wait_before(failures))
                failures += 1
                continue
            if worker.serves or await self._comes_to_serve(worker):
                await worker.process.wait()
            status = await self._end(worker)
            worker = None
            if self._stopping.is_set():
                return
            failures = 0 if loop.time() - began > _LIVED_SECONDS else failures
            wait = wait_before(failures)
            failures += 1
            self.restarts += 1
            _log.error("a worker ended", extra={"worker": number, "status": status, "again_in_seconds": wait})
            await self._rest(wait)

    async def _rest(self, seconds: float) -> None:
        """Wait, but not past ``stop``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _start(self, number: int) -> Worker:
        ident = next(self._idents)
        place = Place(
            number=number,
            socket=str(self._directory / f"{ident}.sock"),
            pod_socket=self._pod_socket,
            holds_off=bool(self.serving),
            plays=not self.serving,
            heard=self._findings(),
            token=self._token,
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvloop_router", "--worker", "--log-level", self._log_level),
            stdin=PIPE,
            stdout=PIPE,
        )
        worker = Worker(number, ident, process, SocketClient(place.socket, self._token))
        self._there[ident] = worker
        if self._stopping.is_set():
            process.terminate()
        assert process.stdin is not None  # noqa: S101  it is a pipe, which stays open: its end is the parent's
        process.stdin.write(encode(self._config, place))
        return worker

    async def _comes_to_serve(self, worker: Worker) -> bool:
        """Wait until it serves; whether it ever does."""
        assert worker.process.stdout is not None  # noqa: S101  it is a pipe
        said: bytes | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                said = await worker.process.stdout.readline()
        worker.serves = said == SERVES
        if not worker.serves and said != b"":
            # One that says nothing more has ended, with a status that tells why.
            _log.error("a worker does not come to serve", extra={"worker": worker.number})
            with suppress(ProcessLookupError):
                worker.process.kill()
        self.heard(worker)
        if worker.serves:
            _log.info("a worker serves", extra={"worker": worker.number, "pid": worker.process.pid})
        return worker.serves

    async def _end(self, worker: Worker) -> int:
        """Forget a worker that ends; gives its status."""
        worker.serves = False
        status = await worker.process.wait()
        del self._there[worker.ident]
        self._ended(worker.ident)
        await worker.client.close()
        (self._directory / f"{worker.ident}.sock").unlink(missing_ok=True)
        return status
