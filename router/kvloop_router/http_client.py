"""HTTP/1.1 to engines over kept connections."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import NamedTuple
from urllib.parse import urlsplit

from kvloop_router.http_connection import Connection, Response


class NotConnected(Exception):
    """No connection was made: nothing was sent."""


class Trust(NamedTuple):
    """How an engine shows who it is, and the router to it. ``server_name``: whom it shows; None: its host."""

    context: ssl.SSLContext
    server_name: str | None = None


class Limits(NamedTuple):
    """Seconds, or None: for everything, to the answer's end; without anything coming, once the request was made."""

    whole: float | None = None
    stall: float | None = None


_NO_LIMITS = Limits()


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
    trust: asked at each request to an ``https`` address; what is made with another one is used no more. None: the
        system's certificates.
    """

    def __init__(self, *, keep_seconds: float, trust: Callable[[], Trust] | None = None) -> None:
        self._keep_seconds = keep_seconds
        self._trust = trust
        self._pools: dict[tuple[_Place, Trust | None], _Pool] = {}

    async def request(
        self,
        method: str,
        url: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        *,
        connect_seconds: float,
        limits: Limits = _NO_LIMITS,
    ) -> Response:
        """The answer to a request, as soon as its head is there. Raises NotConnected or AnswerBroken.

        connect_seconds: for a new connection. Whoever has the answer must close it.
        """
        place, whole = _place(url), limits.whole
        trust = self._trust() if place.tls and self._trust is not None else None
        pool = self._pools.get((place, trust))
        if pool is None:
            pool = self._pools[place, trust] = _Pool(self._keep_seconds, partial(self._pools.pop, (place, trust), None))
        connection = pool.kept()
        if connection is None:
            before = asyncio.get_running_loop().time()
            seconds = connect_seconds if whole is None else min(whole, connect_seconds)
            connection = await _connected(place, trust, pool, seconds)
            if whole is not None:
                whole -= asyncio.get_running_loop().time() - before
        response = connection.ask(_head(method, place, path, data, headers), data or b"", whole, limits.stall)
        try:
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    @property
    def places(self) -> int:
        """How many there are connections to."""
        return len(self._pools)

    def close(self) -> None:
        """Cut all connections."""
        for pool in [*self._pools.values()]:
            pool.close()


async def _connected(place: _Place, trust: Trust | None, pool: _Pool, seconds: float) -> Connection:
    context: ssl.SSLContext | bool | None = None
    if place.tls:
        context = trust.context if trust is not None else True
    name = trust.server_name if trust is not None else None
    loop = asyncio.get_running_loop()
    try:
        with pool.connecting():
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    pool.connection, place.host, place.port, ssl=context, server_hostname=name
                )
    except (OSError, TimeoutError) as error:
        raise NotConnected(type(error).__name__) from error
    return connection


class _Pool:
    """The connections to one place. Those that nobody uses wait in the order in which they were given back.

    empty: called when there are none any more.
    """

    def __init__(self, keep_seconds: float, empty: Callable[[], object]) -> None:
        self._keep_seconds = keep_seconds
        self._empty = empty
        self._connecting = 0
        self._all: set[Connection] = set()
        self._idle: deque[Connection] = deque()
        self._sweep: asyncio.TimerHandle | None = None

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """While a new one is made."""
        self._connecting += 1
        try:
            yield
        finally:
            self._connecting -= 1
            self._end_if_empty()

    def connection(self) -> Connection:
        """A new one, which is not made yet."""
        return Connection(self)

    def made(self, connection: Connection) -> None:
        self._all.add(connection)

    def kept(self) -> Connection | None:
        """One that can be used: the last that was given back, so that the others may end."""
        before = asyncio.get_running_loop().time() - self._keep_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since <= before:
                # A busy loop sweeps late; the engine may have ended it.
                connection.cut()
            elif not connection.transport.is_closing():
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
        self._end_if_empty()

    def close(self) -> None:
        """Cut all."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in self._all:
            connection.cut()

    def _end_if_empty(self) -> None:
        if not self._all and not self._connecting:
            self._empty()

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
