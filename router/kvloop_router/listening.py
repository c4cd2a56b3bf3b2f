"""Where a router, or a worker of one, is reached."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from aiohttp import web

from kvloop_router.socket_client import SocketClient
from kvloop_router.worker_api import Parent

_HOLD_OFF_SECONDS = 5.0
_ABLE_SECONDS = 0.02
_MOST_COUNTING = 4


async def listen(
    stack: AsyncExitStack,
    app: web.Application,
    host: str,
    port: int,
    *,
    context: ssl.SSLContext | None = None,
    among_others: bool = False,
) -> tuple[str, int]:
    """Serve there; gives the address. among_others: the system spreads connections over all who listen so."""
    runner = await _runner(stack, app)
    site = web.TCPSite(runner, host, port, ssl_context=context, reuse_port=among_others or None)
    await site.start()
    bound: tuple[str, int] = runner.addresses[0][:2]
    return bound


async def to_parent(stack: AsyncExitStack, app: web.Application, socket: str) -> None:
    """Answer the parent at this path."""
    await web.UnixSite(await _runner(stack, app), socket).start()


async def _runner(stack: AsyncExitStack, app: web.Application) -> web.AppRunner:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    return runner


async def parent(stack: AsyncExitStack, socket: str) -> Parent:
    """The process that answers for all workers, at this path."""
    clients = SocketClient(socket), SocketClient(socket, most=_MOST_COUNTING)
    for client in clients:
        stack.push_async_callback(client.close)
    return Parent(*clients)


async def once(able: Callable[[], bool]) -> None:
    """Wait until turns can be played, but not for long: where nobody listens, nobody is told why."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_HOLD_OFF_SECONDS):
            # It follows from the state of engines, of which several parts have a say.
            while not able():  # noqa: ASYNC110
                await asyncio.sleep(_ABLE_SECONDS)
