"""Handles that routers share, on the distribution's own server: all that holds in memory, and what may befall it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvloop_operator import names
from kvloop_operator.credentials import material_of
from kvloop_operator.facts import OperatorSettings
from kvloop_router.kept import Absence
from kvloop_router.leases import Held
from tests.harness.store_server import StoreServer, store_server
from tests.integration.shared_stores import Store, lasting, new_name, opened, raw
from tests.unit.operator.documents import child, manifests
from tests.unit.router.kept_handles import Clock, next_turn
from tests.unit.router.store_contract import StoreContract
from tests.unit.router.store_model import Bookkeeping, T


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with store_server(tmp_path_factory.mktemp("store-server")) as running:
        yield running


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
        name = new_name("pair")
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
        name = new_name("keys")
        async with opened(server, None, name=name) as store:
            await store.put(lasting(store, "one", "hello", conversation="c"))
            await store.take("engine/one")

            async with raw(server) as client:
                keys = [key async for key in client.scan_iter(match=f"*{name}*")]
                lives = [await client.ttl(key) for key in keys]

        assert len(keys) > 8
        assert min(lives) > 0, "what no router touches any more ends by itself"
        assert max(lives) <= 450 + 900 + 1


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
