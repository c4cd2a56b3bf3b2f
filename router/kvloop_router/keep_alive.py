"""Comments on a stream that is silent, for load balancers that cut connections on which nothing moves.

A comment goes only between two events of a stream that has begun. Clients of server-sent events skip it.
"""

from __future__ import annotations

import asyncio

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

    async def read(self) -> bytes:
        """As of ``Source``. Raises ClientGone too."""
        while True:
            between = self._downstream.started and self._tail.endswith(_ENDS)
            try:
                async with asyncio.timeout(self._seconds if between else None):
                    data = await self._upstream.read()
            except TimeoutError:
                await self._downstream.comment(COMMENT)
            else:
                self._tail = (self._tail + data)[-_LONGEST_END:]
                return data
