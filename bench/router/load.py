"""Turns as clients send them, at a cost far below the routers': bytes over kept connections, nothing parsed.

``Direct`` plays both legs itself, which is what a turn takes without a router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Protocol, cast

from bench.router import wire

Address = tuple[str, int]
_MARK = b'"content":"' + wire.PIECE
_TAIL = len(_MARK) - 1
_END = b"\r\n" + wire.END_OF_STREAM


class WrongAnswer(Exception):
    """An answer that is not what was asked for: the measurement is void."""


@dataclass(slots=True)
class Turn:
    """What was seen of a turn. ttft: seconds from ``sent`` on to the first chunk with text."""

    sent: float
    ttft: float = 0.0
    total: float = 0.0


class _Connection(asyncio.Protocol):
    """A client's connection, with one request at a time on it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._done: asyncio.Future[bytes] | None = None
        self._parts: list[bytes] = []
        self._first: Callable[[], None] | None = None
        self._tail = b""
        self._missing = 0
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self.transport = cast(asyncio.Transport, transport)

    def ask(self, data: bytes, first: Callable[[], None] | None) -> asyncio.Future[bytes]:
        """Send a request; gives the whole answer. ``first``: called at the first chunk with text."""
        self._done = asyncio.get_running_loop().create_future()
        self._parts, self._first, self._tail, self._missing, self._chunked = [], first, b"", 0, False
        self.transport.write(data)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._first is not None:
            if _MARK in self._tail + data:
                self._first()
                self._first = None
            else:
                self._tail = data[-_TAIL:]
        if self._chunked:
            ends = data.endswith(_END) if len(data) >= len(_END) else b"".join(self._parts[-9:]).endswith(_END)
            if ends:
                self._finish()
        elif self._missing:
            self._missing -= len(data)
            if self._missing <= 0:
                self._finish()
        else:
            self._read_head()

    def _read_head(self) -> None:
        whole = b"".join(self._parts)
        end = whole.find(b"\r\n\r\n")
        if end < 0:
            return
        head = whole[:end].lower()
        self._parts = [whole]
        if b"transfer-encoding: chunked" in head:
            self._chunked = True
            if whole.endswith(_END):
                self._finish()
            return
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        self._missing = end + 4 + length - len(whole)
        if self._missing <= 0:
            self._finish()

    def _finish(self) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_result(b"".join(self._parts))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(WrongAnswer(f"the connection ended: {exc}"))


class Pool:
    """Connections to one address, kept open."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.host = "{}:{}".format(*address)
        self._idle: list[_Connection] = []

    async def ask(self, path: str, body: bytes, first: Callable[[], None] | None = None) -> bytes:
        """The whole answer to a request. Raises WrongAnswer for one that is not 200."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                break
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, *self.address)
        try:
            answer = await connection.ask(wire.request(self.host, path, body), first)
        except asyncio.CancelledError:
            connection.transport.abort()
            raise
        self._idle.append(connection)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise WrongAnswer(answer[:500].decode("latin-1"))
        return answer

    def close(self) -> None:
        """Close those that nobody uses."""
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()


class Target(Protocol):
    """Where turns are sent."""

    async def play(self, body: bytes, chunks: int, turn: Turn) -> None:
        """One turn, its times entered. Raises WrongAnswer."""
        ...

    def close(self) -> None:
        """Close the connections that nobody uses."""
        ...


class Routed:
    """Turns through a router."""

    def __init__(self, address: Address) -> None:
        self._pool = Pool(address)

    async def play(self, body: bytes, chunks: int, turn: Turn) -> None:
        await _stream(self._pool, body, chunks, turn)

    def close(self) -> None:
        self._pool.close()


class Direct:
    """Turns at the engines themselves: the two legs, one after the other."""

    def __init__(self, prefill: Address, decode: Address) -> None:
        self._prefill = Pool(prefill)
        self._decode = Pool(decode)

    async def play(self, body: bytes, chunks: int, turn: Turn) -> None:
        leg = body.replace(b'"stream":true', b'"stream":false', 1)
        answer = await self._prefill.ask(wire.PATH, leg)
        start = answer.rfind(b'"kv_transfer_params":')
        await _stream(self._decode, body[:-1] + b"," + answer[start:], chunks, turn)

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()


async def _stream(pool: Pool, body: bytes, chunks: int, turn: Turn) -> None:
    def first() -> None:
        turn.ttft = perf_counter() - turn.sent

    answer = await pool.ask(wire.PATH, body, first)
    turn.total = perf_counter() - turn.sent
    # The role's chunk has no text.
    if answer.count(_MARK) != chunks - 1 or b"data: [DONE]" not in answer:
        raise WrongAnswer(f"{answer.count(_MARK)} of {chunks - 1} chunks: {answer[-500:].decode('latin-1')}")


async def closed(
    target: Target, conversations: Sequence[wire.Conversation], chunks: int, stop: asyncio.Event, count: list[int]
) -> None:
    """As many turns at once as there are conversations, each followed by the next, until ``stop``; counted."""

    async def talk(conversation: wire.Conversation) -> None:
        while not stop.is_set():
            await target.play(conversation.next_turn(), chunks, Turn(perf_counter()))
            count[0] += 1

    async with asyncio.TaskGroup() as talks:
        for conversation in conversations:
            talks.create_task(talk(conversation))


async def opened(
    target: Target,
    conversations: Sequence[wire.Conversation],
    chunks: int,
    *,
    rate: float,
    seconds: float,
    most: int,
) -> list[Turn] | None:
    """Turns that begin when they begin, whatever became of those before: ``rate`` a second, at random (the same for
    every target). None where ``most`` are under way, or one is refused: the target cannot keep up.

    A turn's times count from when it should have begun.
    """
    random = Random(7)
    turns: list[Turn] = []
    running: set[asyncio.Task[None]] = set()
    began = perf_counter()
    due = 0.0
    try:
        while (due := due + random.expovariate(rate)) < seconds:
            wait = began + due - perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            if len(running) >= most:
                return None
            turn = Turn(began + due)
            turns.append(turn)
            conversation = conversations[len(turns) % len(conversations)]
            task = asyncio.get_running_loop().create_task(target.play(conversation.next_turn(), chunks, turn))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    except WrongAnswer:
        # Such as a refusal for want of time.
        return None
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return turns
