"""One connection to an engine, and the answer that comes over it. What HTTP is, llhttp decides.

A stream of tokens is very many small pieces: each can be looked at, and passed on, in the call in which it arrives
(``Response.pass_on``), with no task that wakes up for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools

_BUFFERED_BYTES = 262_144
"""So much of an answer waits for its reader before no more is read from the engine."""
_LONGEST_SIZE_LINE = 10
_HEXADECIMAL = b"0123456789abcdefABCDEF"
_HEAD, _PIECE, _END = range(3)
"""What of an answer somebody waits for."""


class AnswerBroken(Exception):
    """The connection, or what came over it, ended before the answer's end."""


class Owner(Protocol):
    """Who keeps connections."""

    def made(self, connection: Connection) -> None:
        """It is there."""
        ...

    def released(self, connection: Connection) -> None:
        """It can be used again."""
        ...

    def lost(self, connection: Connection) -> None:
        """It is gone."""
        ...


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._response: Response | None = None
        self.parser: httptools.HttpResponseParser
        self.transport: asyncio.Transport
        self.idle_since = 0.0
        self._now = asyncio.get_running_loop().time

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._owner.made(self)

    def cut(self) -> None:
        """End it at once."""
        self.transport.abort()

    def ask(self, head: bytes, data: bytes, seconds: float | None = None, stall: float | None = None) -> Response:
        """Send a request; its answer is still to come.

        seconds: in which it must have ended. stall: for which nothing may come. None: no bound.
        """
        response = self._response = Response(self)
        self.parser = httptools.HttpResponseParser(response)
        if seconds is not None:
            response.limit(seconds)
        if stall is not None:
            response.limit_stalls(stall)
        if len(data) < _BUFFERED_BYTES:
            self.transport.write(head + data)
        else:
            self.transport.write(head)
            self.transport.write(data)
        if self.transport.is_closing():
            response.fail(AnswerBroken("the connection was closed"))
        return response

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            # Nobody asked for anything.
            self.transport.abort()
            return
        response.heard = self._now()
        if response.between_chunks and (piece := _only_chunks(data)) is not None:
            response.on_body(piece)
        else:
            try:
                self.parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                response.fail(AnswerBroken(type(error).__name__))
                self.transport.abort()
                return
            # With the line that says its length, the next chunk has begun.
            response.between_chunks = response.between_chunks and data.endswith(b"\r\n")
        response.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self)
        if self._response is not None:
            self._response.cut_off(exc)

    def done(self, *, reusable: bool) -> None:
        """Whoever read the answer needs the connection no more."""
        self._response = None
        del self.parser
        if reusable and not self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self._owner.released(self)
        else:
            self.transport.abort()


