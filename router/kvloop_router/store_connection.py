"""One connection to a Valkey or Redis server, on which commands wait for their answers in order (RESP, version 2).

The server does one thing at a time, so that a second connection would gain nothing. Every turn waits for it several
times: what a general client does for each command, such as pools, retries and observers, is left out.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import unquote, urlsplit

import hiredis

_TLS_SCHEMES = frozenset({"rediss", "valkeys"})
_DEFAULT_PORT = 6379

Argument = bytes | str | float


class Refused(Exception):
    """The server's answer is an error."""


class ConnectionEnded(OSError):
    """The connection ended, or cannot be followed any further; what was asked on it may have been done."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is, and how it is greeted.

    password: None where the server wants none. It is asked for at each connection, so that it may change.
    tls: what to trust, likewise; None for a connection in the clear.
    """

    host: str
    port: int
    database: int
    user: str | None
    password: Callable[[], str] | None
    tls: Callable[[], ssl.SSLContext] | None

    @classmethod
    def at(cls, url: str, *, password_file: Path | None = None, ca_file: Path | None = None) -> Self:
        """The server of a URL. A password file goes before the URL's password."""
        parts = urlsplit(url)
        password = partial(unquote, parts.password) if parts.password else None
        if password_file is not None:
            password = partial(_written_in, password_file)
        return cls(
            host=parts.hostname or "localhost",
            port=parts.port or _DEFAULT_PORT,
            database=int(parts.path.strip("/") or 0),
            user=unquote(parts.username) if parts.username else None,
            password=password,
            tls=partial(_trusting, ca_file) if parts.scheme in _TLS_SCHEMES else None,
        )

    async def connect(self) -> StoreConnection:
        """A connection on which commands may be sent. Raises OSError, or Refused for a wrong password or database."""
        tls = None if self.tls is None else self.tls()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(StoreConnection, self.host, self.port, ssl=tls)
        try:
            for greeting in self._greetings():
                await connection.ask(greeting)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greetings(self) -> list[tuple[Argument, ...]]:
        greetings: list[tuple[Argument, ...]] = []
        if self.password is not None:
            user = () if self.user is None else (self.user,)
            greetings.append(("AUTH", *user, self.password()))
        if self.database:
            greetings.append(("SELECT", self.database))
        return greetings


class StoreConnection(asyncio.Protocol):
    """Commands go out at once; each answer is that of the command that has waited longest."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(replyError=Refused, notEnoughData=_UNFINISHED)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._transport: asyncio.Transport
        self._finishing = False
        self.open = True

    def ask(self, command: Sequence[Argument]) -> asyncio.Future[Any]:
        """Send a command; gives its answer, or raises Refused or ConnectionEnded. Whoever waits may leave."""
        # Its own types say that a command has one part.
        packed: bytes = hiredis.pack_command(cast(Any, tuple(command)))
        answer = asyncio.get_running_loop().create_future()
        if self.open:
            self._waiting.append(answer)
            self._transport.write(packed)
        else:
            answer.set_exception(ConnectionEnded("it was closed"))
        return answer

    def finish(self) -> None:
        """Nothing more is asked: end it once all that waits has its answer."""
        self._finishing = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """End it; what waits for an answer gets none."""
        self._end("it was closed")
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio's Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        own: socket.socket | None = transport.get_extra_info("socket")
        if own is not None:
            # What was lost without a word, such as a node, is noticed even where nothing is asked.
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        """As asyncio's Protocol."""
        try:
            self._reader.feed(data)
            while (answer := self._reader.gets()) is not _UNFINISHED:
                self._answered(answer)
        except (hiredis.ProtocolError, IndexError):
            self._end("the answer is not the protocol's")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio's Protocol."""
        self._end(str(exc) if exc is not None else "the server closed it")

    def _answered(self, answer: Any) -> None:
        waiting = self._waiting.popleft()
        if waiting.done():
            pass
        elif isinstance(answer, Refused):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)
        if self._finishing and not self._waiting:
            self.close()

    def _end(self, why: str) -> None:
        self.open = False
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(ConnectionEnded(why))


_UNFINISHED = object()


def _written_in(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip()


def _trusting(ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
