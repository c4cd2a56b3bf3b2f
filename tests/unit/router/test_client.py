"""The client's side of an answer, over a real connection."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvloop_router.client import Client
from kvloop_router.turn_log import TurnReport


@pytest.mark.parametrize(
    ("version", "body"),
    [
        ("1.1", b"1\r\na\r\n2\r\nbc\r\n1\r\nd\r\n4\r\n: x\n\r\n1\r\ne\r\n0\r\n\r\n"),
        ("1.0", b"abcd: x\ne"),
    ],
)
async def test_what_is_sent_at_once_is_framed_and_timed_as_the_rest(version: str, body: bytes) -> None:
    seconds = count(1)
    report = TurnReport("request", "/v1/chat/completions", 0.0, lambda: 0.0)

    async def answer(request: web.Request) -> web.StreamResponse:
        client = Client(request, report, lambda: float(next(seconds)))
        await client.start(200, "text/event-stream")
        await client.write(b"a")
        assert client.write_now(b"bc")
        assert client.write_now(b"d")
        await client.comment(b": x\n")
        await client.write(b"e")
        await client.end()
        return client.response

    application = web.Application()
    application.router.add_get("/", answer)
    async with TestServer(application) as server:
        assert server.port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"GET / HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answered = await reader.read()
        writer.close()

    assert answered.partition(b"\r\n\r\n")[2] == body
    assert (sum(report.gaps.counts or ()), report.gaps.total) == (3, 3.0)


async def test_nothing_is_sent_at_once_to_a_client_that_left() -> None:
    left: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    report = TurnReport("request", "/v1/chat/completions", 0.0, lambda: 0.0)

    async def answer(request: web.Request) -> web.StreamResponse:
        client = Client(request, report, lambda: 0.0)
        await client.start(200, "text/event-stream")
        await client.write(b"a")
        assert request.transport is not None
        request.transport.abort()
        left.set_result(client.write_now(b"b"))
        return client.response

    application = web.Application()
    application.router.add_get("/", answer)
    async with TestServer(application) as server:
        assert server.port is not None
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await left is False
        writer.close()
