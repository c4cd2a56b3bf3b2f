"""What becomes of calls that wait while the connection to the handle store's server is made anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import hiredis
import pytest

from kvloop_router.store_link import StoreLink, StoreUnavailable


class Held:
    """A server that answers calls when it is told to; it says at once that it is there."""

    def __init__(self) -> None:
        """both: two calls have come."""
        self.writers: list[asyncio.StreamWriter] = []
        self.asked = 0
        self.both = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        self.writers.append(writer)
        with suppress(OSError):
            while data := await reader.read(65536):
                commands.feed(data)
                while command := commands.gets():
                    if command[0] == b"PING":
                        writer.write(b"+PONG\r\n")
                        continue
                    self.asked += 1
                    if self.asked == 2:
                        self.both.set()


async def nothing() -> None:
    """What a link that is up is checked with."""


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[StoreLink, Held]]:
    held = Held()
    async with await asyncio.start_server(held.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        link = StoreLink(f"valkey://127.0.0.1:{port}", script="return 1", seconds=60, random=Random(1))
        assert await link.connect(nothing)
        try:
            yield link, held
        finally:
            await link.close()
            for writer in held.writers:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()


async def test_what_was_asked_before_another_call_failed_is_still_answered() -> None:
    async with linked() as (link, held), asyncio.TaskGroup() as calls:
        refused = calls.create_task(refusal(link))
        waits = calls.create_task(link.call("take", ("key",)))
        await held.both.wait()
        held.writers[0].write(b"-OOM command not allowed\r\n")
        await refused
        assert not link.up

        assert await link.connect(nothing)
        held.writers[0].write(b"*1\r\n:7\r\n")

        assert await waits == [7]
        assert link.up


async def test_what_fails_on_a_connection_that_was_left_says_nothing_of_the_new_one() -> None:
    async with linked() as (link, held), asyncio.TaskGroup() as calls:
        refused = [calls.create_task(refusal(link)) for _ in range(2)]
        await held.both.wait()
        held.writers[0].write(b"-OOM command not allowed\r\n")
        await refused[0]
        assert await link.connect(nothing)
        held.writers[0].write(b"-OOM command not allowed\r\n")

        await refused[1]
        assert link.up


async def test_what_still_waits_when_it_is_closed_gets_no_answer() -> None:
    async with linked() as (link, held), asyncio.TaskGroup() as calls:
        refused = calls.create_task(refusal(link))
        waits = calls.create_task(refusal(link))
        await held.both.wait()
        held.writers[0].write(b"-OOM command not allowed\r\n")
        await refused
        assert await link.connect(nothing)
        await link.close()

        await waits
        assert not link.up


async def refusal(link: StoreLink) -> None:
    """A call that fails."""
    with pytest.raises(StoreUnavailable):
        await link.call("put", ("key",))
