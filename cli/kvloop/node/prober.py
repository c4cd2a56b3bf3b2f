"""Carries out checks and hooks against a running container."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvloop.node.images import ProcessImage
from kvloop.node.model import Exec, Hook, HttpGet, Sleep, TcpSocket
from kvloop.node.process import Process, StartFailed

_LOWEST_FAILURE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The container that is checked: where it listens, and what a command beside it sees."""

    address: str
    image: ProcessImage
    environment: Mapping[str, str]
    directory: Path


async def passes(hook: Hook, target: Target, *, session: aiohttp.ClientSession, timeout_seconds: float) -> bool:
    """Whether ``hook`` succeeds within its time. Every failure is an answer, never an exception."""
    try:
        async with asyncio.timeout(timeout_seconds):
            match hook:
                case HttpGet():
                    return await _http(hook, target.address, session)
                case TcpSocket():
                    return await _tcp(hook, target.address)
                case Exec():
                    return await _exec(hook, target)
                case Sleep():
                    await asyncio.sleep(hook.seconds)
                    return True
    except (TimeoutError, OSError, aiohttp.ClientError, StartFailed):
        return False


async def _http(check: HttpGet, address: str, session: aiohttp.ClientSession) -> bool:
    url = f"{check.scheme}://{check.host or address}:{check.port}/{check.path.removeprefix('/')}"
    # Certificates are not checked, as the kubelet does not: a probe asks about health, not identity.
    request = session.get(url, headers=dict(check.headers), allow_redirects=False, ssl=False)
    async with request as response:
        return response.status < _LOWEST_FAILURE


async def _tcp(check: TcpSocket, address: str) -> bool:
    _, writer = await asyncio.open_connection(check.host or address, check.port)
    writer.close()
    return True


async def _exec(check: Exec, target: Target) -> bool:
    program = target.image.find(check.command[0])
    if program is None:
        return False
    process = await Process.start(
        (program, *check.command[1:]), environment=target.environment, directory=target.directory
    )
    try:
        return await process.wait() == 0
    finally:
        await process.destroy()
