"""A server of shared handles that is away, slow, full or does not let a router in."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from random import Random

import pytest

from kvloop_router.kept import Absence, GivenUp, Why
from kvloop_router.shared_store import SCRIPT
from kvloop_router.store_link import StoreLink
from tests.harness.addresses import free_loopback_address
from tests.harness.store_server import PORT, store_server
from tests.integration.router_process import until
from tests.integration.shared_stores import lasting, opened, watched
from tests.unit.router.kept_handles import SCOPE, next_turn


class TestWithoutTheServer:
    """It is slow, or gone, or comes back: nobody waits for long, nothing is an error, nothing is used twice."""

    async def test_what_was_kept_is_gone_with_it_and_then_it_serves_again(self, tmp_path: Path) -> None:
        with store_server(tmp_path) as server:
            async with opened(server, None) as store, watched(store):
                handle = lasting(store, "one", "hello")
                await store.put(handle)
                server.kill()

                assert (await store.find(next_turn("hello"))).absence is Absence.STORE_UNAVAILABLE
                assert await store.take(handle.ident) is None
                assert not store.up
                again = lasting(store, "two", "hello")
                assert await store.put(again) == (GivenUp(again, Why.STORE_UNAVAILABLE),), "surely not sent"
                assert await store.withdraw(handle.ident) is False
                assert await store.give_up("uid-0") == await store.due(1e12) == await store.end(SCOPE, "c") == ()
                assert await store.orphan("uid-0") == 0

                server.start()
                await until(lambda: store.up)
                assert await store.put(again) == ()
                assert await store.take(again.ident) == 1

    async def test_a_handle_that_could_not_be_sent_is_released_at_once(self, tmp_path: Path) -> None:
        with store_server(tmp_path) as server:
            async with opened(server, None) as store:
                # So that the connection has ended before the store is asked.
                server.kill()
                await until(lambda: not store.connected)
                handle = lasting(store, "one", "hello")

                assert store.up
                assert await store.put(handle) == (GivenUp(handle, Why.STORE_UNAVAILABLE),)
                assert store.told["put", "unreachable"] == 1

    async def test_so_is_one_where_the_server_did_not_let_the_router_in(self, tmp_path: Path) -> None:
        password = tmp_path / "password"
        password.write_text("right")
        with store_server(tmp_path, "--requirepass", "right") as server:
            async with opened(server, None, password_file=password) as store:
                server.kill()
                await until(lambda: not store.connected)
                password.write_text("wrong")
                server.start()
                handle = lasting(store, "one", "hello")

                assert await store.put(handle) == (GivenUp(handle, Why.STORE_UNAVAILABLE),)
                assert store.told["put", "refused"] == 1

    async def test_a_frozen_server_holds_nobody_up_twice(self, tmp_path: Path) -> None:
        with store_server(tmp_path) as server:
            async with opened(server, None, seconds=0.5) as store, watched(store):
                handle = lasting(store, "one", "hello")
                await store.put(handle)
                server.freeze()

                put = lasting(store, "two", "another")
                assert await store.put(put) == (), "it may be there: whoever releases it might take it from a reader"
                for _ in range(50):
                    assert await store.take(handle.ident) is None
                assert store.told["put", "timeout"] == 1
                assert store.told["take", "skipped"] == 50

                server.thaw()
                await until(lambda: store.up)
                assert await store.take(handle.ident) == 1

    async def test_a_process_that_went_meanwhile_is_dropped_afterwards(self, tmp_path: Path) -> None:
        with store_server(tmp_path) as server:
            async with opened(server, None, seconds=0.5) as store, watched(store):
                await store.put(lasting(store, "one", "hello"))
                server.freeze()
                assert await store.orphan("uid-0") == 0
                server.thaw()
                await until(lambda: store.up)

                assert (await store.find(next_turn("hello"))).absence is Absence.ENGINE_GONE

    async def test_a_server_that_has_no_room_refuses(self, tmp_path: Path) -> None:
        with store_server(tmp_path, "--maxmemory", "1mb") as server:
            async with opened(server, None, connects=False) as store:
                await store.connect()
                await store.put(lasting(store, "one", "hello"))

                assert store.told["put", "refused"] == 1
                assert not store.up


def issue(key: Path, certificate: Path, address: str) -> None:
    """A certificate that vouches for itself."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=store"),
            *("-addext", f"subjectAltName=IP:{address}"),
        ],
        check=True,
        capture_output=True,
    )


async def test_a_password_is_read_at_each_connection_and_a_wrong_one_makes_turns_cold(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("wrong\n")
    with store_server(tmp_path, "--requirepass", "right") as server:
        async with opened(server, None, password_file=password, connects=False) as store, watched(store):
            assert not await store.connect()
            assert (await store.find(next_turn("a"))).absence is Absence.STORE_UNAVAILABLE
            password.write_text("right\n")
            await until(lambda: store.up)

            assert await store.put(lasting(store, "one", "a")) == ()


@pytest.mark.parametrize("name", ["a..store", "a" * 64 + ".store"])
async def test_a_name_that_no_server_can_have_makes_turns_cold(name: str) -> None:
    link = StoreLink(f"valkey://{name}", script=SCRIPT, seconds=20.0, random=Random(7))

    assert not await link.connect(lambda: asyncio.sleep(0))
    assert not link.up


async def test_a_password_that_cannot_be_read_makes_turns_cold_until_it_can(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_bytes(b"\xff")
    with store_server(tmp_path, "--requirepass", "right") as server:
        async with opened(server, None, password_file=password, connects=False) as store, watched(store):
            assert not await store.connect()
            password.write_text("right")
            await until(lambda: store.up)


async def test_a_server_with_tls_shows_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    address = free_loopback_address(PORT)
    issue(key, certificate, address)
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    with store_server(tmp_path, "--tls-port", str(PORT), *files, address=address) as server:
        async with opened(server, None, scheme="valkeys", ca_file=certificate) as store:
            assert await store.put(lasting(store, "one", "a")) == ()
        async with opened(server, None, scheme="valkeys", connects=False) as store:
            assert not await store.connect(), "nobody vouches for it"
