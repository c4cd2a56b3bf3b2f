"""HTTP/1.1 to engines over kept connections."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from kvloop_router.http_connection import Connection, Response


class NotConnected(Exception):
    """No connection was made: nothing was sent."""


class _Place(NamedTuple):
    """Where an engine listens. ``path``: what all of its paths begin with."""

    host: str
    port: int
    tls: bool
    name: bytes
    path: str


@lru_cache(maxsize=4096)
def _place(url: str) -> _Place:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if tls else 80)
    name = f"[{host}]" if ":" in host else host
    return _Place(host, port, tls, f"{name}:{port}".encode(), parts.path.rstrip("/"))


class Client:
    """Connections to all engines, as many as there are requests; those that were used are kept for a while.

    keep_seconds: for how long, when nobody uses them.
    tls: for engines with an ``https`` address; None: the system's certificates.
    """

    def __init__(self, *, keep_seconds: float, tls: ssl.SSLContext | None = None) -> None:
        self._keep_seconds = keep_seconds
        self._tls = tls
        self._pools: dict[_Place, _Pool] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def request(
        self,
        method: str,
        url: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        *,
        connect_seconds: float,
        seconds: float | None,
    ) -> Response:
        """The answer to a request, as soon as its head is there. Raises NotConnected or AnswerBroken.

        connect_seconds: for a new connection. seconds: for everything after it, to the answer's end; None: no bound.
        Whoever has the answer must close it.
        """
        place = _place(url)
        pool = self._pools.get(place)
        if pool is None:
            pool = self._pools[place] = _Pool(self._keep_seconds)
        connection = pool.kept() or await self._connected(place, pool, connect_seconds)
        response = connection.ask(_head(method, place, path, data, headers), data or b"", seconds)
        try:
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    def close(self) -> None:
        """Cut all connections."""
        for pool in self._pools.values():
            pool.close()

    async def _connected(self, place: _Place, pool: _Pool, seconds: float) -> Connection:
        loop = asyncio.get_running_loop()
        tls: ssl.SSLContext | bool | None = (self._tls or True) if place.tls else None
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(pool.connection, place.host, place.port, ssl=tls)
        except (OSError, TimeoutError) as error:
            raise NotConnected(type(error).__name__) from error
        return connection


class _Pool:
    """The connections to one place. Those that nobody uses wait in the order in which they were given back."""

    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        self._all: set[Connection] = set()
        self._idle: deque[Connection] = deque()
        self._sweep: asyncio.TimerHandle | None = None

    def connection(self) -> Connection:
        """A new one."""
        connection = Connection(self)
        self._all.add(connection)
        return connection

    def kept(self) -> Connection | None:
        """One that can be used: the last that was given back, so that the others may end."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    def released(self, connection: Connection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep_at(connection.idle_since + self._keep_seconds)

    def lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        """Cut all."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in self._all:
            connection.cut()

    def _sweep_at(self, when: float) -> None:
        self._sweep = asyncio.get_running_loop().call_at(when, self._swept)

    def _swept(self) -> None:
        """Cut what nobody has used for too long."""
        self._sweep = None
        before = asyncio.get_running_loop().time() - self._keep_seconds
        while self._idle:
            if self._idle[0].idle_since > before:
                self._sweep_at(self._idle[0].idle_since + self._keep_seconds)
                return
            self._idle.popleft().cut()


def _head(method: str, place: _Place, path: str, data: bytes | None, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {place.path}{path} HTTP/1.1".encode(), b"Host: " + place.name]
    for name, value in headers.items():
        line = f"{name}: {value}".encode("utf-8", "surrogateescape")
        if b"\r" in line or b"\n" in line or b"\0" in line:
            raise ValueError(f"the header {name!r} holds a line end")
        lines.append(line)
    if data is not None:
        lines.append(b"Content-Length: %d" % len(data))
    return b"\r\n".join(lines) + b"\r\n\r\n"
