"""Comments on a stream that is silent, for load balancers that cut connections on which nothing moves.

A comment goes only between two events of a stream that has begun. Clients of server-sent events skip it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvloop_router.relay import Downstream, Source

COMMENT = b": keep-alive\n\n"

_ENDS = (b"\n\n", b"\r\n\r\n")
_LONGEST_END = 4


def kept_alive(upstream: Source, downstream: Downstream, seconds: float | None) -> Source:
    """``upstream``; while it says nothing for ``seconds``, ``downstream`` is sent a comment. None: never."""
    if seconds is None or not upstream.content_type.startswith("text/event-stream"):
        return upstream
    return _KeptAlive(upstream, downstream, seconds)


class _KeptAlive:
    def __init__(self, upstream: Source, downstream: Downstream, seconds: float) -> None:
        self._upstream = upstream
        self._downstream = downstream
        self._seconds = seconds
        self._tail = b""
        self.engine, self.status, self.content_type = upstream.engine, upstream.status, upstream.content_type
        self.unread = upstream.unread

    @property
    def over(self) -> bool:
        """As of ``Source``."""
        return self._upstream.over

    async def read(self) -> bytes:
        """As of ``Source``. Raises ClientGone too."""
        while True:
            try:
                async with asyncio.timeout(self._seconds if self._between() else None):
                    data = await self._upstream.read()
            except TimeoutError:
                await self._downstream.comment(COMMENT)
            else:
                self._tail = (self._tail + data)[-_LONGEST_END:]
                return data

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """As of ``Source``. Raises ClientGone too."""
        now = asyncio.get_running_loop().time
        heard = now()

        def noted(data: bytes) -> bool:
            nonlocal heard
            if not take(data):
                return False
            heard = now()
            self._tail = (self._tail + data)[-_LONGEST_END:]
            return True

        while True:
            try:
                # One timer for many pieces: it looks when it has run out whether something has come.
                async with asyncio.timeout_at(heard + self._seconds):
                    await self._upstream.pass_on(noted)
            except TimeoutError:
                if now() >= heard + self._seconds and self._between():
                    heard = now()
                    await self._downstream.comment(COMMENT)
            else:
                return

    def _between(self) -> bool:
        return self._downstream.started and self._tail.endswith(_ENDS)
