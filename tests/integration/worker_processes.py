"""A router with several workers, as processes, and what they wrote in their log."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.harness.addresses import free_loopback_address
from tests.harness.store_server import StoreServer
from tests.integration import hazards
from tests.integration.router_process import Clock, RouterUnderTest, configuration, until, write_engines

PORT, ADMIN_PORT = 8000, 8081
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Launched:
    """The parent's process. ``document``: its configuration."""

    process: subprocess.Popen[bytes]
    directory: Path
    document: Mapping[str, Any]

    @property
    def log(self) -> str:
        return (self.directory / "router.log").read_text()

    async def ended(self) -> int:
        """Its status at its end."""
        return await asyncio.to_thread(self.process.wait, _SECONDS)


@dataclass(slots=True)
class Pod(RouterUnderTest):
    """Each of its requests comes on a connection of its own, and so to any of the workers."""

    launched: Launched | None = None

    def lines(self, message: str) -> list[dict[str, Any]]:
        """The lines of the log with this message, oldest first."""
        assert self.launched is not None
        found = [json.loads(line) for line in self.launched.log.splitlines() if line.endswith("}")]
        return [line for line in found if line["message"] == message]

    @property
    def pids(self) -> dict[int, int]:
        """The processes that came to serve last, by their workers' numbers."""
        return {line["worker"]: line["pid"] for line in self.lines("a worker serves")}

    def players(self, since: int = 0) -> set[int]:
        """The workers that have played turns, but for the first so many turns."""
        return {line["worker"] for line in self.lines("turn")[since:]}

    async def status(self, path: str) -> int:
        """Of a GET; 0 where nobody answers."""
        try:
            async with self.session.get(self.url + path) as response:
                return response.status
        except aiohttp.ClientError:
            return 0


def document(directory: Path, server: StoreServer, *, workers: int = 2, **changes: Any) -> dict[str, Any]:
    """The configuration of a router on an address of its own."""
    host = free_loopback_address(PORT, ADMIN_PORT)
    return configuration(
        directory,
        workers=workers,
        listen={"host": host, "port": PORT},
        admin={"host": host, "port": ADMIN_PORT},
        handleStore={"kind": "valkey", "url": server.url, "name": str(directory), "timeoutSeconds": 20.0},
        **changes,
    )


@contextmanager
def launched(directory: Path, configured: Mapping[str, Any]) -> Iterator[Launched]:
    """The router's process, whatever comes of it."""
    (directory / "router.yaml").write_text(yaml.safe_dump(dict(configured)))
    with (directory / "router.log").open("wb") as log:
        command = (sys.executable, "-m", "kvloop_router", "--config", str(directory / "router.yaml"))
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "TMPDIR": str(directory)})
    try:
        yield Launched(process, directory, configured)
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def connected(router: Launched) -> AsyncIterator[Pod]:
    """A router all of whose workers take turns."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        pod = Pod(
            url=f"http://{router.document['listen']['host']}:{PORT}",
            admin_url=f"http://{router.document['admin']['host']}:{ADMIN_PORT}",
            engines_file=router.directory / "engines.json",
            session=session,
            clock=Clock(),
            launched=router,
        )
        await until(lambda: len(pod.pids) == router.document["workers"], seconds=_SECONDS)
        await eventually(lambda: has_status(pod, "/readyz", 200))
        yield pod


@asynccontextmanager
async def several(
    directory: Path, server: StoreServer, entries: Sequence[Mapping[str, Any]], **changes: Any
) -> AsyncIterator[Pod]:
    """A router with two workers over these scripted engines."""
    write_engines(directory / "engines.json", entries)
    with launched(directory, document(directory, server, **changes)) as router:
        async with connected(router) as pod:
            with hazards.a_router_serves():
                yield pod


async def has_status(pod: Pod, path: str, status: int) -> bool:
    return await pod.status(path) == status


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it holds; fails where it never does."""
    async with asyncio.timeout(_SECONDS):
        while not await holds():  # noqa: ASYNC110  asked over HTTP
            await asyncio.sleep(0.02)
