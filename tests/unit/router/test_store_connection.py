"""Each answer of the handle store's server is that of its command, whatever became of those before."""

from __future__ import annotations

import asyncio
import ssl
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from kvloop_router.store_connection import ConnectionEnded, Refused, Server, StoreConnection


class Transport:
    """Takes what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, name: str) -> None:
        return None


def connected() -> tuple[StoreConnection, Transport]:
    connection, transport = StoreConnection(), Transport()
    connection.connection_made(cast(asyncio.BaseTransport, transport))
    return connection, transport


ANSWERS: list[tuple[bytes, Any]] = [
    (b"+OK\r\n", b"OK"),
    (b":7\r\n", 7),
    (b"$3\r\n\r\n\x00\r\n", b"\r\n\x00"),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"*2\r\n:1\r\n*1\r\n$0\r\n\r\n", [1, [b""]]),
    (b"-NOSCRIPT no such script\r\n", Refused),
]


@given(
    commands=st.lists(st.tuples(st.sampled_from(ANSWERS), st.booleans()), max_size=12),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_each_answer_goes_to_its_command_though_some_who_asked_have_left(
    commands: list[tuple[tuple[bytes, Any], bool]], cuts: list[int]
) -> None:
    async def play() -> None:
        connection, _ = connected()
        waiting = [connection.ask(("GET", number)) for number in range(len(commands))]
        for answer, (_, left) in zip(waiting, commands, strict=True):
            if left:
                answer.cancel()
        said = b"".join(raw for (raw, _), _ in commands)
        places = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
        for start, end in pairwise(places):
            connection.data_received(said[start:end])
        for answer, ((_, value), left) in zip(waiting, commands, strict=True):
            if left:
                assert answer.cancelled()
            elif value is Refused:
                assert isinstance(answer.exception(), Refused)
            else:
                assert answer.result() == value
        assert connection.open

    asyncio.run(play())


async def test_commands_go_out_as_the_protocol_has_them() -> None:
    connection, transport = connected()
    connection.ask(("SET", b"\x00\xff", 3, 2.5, "\u00e9"))

    assert transport.written == b"*5\r\n$3\r\nSET\r\n$2\r\n\x00\xff\r\n$1\r\n3\r\n$3\r\n2.5\r\n$2\r\n\xc3\xa9\r\n"


async def test_what_cannot_be_sent_takes_nobodys_answer() -> None:
    connection, transport = connected()
    with pytest.raises(TypeError):
        connection.ask(("GET", cast(Any, object())))
    answer = connection.ask(("GET", "a"))
    connection.data_received(b":1\r\n")

    assert await answer == 1
    assert transport.written.count(b"GET") == 1


@pytest.mark.parametrize("said", [b":1\r\n:2\r\n", b"what is this?\r\n", b":1\r\n$x\r\n"])
async def test_what_nobody_asked_for_or_can_be_read_ends_the_connection(said: bytes) -> None:
    connection, transport = connected()
    first = connection.ask(("GET", "a"))
    connection.data_received(said)

    assert transport.aborted
    assert not connection.open
    assert first.done()
    first.exception()
    with pytest.raises(ConnectionEnded):
        await connection.ask(("GET", "b"))


@pytest.mark.parametrize("error", [None, ConnectionResetError("reset by peer")])
async def test_all_who_wait_learn_that_the_connection_has_ended(error: Exception | None) -> None:
    connection, transport = connected()
    waiting = [connection.ask(("GET", number)) for number in range(3)]
    waiting[1].cancel()
    connection.connection_lost(error)

    for answer in (waiting[0], waiting[2]):
        with pytest.raises(ConnectionEnded, match="reset by peer" if error else "closed"):
            await answer
    written = transport.written
    with pytest.raises(ConnectionEnded):
        await connection.ask(("GET", "later"))
    assert transport.written == written


@pytest.mark.parametrize(
    ("url", "place", "user", "password"),
    [
        ("valkey://store", ("store", 6379, 0), None, None),
        ("redis://:se%40cret@store:7000/3", ("store", 7000, 3), None, "se@cret"),
        ("redis://kv%2Floop:secret@[::1]/", ("::1", 6379, 0), "kv/loop", "secret"),
    ],
)
def test_a_url_says_where_the_server_is_and_how_it_is_greeted(
    url: str, place: tuple[str, int, int], user: str | None, password: str | None
) -> None:
    server = Server.at(url)

    assert (server.host, server.port, server.database) == place
    assert server.user == user
    assert (None if server.password is None else server.password()) == password
    assert server.tls is None


def test_a_password_file_goes_before_the_urls_password_and_is_read_each_time(tmp_path: Path) -> None:
    file = tmp_path / "password"
    server = Server.at("valkey://kvloop:old@store", password_file=file)
    for written in ("first\n", "second"):
        file.write_text(written)

        assert server.password is not None
        assert server.password() == written.strip()


@pytest.mark.parametrize("scheme", ["valkeys", "rediss"])
def test_a_server_with_tls_is_trusted_only_by_its_name_and_its_authority(scheme: str) -> None:
    server = Server.at(f"{scheme}://store")

    assert server.tls is not None
    context = server.tls()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
