"""Handles that routers share, on the distribution's own server: all that holds in memory, and what may befall it."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from redis.asyncio import Redis

from kvloop_connector.lifecycle import State
from kvloop_operator import names
from kvloop_operator.credentials import material_of
from kvloop_operator.facts import OperatorSettings
from kvloop_router.background import Background
from kvloop_router.kept import Absence, GivenUp, Kept, Why
from kvloop_router.leases import Held
from kvloop_router.shared_store import SCRIPT, SharedStore
from kvloop_router.store_link import StoreLink
from tests.harness.addresses import free_loopback_address
from tests.harness.store_server import PORT, StoreServer, store_server
from tests.integration.router_process import until
from tests.unit.operator.documents import child, manifests
from tests.unit.router.kept_handles import SCOPE, Clock, kept, next_turn
from tests.unit.router.store_contract import StoreContract
from tests.unit.router.store_model import Bookkeeping, T

_names = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with store_server(tmp_path_factory.mktemp("store-server")) as running:
        yield running


class Store(SharedStore):
    """One that tells what became of its calls."""

    told: Counter[tuple[str, str]]
    background: Background

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def connected(self) -> bool:
        connection = self._link._connection
        return connection is not None and connection.open


@asynccontextmanager
async def opened(
    server: StoreServer,
    clock: Clock | None,
    *,
    name: str = "",
    most: int = 10,
    seconds: float = 20.0,
    ahead: float = 0.0,
    connects: bool = True,
    scheme: str = "valkey",
    ended: Callable[[State], None] = lambda state: None,
    **security: Path,
) -> AsyncIterator[Store]:
    """A store of its own, or one more of this name; without a clock, on the server's. ahead: of its router's clock."""
    background, told = Background(), Counter[tuple[str, str]]()
    link = StoreLink(
        f"{scheme}://{server.address}:{PORT}",
        script=SCRIPT,
        seconds=seconds,
        random=Random(7),
        count=lambda operation, outcome: told.update([(operation, outcome)]),
        **security,
    )
    loop = asyncio.get_running_loop()
    store = Store(
        link,
        name=name or f"test-{next(_names)}",
        max_handles=most,
        max_bytes=10**9,
        keep_seconds=900,
        background=background,
        clock=clock or (lambda: loop.time() + ahead),
        shared_clock=clock,
        ended=ended,
    )
    store.told, store.background = told, background
    try:
        assert not connects or await store.connect()
        yield store
    finally:
        await background.close()
        await link.close()


@asynccontextmanager
async def watched(store: Store) -> AsyncIterator[None]:
    """Connected anew after failures."""
    store.background.serve(store.watch, "handle store")
    yield


@asynccontextmanager
async def raw(server: StoreServer) -> AsyncIterator[Redis]:
    """A plain client."""
    client = Redis(host=server.address, port=PORT)
    try:
        yield client
    finally:
        await client.aclose()


def lasting(store: Store, name: str, *contents: str, **facts: Any) -> Kept:
    """A handle that ends 450 seconds from now."""
    now = store.now
    return kept(name, *contents, deadline=now + 450, since=now, ends=now + 3600, **facts)


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


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(server: StoreServer, clock: Clock) -> AsyncIterator[Store]:
    async with opened(server, clock) as shared:
        yield shared


class TestSharedStore(StoreContract):
    pass


class OnServer(Bookkeeping):
    """Whatever happens, on the server."""

    server: StoreServer

    def new_store(self) -> Store:
        self._runner = asyncio.Runner()
        self._opened = opened(self.server, self.clock, most=4, ended=self.ends.append)
        return self.run(self._opened.__aenter__())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def teardown(self) -> None:
        self.run(self._opened.__aexit__(None, None, None))
        self._runner.close()


def test_whatever_happens_in_whatever_order(server: StoreServer) -> None:
    OnServer.server = server

    run_state_machine_as_test(OnServer, settings=settings(max_examples=12, stateful_step_count=25, deadline=None))


class TestSeveralRouters:
    """Each with a connection and a clock of its own, on the server's time."""

    @pytest.fixture
    async def pair(self, server: StoreServer) -> AsyncIterator[tuple[Store, Store]]:
        name = f"pair-{next(_names)}"
        async with opened(server, None, name=name) as one, opened(server, None, name=name, ahead=5000.0) as other:
            yield one, other

    async def test_what_one_keeps_the_other_takes(self, pair: tuple[Store, Store]) -> None:
        one, other = pair
        handle = lasting(one, "one", "hello")
        assert await one.put(handle) == ()

        (match,) = (await other.find(next_turn("hello"))).matches

        assert match.kept.handle == handle.handle
        assert 0 <= other.now - one.now - (match.kept.deadline - handle.deadline) < 5, "on its own clock, no later"
        assert await other.take(match.kept.ident) == 1
        assert await one.take(handle.ident) is None
        assert (await one.find(next_turn("hello"))).absence is Absence.TAKEN

    async def test_of_many_who_race_one_is_granted(self, pair: tuple[Store, Store]) -> None:
        handles = [lasting(pair[0], f"{number}", f"question {number}") for number in range(20)]
        for handle in handles[:10]:
            await pair[0].put(handle)

        for handle in handles[:10]:
            grants = await asyncio.gather(*(store.take(handle.ident) for store in pair * 4))
            assert [grant for grant in grants if grant is not None] == [1]

    async def test_a_renewal_is_one_routers(self, pair: tuple[Store, Store]) -> None:
        one, other = pair
        for number in range(70):
            await one.put(lasting(one, f"{number}", f"question {number}"))

        found = await asyncio.gather(one.due(one.now + 500), other.due(other.now + 500))

        idents = [kept.ident for each in found for kept in each]
        assert len(idents) == len(set(idents)) == 10
        assert await one.due(one.now + 500) == ()

    async def test_a_renewal_does_not_race_a_take(self, pair: tuple[Store, Store]) -> None:
        one, other = pair
        handle = lasting(one, "one", "hello")
        await one.put(handle)
        (due,) = await one.due(one.now + 500)
        grant = await other.take(handle.ident)
        assert grant is not None

        later = Held(due.since, due.deadline + 300, due.ends, due.pace)
        assert not await one.renew(due.renewed(due.params, later))

        await other.put_back(handle.ident, grant)
        assert await one.renew(due.renewed(due.params, later))
        (match,) = (await other.find(next_turn("hello"))).matches
        assert match.kept.deadline - other.now > 600

    async def test_a_take_that_nobody_waits_for_goes_back(self, pair: tuple[Store, Store]) -> None:
        one, other = pair
        handle = lasting(one, "one", "hello")
        await one.put(handle)
        for _ in range(20):
            async with asyncio.TaskGroup() as group:
                taking = group.create_task(one.take(handle.ident))
                await asyncio.sleep(0)
                taking.cancel()
            await one.background.idle()

        assert await other.take(handle.ident) is not None

    async def test_each_resource_has_handles_of_its_own(self, server: StoreServer) -> None:
        async with opened(server, None) as one, opened(server, None) as other:
            handle = lasting(one, "one", "hello")
            await one.put(handle)

            assert await other.take(handle.ident) is None
            assert (await other.find(next_turn("hello"))).absence is Absence.MISS

    async def test_a_key_outlives_its_handle_and_ends(self, server: StoreServer) -> None:
        name = f"keys-{next(_names)}"
        async with opened(server, None, name=name) as store:
            await store.put(lasting(store, "one", "hello", conversation="c"))
            await store.take("engine/one")

            async with raw(server) as client:
                keys = [key async for key in client.scan_iter(match=f"*{name}*")]
                lives = [await client.ttl(key) for key in keys]

        assert len(keys) > 8
        assert min(lives) > 0, "what no router touches any more ends by itself"
        assert max(lives) <= 450 + 900 + 1


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


async def test_the_server_that_the_operator_makes_serves(tmp_path: Path) -> None:
    material = material_of(None)
    children = manifests(OperatorSettings(secret_material=material), router__replicas=2)
    (container,) = child(children, "Deployment", "demo-store")["spec"]["template"]["spec"]["containers"]
    secret = child(children, "Secret", "demo-router")["stringData"]
    (mount,) = container["volumeMounts"]
    for name in (names.STORE_SETTINGS_KEY, names.STORE_PASSWORD_KEY):
        (tmp_path / name).write_text(secret[name])
    arguments = [each.replace(mount["mountPath"], str(tmp_path)) for each in container["args"]]

    with store_server(tmp_path, *arguments) as server:
        password = tmp_path / names.STORE_PASSWORD_KEY
        async with opened(server, None, password_file=password) as store:
            assert await store.put(lasting(store, "one", "a")) == ()
        async with opened(server, None, connects=False) as store:
            assert not await store.connect(), "without the password"
