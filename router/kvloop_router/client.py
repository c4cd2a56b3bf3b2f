"""The client's side of an answer: headers once, bytes as they come, and a cut where they do not come to their end."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from aiohttp import HttpVersion11, web

from kvloop_router.relay import ClientGone
from kvloop_router.turn_log import TurnReport

CLIENT_LEFT = 499
"""The status that is reported where the client left before its answer; nobody sees it."""

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Client:
    """The client's side of one answer; see ``relay.Downstream``."""

    def __init__(self, request: web.Request, report: TurnReport, clock: Callable[[], float]) -> None:
        self._request = request
        self._report = report
        self._clock = clock
        self.response: web.StreamResponse = web.Response(status=CLIENT_LEFT)
        self.started = False
        self.status = 0

    async def start(self, status: int, content_type: str) -> None:
        """Send status and headers."""
        self.status = status
        self.started = True
        self._report.phase = "stream"
        self.response = web.StreamResponse(
            status=status, headers={**self._report.headers(), "Content-Type": content_type}
        )
        if content_type.startswith("text/event-stream"):
            self.response.headers["Cache-Control"] = "no-cache"
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def write(self, data: bytes) -> None:
        """Send bytes of the body."""
        now = self._clock()
        if self._report.ttft_seconds is None:
            self._report.first_byte(now, data)
        self._report.gaps.note(now)
        await self.comment(data)

    async def comment(self, data: bytes) -> None:
        """Send bytes that are no part of the answer."""
        try:
            await self.response.write(data)
        except ConnectionError as error:
            raise ClientGone from error

    async def end(self) -> None:
        """The body is complete."""
        try:
            await self.response.write_eof()
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
