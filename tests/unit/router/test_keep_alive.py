"""Comments on silent streams: only between events, only once the answer has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from kvloop_router.keep_alive import COMMENT, kept_alive


class Scripted:
    """An engine's answer: bytes at once, or None where it waits until the client has been sent a comment."""

    engine = "decode-0"
    status = 200

    def __init__(self, script: list[bytes | None], commented: asyncio.Event, content_type: str) -> None:
        self.content_type = content_type
        self._script: Iterator[bytes | None] = iter(script)
        self._commented = commented
        self._refused = b""

    async def read(self) -> bytes:
        if self._refused:
            refused, self._refused = self._refused, b""
            return refused
        for data in self._script:
            if data is not None:
                return data
            self._commented.clear()
            await self._commented.wait()
        return b""

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        while data := await self.read():
            if not take(data):
                self._refused = data
                return

    over = False

    def unread(self) -> bytes:
        return b""


class Recording:
    """The client's side."""

    def __init__(self) -> None:
        self.started = False
        self.sent = b""
        self.commented = asyncio.Event()

    async def start(self, status: int, content_type: str) -> None:
        self.started = True

    async def write(self, data: bytes) -> None:
        self.started = True
        self.sent += data

    def write_now(self, data: bytes) -> bool:
        if b"no" in data:
            return False
        self.sent += data
        return True

    async def comment(self, data: bytes) -> None:
        assert self.started
        self.sent += data
        self.commented.set()

    async def end(self, data: bytes = b"") -> None:
        self.sent += data


async def copied(
    script: list[bytes | None], *, seconds: float | None, content_type: str = "text/event-stream"
) -> bytes:
    downstream = Recording()
    source = kept_alive(Scripted(script, downstream.commented, content_type), downstream, seconds)
    while data := await source.read():
        await downstream.write(data)
    return downstream.sent


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
async def test_a_silent_stream_gets_a_comment_between_its_events(end: bytes) -> None:
    first, half, rest = b"data: 1" + end, b"data: ", b"2" + end

    assert await copied([first, None, half, rest, None], seconds=0.001) == first + COMMENT + half + rest + COMMENT


async def test_an_event_that_came_in_pieces_has_an_end_too() -> None:
    script: list[bytes | None] = [b"data: 1\n", b"\n", None, b"data: 2\n\n"]

    assert await copied(script, seconds=0.001) == b"data: 1\n\n" + COMMENT + b"data: 2\n\n"


@pytest.mark.parametrize(
    ("script", "seconds", "content_type"),
    [
        ([None, b"data: 1\n\n"], 0.001, "text/event-stream"),
        ([b"data: ", None, b"1\n\n"], 0.001, "text/event-stream"),
        ([b"{}\n\n", None], 0.001, "application/json"),
        ([b"data: 1\n\n", None], None, "text/event-stream"),
    ],
    ids=["not begun", "within an event", "no stream", "off"],
)
async def test_elsewhere_there_is_none(script: list[bytes | None], seconds: float | None, content_type: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await copied(script, seconds=seconds, content_type=content_type)


async def test_pieces_that_are_passed_on_are_heard_too() -> None:
    first, half, rest, refused = b"data: 1\n\n", b"data: ", b"2\n\n", b"data: no\n\n"
    downstream = Recording()
    script = [first, None, first, None, None, half, rest, refused, None]
    source = kept_alive(Scripted(script, downstream.commented, "text/event-stream"), downstream, 0.001)
    while data := await source.read():
        await downstream.write(data)
        await source.pass_on(downstream.write_now)
    passed = first + COMMENT + first + COMMENT * 2 + half + rest + refused + COMMENT
    assert downstream.sent == passed
