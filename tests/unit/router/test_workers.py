"""Workers' processes: what they are told, when they are started anew, and who holds their port."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvloop_router import place, workers
from kvloop_router.config import parse
from kvloop_router.errors import InvalidConfig
from kvloop_router.findings import Findings
from kvloop_router.place import Place
from kvloop_router.socket_client import SocketClient
from kvloop_router.workers import Worker, Workers, port_held, wait_before
from tests.unit.router.test_config import COMPLETE, parsed
from tests.unit.router.test_findings import VERIFIED, told

SHARED = COMPLETE | {"workers": 4, "handleStore": {"kind": "valkey", "url": "valkey://store:6379"}}


def test_workers_without_a_server_for_their_handles_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"workers: 4 processes .* set handleStore.kind to valkey"):
        parsed(COMPLETE | {"workers": 4})
    assert parsed(SHARED).workers == 4
    assert parsed(COMPLETE).workers == 1


def test_a_worker_is_told_what_the_file_says() -> None:
    config = parse(yaml.safe_dump(SHARED), {})
    own = Place(
        number=3, socket="/run/3", pod_socket="/run/pod", holds_off=True, plays=False, heard=told(VERIFIED), token="s"
    )

    assert place.decode(place.encode(config, own)) == (config, own)


@pytest.mark.parametrize(
    ("configured", "count", "each"),
    [((1024, 1024), 4, (256, 256)), ((10, 0), 4, (3, 0)), ((1, 1), 8, (1, 1)), ((7, 9), 1, (7, 9))],
)
def test_workers_share_the_limits_of_an_engine_and_none_is_without(
    configured: tuple[int, int], count: int, each: tuple[int, int]
) -> None:
    names = ("turnsPerEngine", "waitingTurnsPerEngine", "concurrentRequestsPerTenant")
    limits = parsed(SHARED | {"limits": dict(zip(names, (*configured, 8), strict=True))}).limits

    own = limits.of_one_of(count)

    assert (own.turns_per_engine, own.waiting_turns_per_engine) == each
    assert own.concurrent_requests_per_tenant == 8


def test_one_that_fails_again_and_again_is_started_ever_more_seldom() -> None:
    waits = [wait_before(failures) for failures in range(12)]

    assert waits == sorted(waits)
    assert (waits[0], waits[-1], wait_before(10**6)) == (0.1, 30.0, 30.0)


def test_the_port_is_held_for_those_who_are_let_in_and_for_nobody_else() -> None:
    with port_held("127.0.0.1", 0) as port:
        with socket.socket() as worker:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            worker.bind(("127.0.0.1", port))
            worker.listen()
            with pytest.raises(OSError, match="in use") as refused, port_held("127.0.0.1", port):
                pass
            assert refused.value.errno == errno.EADDRINUSE
            with socket.create_connection(("127.0.0.1", port)):
                worker.accept()[0].close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def of(directory: Path) -> Workers:
    return Workers(
        parsed(SHARED),
        token="token",
        log_level="info",
        directory=directory,
        pod_socket="",
        findings=Findings,
        ended=lambda ident: None,
    )


@pytest.mark.parametrize("says", ["serves", "something else"])
async def test_one_that_cannot_be_started_is_tried_again_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    """The first serves, as a stand-in for it says; the machine has no process for the second, at first. One that says
    something else is killed, and no other is waited for."""
    begin = asyncio.create_subprocess_exec
    refused: list[int] = []
    group = of(tmp_path)

    async def started(*command: str, **pipes: Any) -> asyncio.subprocess.Process:
        if group.serving and len(refused) < 3:
            refused.append(1)
            raise BlockingIOError(errno.EAGAIN, "no process is left")
        if refused:
            group.stop()
        script = f"import sys; sys.stdin.readline(); print({says!r}, flush=True); sys.stdin.read()"
        return await begin(sys.executable, "-c", script, **pipes)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    async with asyncio.timeout(30):
        status = await group.run(asyncio.Event())

    assert (status, len(refused)) == ((0, 3) if says == "serves" else (1, 0))


async def test_one_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    group = of(tmp_path)
    worker = Worker(0, 0, process, SocketClient(str(tmp_path / "socket")))
    group.heard(worker)
    group.silent(worker)
    assert process.returncode is None

    monkeypatch.setattr(workers, "_HUNG_SECONDS", -1.0)
    group.silent(worker)

    assert await process.wait() == -9
    await worker.client.close()
