"""The client's side of an answer: headers once, bytes as they come, and a cut where they do not come to their end.

What of an answer goes out as it comes is written past aiohttp, which reads the requests: each write of the system costs
as much as much of a turn, so that the head goes with the first bytes, and the end of the body with the last.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.web_request import BaseRequest

from kvloop_router.relay import ClientGone
from kvloop_router.turn_log import TurnReport

CLIENT_LEFT = 499
"""The status that is reported where the client left before its answer; nobody sees it."""

_UNSENT_BYTES = 65_536
"""So much may wait to be sent before whoever sends more has to wait."""

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


_UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_END = b"0\r\n\r\n"
_BODILESS = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})


class _Sent(web.StreamResponse):
    """An answer that was sent, as far as it was: nothing of it is left for aiohttp to do."""

    def __init__(self, status: int) -> None:
        super().__init__(status=status)
        self.whole = False

    @property
    def keep_alive(self) -> bool:
        """Whether the connection can be used again."""
        return self.whole

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:
        """Nothing."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing."""


class Client:
    """The client's side of one answer; see ``relay.Downstream``."""

    def __init__(self, request: web.Request, report: TurnReport, clock: Callable[[], float]) -> None:
        self._request = request
        self._report = report
        self._clock = clock
        self._sent: _Sent | None = None
        self._head = b""
        self._chunked = request.version >= HttpVersion11
        self.status = 0

    @property
    def started(self) -> bool:
        """Whether the answer has begun."""
        return self._sent is not None

    @property
    def response(self) -> web.StreamResponse:
        """What aiohttp is to be given."""
        return web.Response(status=CLIENT_LEFT) if self._sent is None else self._sent

    async def start(self, status: int, content_type: str) -> None:
        """Status and headers, which go out with the first bytes."""
        report = self._report
        self._chunked = self._chunked and status not in _BODILESS
        report.phase = "stream"
        now = report.at + self._clock() - report.began
        told = {**report.headers(), "Content-Type": content_type, "Date": _date(int(now))}
        if content_type.startswith("text/event-stream"):
            told["Cache-Control"] = "no-cache"
        if self._chunked:
            told["Transfer-Encoding"] = "chunked"
        if not self._request.keep_alive:
            told["Connection"] = "close"
        self._head = _written(self._request, status, told)
        self._sent, self.status = _Sent(status), status

    async def write(self, data: bytes) -> None:
        """Send bytes of the body."""
        self._note(data)
        await self.comment(data)

    async def comment(self, data: bytes) -> None:
        """Send bytes that are no part of the answer."""
        await self._send(self._framed(data))

    def write_now(self, data: bytes) -> bool:
        """Send bytes of the body after those of ``write``, unless they would have to wait; gives whether it did."""
        transport = self._request.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > _UNSENT_BYTES:
            return False
        if not data or self.status in _BODILESS:
            return True
        self._report.gaps.note(self._clock())
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return True

    async def end(self, data: bytes = b"") -> None:
        """The body is complete, with ``data``."""
        if data:
            self._note(data)
        await self._send(self._framed(data) + _END if self._chunked else self._framed(data))
        if self._sent is not None:
            # Where nothing says how long the body is, the connection's end does.
            self._sent.whole = self._request.keep_alive and (self._chunked or self.status in _BODILESS)

    def _note(self, data: bytes) -> None:
        now = self._clock()
        if self._report.ttft_seconds is None:
            self._report.first_byte(now, data)
        self._report.gaps.note(now)

    def _framed(self, data: bytes) -> bytes:
        """With the head before it, where that has not gone out yet."""
        head, self._head = self._head, b""
        if self.status in _BODILESS:
            return head
        if data and self._chunked:
            return b"%b%x\r\n%b\r\n" % (head, len(data), data)
        return head + data

    async def _send(self, data: bytes) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ClientGone
        if data:
            transport.write(data)
        if transport.get_write_buffer_size() > _UNSENT_BYTES:
            try:
                await self._request.writer.drain()
            except ConnectionError as error:
                raise ClientGone from error

    def answer(self, status: int, content_type: str, body: bytes) -> web.Response:
        """An answer in one piece."""
        self.status = status
        self._report.first_byte(self._clock(), body)
        return web.Response(status=status, body=body, headers={**self._report.headers(), "Content-Type": content_type})

    def abort(self) -> None:
        """Cut the connection, so that nobody takes what was sent for the whole."""
        transport = self._request.transport
        if transport is None:
            return
        connection = transport.get_extra_info("socket")
        if self._request.version < HttpVersion11 and connection is not None:
            # Before HTTP/1.1, which proxies still speak, a connection that is closed ends the answer well; a reset does
            # not.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        transport.abort()


def _written(request: web.Request, status: int, told: dict[str, str]) -> bytes:
    """A head. Raises ValueError where something in it would end its line."""
    lines = [f"{name}: {value}" for name, value in told.items()]
    if any(map(_UNSAFE.search, lines)):
        raise ValueError("a header holds a control character")
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    major, minor = request.version
    return "\r\n".join([f"HTTP/{major}.{minor} {status} {phrase}", *lines, "\r\n"]).encode("utf-8", "surrogateescape")


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
