"""The client that speaks to engines, against a server that answers exactly these bytes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvloop_router.http_client import Client, Limits, NotConnected, Trust
from kvloop_router.http_connection import AnswerBroken, Response
from tests.cluster.credentials import Authority

UNBOUNDED = Limits()
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\nok"


class Server:
    """Answers each request with the next of ``answers``, piece by piece; None as a piece closes the connection, a
    number waits for so many seconds."""

    def __init__(self, *answers: Sequence[bytes | float | None]) -> None:
        self.answers = [*answers]
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    if isinstance(piece, float):
                        await asyncio.sleep(piece)
                        continue
                    writer.write(piece)
                    await writer.drain()
                    # Two turns of the loop, so that pieces are read apart.
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    *answers: Sequence[bytes | float | None],
    tls: ssl.SSLContext | None = None,
    trust: Callable[[], Trust] | None = None,
    keep_seconds: float = 60,
) -> AsyncIterator[tuple[Server, Client]]:
    server = Server(*answers)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    scheme = "https" if tls is not None else "http"
    server.url = scheme + "://{}:{}".format(*listening.sockets[0].getsockname())
    client = Client(keep_seconds=keep_seconds, trust=trust)
    try:
        yield server, client
    finally:
        client.close()
        listening.close()
        await listening.wait_closed()


async def ask(server: Server, client: Client, limits: Limits = UNBOUNDED, *, data: bytes = b"{}") -> Response:
    return await client.request("POST", server.url, "/x", data, {"X-A": "b"}, connect_seconds=5, limits=limits)


async def whole(server: Server, client: Client, limits: Limits = UNBOUNDED) -> bytes:
    response = await ask(server, client, limits)
    try:
        return await response.read_all()
    finally:
        response.close()


async def test_a_connection_is_used_again_after_an_answer_that_was_read() -> None:
    async with serving([WHOLE], [CHUNKED, b"3\r\nabc\r\n", b"0\r\n\r\n"], [WHOLE]) as (server, client):
        assert [await whole(server, client) for _ in range(3)] == [b"ok", b"abc", b"ok"]
        assert server.connections == 1
        assert server.requests[0].startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:")
        assert server.requests[0].endswith(b"X-A: b\r\nContent-Length: 2\r\n\r\n{}")


async def test_a_connection_is_not_used_past_its_time_by_a_loop_that_was_too_busy_to_end_it() -> None:
    # Nothing waits between the two, so that the loop has no time to end it.
    async with serving([WHOLE], [WHOLE], keep_seconds=0) as (server, client):
        assert await whole(server, client) == b"ok"
        assert await whole(server, client) == b"ok"
        assert server.connections == 2


@pytest.mark.parametrize("size", [b"+3", b" 3", b"0x3", b"0_3", b"3 3"])
async def test_a_size_that_only_python_reads_as_one_breaks_the_answer(size: bytes) -> None:
    async with serving([CHUNKED, b"3\r\nabc\r\n", size + b"\r\nabc\r\n", b"0\r\n\r\n"]) as (server, client):
        with pytest.raises(AnswerBroken):
            await whole(server, client)


async def test_an_answer_that_changes_the_protocol_is_broken() -> None:
    switching = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with serving([switching]) as (server, client):
        with pytest.raises(AnswerBroken):
            await whole(server, client)


async def test_a_connection_is_not_used_again_where_the_answer_was_not_read_or_says_so() -> None:
    closing = WHOLE.replace(b"Content-Type: text/plain", b"Connection: close")
    async with serving([CHUNKED, b"3\r\nabc\r\n"], [closing, None], [WHOLE]) as (server, client):
        response = await ask(server, client)
        assert await response.read() == b"abc"
        response.close()
        assert await whole(server, client) == b"ok"
        assert await whole(server, client) == b"ok"
        assert server.connections == 3


@pytest.mark.parametrize(
    "pieces",
    [
        [b"3\r\nabc\r\n", b"2\r\nde\r\n", b"0\r\n\r\n"],
        [b"3\r\nabc\r\n2", b"\r\nde\r\n0\r\n\r\n"],
        [b"3\r\nab", b"c\r", b"\n", b"2\r\nde\r\n", b"0\r\n\r\n"],
        [b"0", b"3\r\nabc\r\n", b"02;x=1\r\nde\r\n", b"0\r\nTrailer: t\r\n\r\n"],
        [b"5\r\nabcde\r\n0\r\n\r\n"],
    ],
)
async def test_chunks_are_the_same_however_they_are_read(pieces: list[bytes]) -> None:
    async with serving([CHUNKED, *pieces], [WHOLE]) as (server, client):
        assert await whole(server, client) == b"abcde"
        assert await whole(server, client) == b"ok"
        assert server.connections == 1


async def test_pieces_are_passed_on_until_one_is_refused() -> None:
    async with serving([CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n", b"1\r\nc\r\n", b"1\r\nd\r\n0\r\n\r\n"]) as (
        server,
        client,
    ):
        response = await ask(server, client)
        taken = []

        def take(data: bytes) -> bool:
            taken.append(data)
            return b"c" not in data

        first = await response.read()
        while b"c" not in first + b"".join(taken):
            await response.pass_on(take)
        rest = b""
        while data := await response.read():
            rest += data
        assert first + b"".join(taken) + rest in (b"abccd", b"abcd")
        response.close()


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with serving([b"HTTP/1.1 200 OK\r\n\r\nab", b"c", None]) as (server, client):
        assert await whole(server, client) == b"abc"


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\nContent-Len", None],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", None],
        [CHUNKED, b"3\r\nabc\r\n", None],
        [CHUNKED, b"3\r\nabcdef\r\n"],
        [b"not HTTP at all\r\n\r\n"],
    ],
)
async def test_an_answer_that_breaks_off_or_is_none_is_no_answer(pieces: list[bytes | None]) -> None:
    async with serving(pieces) as (server, client):
        with pytest.raises(AnswerBroken):
            await whole(server, client)


async def test_an_answer_that_takes_too_long_is_given_up() -> None:
    async with serving([CHUNKED, b"1\r\na\r\n"]) as (server, client):
        with pytest.raises(AnswerBroken, match="TimeoutError"):
            await whole(server, client, Limits(whole=0.05))


async def test_an_answer_that_is_silent_for_too_long_is_given_up() -> None:
    for pieces in ([], [CHUNKED, b"1\r\na\r\n"]):
        async with serving(pieces) as (server, client):
            with pytest.raises(AnswerBroken, match="TimeoutError"):
                await whole(server, client, Limits(stall=0.05))


async def test_an_answer_may_take_long_as_long_as_something_comes() -> None:
    script: list[bytes | float] = [b"1\r\na\r\n", 0.3] * 5
    async with serving([CHUNKED, *script, b"0\r\n\r\n"]) as (server, client):
        assert await whole(server, client, Limits(stall=1.0)) == b"a" * 5


async def test_an_engine_is_not_silent_while_nobody_reads_it() -> None:
    data = b"x" * 4_000_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data)
    async with serving([head, data]) as (server, client):
        response = await ask(server, client, Limits(stall=1.0))
        await asyncio.sleep(1.2)
        assert await response.read_all() == data
        response.close()


async def test_what_comes_in_between_is_not_the_answer() -> None:
    async with serving([b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", WHOLE]) as (server, client):
        response = await ask(server, client)
        assert (response.status, response.headers["content-type"]) == (200, "text/plain")
        response.close()


async def test_a_second_answer_ends_the_connection() -> None:
    async with serving([WHOLE + WHOLE], [WHOLE]) as (server, client):
        assert await whole(server, client) == b"ok"
        assert await whole(server, client) == b"ok"
        assert server.connections == 2


async def test_nobody_there_is_told_from_a_broken_answer() -> None:
    async with serving() as (server, client):
        server.url = "http://127.0.0.1:1"
        with pytest.raises(NotConnected):
            await ask(server, client)


async def test_connections_that_were_made_with_another_trust_are_used_no_more(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.create()
    certificate, key = authority.issue("engine", user="engine", hosts=("DNS:engines",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def trusting() -> Trust:
        return Trust(ssl.create_default_context(cafile=str(authority.certificate)), "engines")

    trust = [trusting()]
    async with serving(*[[WHOLE]] * 3, tls=context, trust=lambda: trust[-1]) as (server, client):
        assert [await whole(server, client) for _ in range(2)] == [b"ok", b"ok"]
        assert server.connections == 1
        trust.append(trusting())
        assert await whole(server, client) == b"ok"
        assert server.connections == 2
        trust.append(Trust(trusting().context))
        with pytest.raises(NotConnected):
            await whole(server, client)


async def test_nothing_is_kept_of_places_to_which_there_is_no_connection() -> None:
    gone = WHOLE.replace(b"Content-Type: text/plain", b"Connection: close")
    async with serving([gone, None]) as (server, client):
        assert await whole(server, client) == b"ok"
        server.url = "http://127.0.0.1:1"
        with pytest.raises(NotConnected):
            await ask(server, client)
        assert client.places == 0


async def test_a_header_cannot_hold_a_line_end() -> None:
    async with serving([WHOLE]) as (server, client):
        with pytest.raises(ValueError, match="line end"):
            await client.request("GET", server.url, "/", None, {"X-A": "b\r\nX-C: d"}, connect_seconds=5)


async def test_a_large_answer_waits_for_its_reader() -> None:
    data = b"x" * 4_000_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data)
    async with serving([head, data], [WHOLE]) as (server, client):
        response = await ask(server, client)
        read = await response.read()
        assert len(read) < len(data)
        while more := await response.read():
            read += more
        assert read == data
        response.close()
        assert await whole(server, client) == b"ok"
        assert server.connections == 1
