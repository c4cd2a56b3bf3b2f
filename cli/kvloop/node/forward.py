"""A port of this machine that leads to a pod, as ``kubectl port-forward`` does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from kvloop.node.errors import PortTaken

_CHUNK_BYTES = 1 << 16


@asynccontextmanager
async def forwarded(port: int, target: Callable[[], tuple[str, int] | None]) -> AsyncIterator[int]:
    """Serve 127.0.0.1:``port`` (0: a free one) and give the port; each connection goes to what ``target`` gives then.

    A connection is closed at once while ``target`` gives None. Raises ``PortTaken``.
    """
    connections: set[asyncio.StreamWriter] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        try:
            await _carry(reader, writer, target())
        finally:
            connections.discard(writer)
            writer.close()

    try:
        server = await asyncio.start_server(accept, "127.0.0.1", port)
    except OSError as error:
        raise PortTaken(f"cannot listen on 127.0.0.1:{port} ({error.strerror}): choose another port") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        # Their tasks end by themselves once nothing can be read any more.
        for writer in connections:
            writer.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: tuple[str, int] | None) -> None:
    if target is None:
        return
    try:
        pod_reader, pod_writer = await asyncio.open_connection(*target)
    except OSError:
        return
    try:
        # Whichever side ends takes the other along: a client that leaves must be seen to leave by the router.
        async with asyncio.TaskGroup() as group:
            up = group.create_task(_copy(reader, pod_writer))
            down = group.create_task(_copy(pod_reader, writer))
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            down.cancel()
    finally:
        pod_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