class Response:
    """An answer that is coming. ``headers``: names in lower case; of several of one name, the last.

    between_chunks: what comes next is a chunk of the transfer encoding, from its first byte on.
    heard: when something came last, by the loop's clock.
    """

    __slots__ = (
        "_awaited",
        "_closed",
        "_complete",
        "_connection",
        "_error",
        "_keep_alive",
        "_length_known",
        "_limit",
        "_paused",
        "_pieces",
        "_size",
        "_stall",
        "_take",
        "_waiter",
        "between_chunks",
        "headers",
        "heard",
        "status",
    )

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.between_chunks = False
        self.heard = 0.0
        self._connection = connection
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._keep_alive = False
        self._length_known = False
        self._complete = False
        self._closed = False
        self._paused = False
        self._error: AnswerBroken | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._awaited = _HEAD
        self._take: Callable[[bytes], bool] | None = None

    async def head(self) -> None:
        """Wait for status and headers. Raises AnswerBroken."""
        await self._until(_HEAD)
        if not self.status and self._error is not None:
            raise self._error

    async def read(self) -> bytes:
        """All that has arrived, and at least something; empty at the end. Raises AnswerBroken."""
        await self._until(_PIECE)
        data = self.unread()
        if not data and self._error is not None:
            raise self._error
        return data

    async def read_all(self) -> bytes:
        """All that there is to come. Raises AnswerBroken."""
        self._resume()
        await self._until(_END)
        if self._error is not None:
            raise self._error
        return self.unread()

    @property
    def over(self) -> bool:
        """Whether it has come to its end, and all of it was read."""
        return self._complete and not self._pieces and self._error is None

    def unread(self) -> bytes:
        """What has arrived and was not read."""
        data = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        self._resume()
        return data

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """Hand each piece to ``take`` in the moment in which it arrives, until one is refused, which is then to be
        read, or there are no more. Must not be called while something is unread.
        """
        if self._pieces:
            return
        self._take = take
        try:
            await self._until(_PIECE)
        finally:
            self._take = None

    def limit(self, seconds: float) -> None:
        """The answer must have ended by then."""
        self._limit = asyncio.get_running_loop().call_later(seconds, self.fail, AnswerBroken("TimeoutError"))

    def limit_stalls(self, seconds: float) -> None:
        """From now on something must come every so many seconds, except while it is not read from the engine."""
        loop = asyncio.get_running_loop()
        self.heard = loop.time()
        self._stall = loop.call_later(seconds, self._check_stall, seconds)

    def close(self) -> None:
        """Nobody reads any more. An answer that has not ended is given up, and its request with it."""
        if self._closed:
            return
        self._closed = True
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self._resume()
        self._connection.done(reusable=self._keep_alive and self._error is None)

    def fail(self, error: AnswerBroken) -> None:
        """The answer will not come to its end."""
        if not self._complete and self._error is None:
            self._error = error
            self._connection.transport.abort()
            self.wake()

    def cut_off(self, error: Exception | None) -> None:
        """The connection is gone, which ends an answer that did not say how long it is."""
        if self._complete or self._error is not None:
            pass
        elif self.status and not self._length_known and error is None:
            self._complete = True
        else:
            self._error = AnswerBroken(type(error).__name__ if error is not None else "the connection was closed")
        self.wake()

    def wake(self) -> None:
        """Wake whoever waits, if it is there what they wait for."""
        waiter = self._waiter
        if waiter is not None and (self._error is not None or self._is_there(self._awaited)):
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def on_message_begin(self) -> None:
        """As llhttp has parsed it. Raises AnswerBroken, which ends the connection, where nothing more was asked for."""
        if self._complete:
            raise AnswerBroken("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """As above."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """As above."""
        status = self._connection.parser.get_status_code()
        if status < 200:
            # Only a word in between: the answer is still to come.
            self.headers.clear()
            return
        self.status = status
        chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._length_known = chunked or "content-length" in self.headers or status in (204, 304)
        self.between_chunks = chunked

    def on_chunk_header(self) -> None:
        """As above."""
        self.between_chunks = False

    def on_chunk_complete(self) -> None:
        """As above."""
        self.between_chunks = True

    def on_body(self, data: bytes) -> None:
        """Bytes of the body."""
        if self._take is not None:
            if not self._pieces and self._take(data):
                return
            self._take = None
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _BUFFERED_BYTES and self._awaited != _END and not self._paused:
            self._paused = True
            self._connection.transport.pause_reading()

    def on_message_complete(self) -> None:
        """As above."""
        if self.status:
            self._complete = True
            self.between_chunks = False
            # llhttp forgets it with the end of the message.
            self._keep_alive = self._connection.parser.should_keep_alive()

    def _check_stall(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        left = self.heard + seconds - loop.time() if not self._paused else seconds
        if left <= 0:
            self.fail(AnswerBroken("TimeoutError"))
        elif not self._complete:
            self._stall = loop.call_later(left, self._check_stall, seconds)

    async def _until(self, awaited: int) -> None:
        if self._error is None and not self._is_there(awaited):
            self._awaited = awaited
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _is_there(self, awaited: int) -> bool:
        return self._complete or bool(self.status if awaited == _HEAD else awaited == _PIECE and self._pieces)

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self.heard = asyncio.get_running_loop().time()
            if not self._connection.transport.is_closing():
                self._connection.transport.resume_reading()


def _only_chunks(data: bytes) -> bytes | None:
    """The content of chunks, where ``data`` is whole chunks and nothing else."""
    contents = []
    start, length = 0, len(data)
    while start < length:
        end = data.find(b"\r\n", start, start + _LONGEST_SIZE_LINE)
        if end <= start:
            return None
        if (written := data[start:end]).translate(None, _HEXADECIMAL):
            # Python reads more as a number than HTTP does.
            return None
        size = int(written, 16)
        start = end + size + 4
        if size <= 0 or data[start - 2 : start] != b"\r\n":
            return None
        contents.append(data[end + 2 : start - 2])
    return contents[0] if len(contents) == 1 else b"".join(contents)
