"""The client's side of an answer, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

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


async def answered(play: Callable[[Client, web.Request], Awaitable[None]], request: bytes, *, times: int = 1) -> bytes:
    """All that a client gets that sends ``request`` so often and reads until the connection is closed."""

    async def answer(request: web.Request) -> web.StreamResponse:
        client = Client(request, TurnReport("request", request.path, 1796054718.9, lambda: 0.0), lambda: 0.2)
        await play(client, request)
        return client.response

    application = web.Application()
    application.router.add_get("/{rest:.*}", answer)
    async with TestServer(application) as server:
        assert server.port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request * times)
        async with asyncio.timeout(10):
            found = await reader.read()
        writer.close()
        return found


async def test_the_head_goes_with_the_first_bytes_and_the_end_with_the_last() -> None:
    writes: list[bytes] = []

    async def play(client: Client, request: web.Request) -> None:
        transport: Any = request.transport
        write = transport.write

        def noted(data: bytes) -> None:
            writes.append(data)
            write(data)

        transport.write = noted
        await client.start(200, "text/event-stream; charset=utf-8")
        await client.write(b"first")
        await client.write(b"second")
        await client.end(b"last")

    await answered(play, b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert writes == [
        b"HTTP/1.1 200 OK\r\nX-Request-Id: request\r\nX-Kvloop-Path: cold\r\nX-Kvloop-Reused-Tokens: 0\r\n"
        b"Content-Type: text/event-stream; charset=utf-8\r\nDate: Mon, 30 Nov 2026 16:05:19 GMT\r\n"
        b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n5\r\nfirst\r\n",
        b"6\r\nsecond\r\n",
        b"4\r\nlast\r\n0\r\n\r\n",
    ]


async def test_a_connection_serves_again_after_an_answer_that_was_whole() -> None:
    async def play(client: Client, request: web.Request) -> None:
        await client.start(200, "text/plain")
        await client.end(request.path.encode())

    kept = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
    both = await answered(
        play, kept + kept.replace(b"/a", b"/b").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    )

    assert [part.rpartition(b"\r\n\r\n")[2] for part in both.split(b"\r\n0\r\n\r\n")] == [b"2\r\n/a", b"2\r\n/b", b""]


async def test_a_connection_does_not_serve_again_after_half_an_answer() -> None:
    async def play(client: Client, request: web.Request) -> None:
        await client.start(200, "text/plain")
        await client.write(b"half")

    got = await answered(play, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", times=2)

    assert got.count(b"HTTP/1.1 200") == 1
    assert got.endswith(b"4\r\nhalf\r\n")


async def test_where_nothing_else_says_how_long_a_body_is_the_connection_ends_with_it() -> None:
    async def play(client: Client, request: web.Request) -> None:
        await client.start(200, "text/plain")
        await client.end(b"all")

    got = await answered(play, b"GET / HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")

    assert got.endswith(b"\r\n\r\nall")


async def test_an_answer_that_has_no_body_gets_none() -> None:
    async def play(client: Client, request: web.Request) -> None:
        await client.start(204, "text/plain")
        await client.end()

    got = await answered(play, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert got.startswith(b"HTTP/1.1 204 No Content\r\n")
    assert b"Transfer-Encoding" not in got
    assert got.endswith(b"\r\n\r\n")


async def test_no_header_can_end_its_line() -> None:
    async def play(client: Client, request: web.Request) -> None:
        with pytest.raises(ValueError, match="control character"):
            await client.start(200, "text/plain\r\nX-Own: 1")
        assert not client.started
        await client.start(200, "text/plain")
        await client.end(b"good")

    got = await answered(play, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert b"X-Own" not in got
    assert b"good" in got


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


async def test_an_answer_without_a_body_has_none_whatever_comes() -> None:
    async def play(client: Client, request: web.Request) -> None:
        await client.start(204, "text/plain")
        await client.write(b"a")
        assert client.write_now(b"b")
        await client.end(b"c")

    found = await answered(play, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert found.startswith(b"HTTP/1.1 204 ")
    assert found.endswith(b"\r\n\r\n")
    assert found.count(b"\r\n\r\n") == 1
