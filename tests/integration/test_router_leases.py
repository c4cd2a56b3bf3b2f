"""Retained blocks are released by name or as it goes without, and renewed while a turn is likely to come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvloop_connector.lease_requests import RELEASE_PATH, RENEW_PATH
from kvloop_connector.settings import Role
from kvloop_router import turn as turns
from tests.integration.router_process import RouterUnderTest, scripted, until, until_metric
from tests.integration.scripted_engine import ANSWER, ScriptedEngine, fails, running, waits

T = TypeVar("T")

LONG = "a question that is long enough to be worth a pull"
TTL_SECONDS = 60
RENEWED = 'kvloop_router_lease_renewals_total{outcome="renewed"}'
RELEASED = 'kvloop_router_handles_total{event="released"}'


async def end(router: RouterUnderTest, conversation: str) -> int:
    """End a conversation; how many handles the router says that it releases."""
    async with router.session.delete(f"{router.url}/kvloop/v1/conversations/{conversation}") as ended:
        return int((await ended.json())["released"])


@pytest.fixture
def decode() -> ScriptedEngine:
    return ScriptedEngine("decode-0", Role.DECODE, leases=200)


@asynccontextmanager
async def scripted_router(directory: Path, *engines: ScriptedEngine, **changes: Any) -> AsyncIterator[RouterUnderTest]:
    transfer = {"decoderKvBlocksTtlSeconds": TTL_SECONDS, "kvRecomputeThreshold": 8, **changes.pop("kvTransfer", {})}
    settings = {"handleTtlSeconds": TTL_SECONDS - 30, **changes}
    async with scripted(directory, *engines, kvTransfer=transfer, **settings) as under_test:
        yield under_test


@pytest.fixture
async def router(tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine) -> AsyncIterator[RouterUnderTest]:
    async with scripted_router(tmp_path, prefill, decode) as under_test:
        yield under_test


def named(decode: ScriptedEngine, path: str) -> list[str]:
    """The handles that were named on this path."""
    return [name for each in decode.leased if each.path == path for name in each.body.get("remote_request_ids", [])]


async def falls_due(router: RouterUnderTest, decode: ScriptedEngine) -> None:
    """Let the one kept handle come near its end, and wait until its engine is asked to renew it."""
    before = len(named(decode, RENEW_PATH))
    router.clock.ahead += 25
    await until(lambda: len(named(decode, RENEW_PATH)) > before)


class TestRenewal:
    async def test_the_next_turn_carries_the_new_deadline(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        await router.chat(LONG)
        await falls_due(router, decode)
        await until_metric(router, RENEWED, 1)
        router.clock.ahead += 60

        second = await router.chat(LONG, ANSWER, "and more")

        assert second.path == "warm"
        assert prefill.carried[1]["remote_blocks_expiry_time"] == 123.5 + decode.renewed_by
        (asked,) = [each for each in decode.leased if each.path == RENEW_PATH]
        assert asked.body["seconds"] == TTL_SECONDS

    async def test_one_that_comes_after_the_handle_was_taken_changes_nothing(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        await router.chat(LONG)
        decode.leases_wait = asyncio.Event()
        await falls_due(router, decode)
        second = await router.chat(LONG, ANSWER, "and more")
        decode.leases_wait.set()

        await until_metric(router, 'kvloop_router_lease_renewals_total{outcome="taken"}', 1)
        await router.chat(LONG, ANSWER, "and more")

        assert second.path == "warm"
        taken = prefill.carried[1]
        assert taken["remote_blocks_expiry_time"] == 123.5
        assert prefill.carried[2].get("remote_request_id") != taken["remote_request_id"]

    async def test_one_that_fails_is_tried_again_in_time(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        await router.chat(LONG)
        decode.leases = 500
        await falls_due(router, decode)
        decode.leases = 200

        await until_metric(router, RENEWED, 1)
        assert await router.metric('kvloop_router_lease_renewals_total{outcome="failed"}') >= 1

    async def test_an_engine_that_moves_nothing_is_asked_once(
        self, router: RouterUnderTest, decode: ScriptedEngine
    ) -> None:
        decode.renewed_by = 0
        await router.chat(LONG)
        await falls_due(router, decode)
        await until_metric(router, RENEWED, 1)
        await router.chat(f"another conversation, {LONG}")
        decode.renewed_by = 100
        router.clock.ahead += 4

        await falls_due(router, decode)

        first, second = named(decode, RENEW_PATH)
        assert first != second

    async def test_an_engine_that_drains_keeps_nothing_for_longer(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        staying = ScriptedEngine("decode-1", Role.DECODE, leases=200)
        await router.chat(LONG)
        async with running(staying):
            router.list_engines([prefill.entry(), {**decode.entry(), "draining": True}, staying.entry()])
            assert router.router is not None
            pool = router.router.engines
            await until(lambda: {each.spec.name for each in pool if each.serving} == {"prefill-0", "decode-1"})
            await router.chat(f"another conversation, {LONG}")

            await falls_due(router, staying)

            assert named(decode, RENEW_PATH) == []


class TestRelease:
    async def test_an_engine_is_asked_once_whether_it_can_be_told(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        for number in range(3):
            await router.chat(LONG, conversation_id=f"{number}")
            await end(router, f"{number}")

        await until_metric(router, RELEASED, 3)
        assert len(named(decode, RELEASE_PATH)) == 3
        assert [each.body for each in decode.leased].count({}) == 1
        assert prefill.leased == prefill.fillers == []

    @pytest.mark.parametrize("status", [401, 404, 501])
    async def test_one_that_cannot_is_never_asked_again(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, status: int
    ) -> None:
        decode.leases = status
        async with scripted_router(tmp_path, prefill, decode) as router:
            for number in range(2):
                await router.chat(LONG, conversation_id=f"{number}")
                await end(router, f"{number}")
            await until_metric(router, RELEASED, 2)
            await router.chat(LONG)
            # The release of the one and the renewal of the other fall due.
            router.clock.ahead += 25
            await router.chat(LONG, conversation_id="later")
            await end(router, "later")
            await until_metric(router, RELEASED, 3)

        assert [each.body for each in decode.leased] == [{}]

    async def test_another_process_is_asked_anew(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        decode.restart()
        router.list_engines([prefill.entry(), decode.entry()])

        await until(lambda: [each.body for each in decode.leased] == [{}, {}])

    async def test_one_that_does_not_take_it_any_more_is_not_asked_again_and_a_leg_releases(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        decode.leases = 404
        for number in range(2):
            await router.chat(LONG, conversation_id=f"{number}")
            await end(router, f"{number}")
            await until_metric(router, RELEASED, number + 1)

        assert len(named(decode, RELEASE_PATH)) == 1
        carried = [*prefill.carried, *(each.params for each in prefill.fillers)]
        assert [params["remote_num_tokens"] for params in carried if "remote_num_tokens" in params] == [0, 0]

    async def test_one_that_fails_leaves_it_to_a_leg_and_is_asked_again_for_the_next(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        decode.leases = 500
        await router.chat(LONG, conversation_id="c")
        await end(router, "c")
        await until_metric(router, RELEASED, 1)
        decode.leases = 200
        await router.chat(LONG, conversation_id="d")
        await end(router, "d")
        await until_metric(router, RELEASED, 2)

        assert len(named(decode, RELEASE_PATH)) == 2

    async def test_a_handle_that_a_leg_may_be_reading_waits_for_its_end(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        await router.chat(LONG, conversation_id="c")
        go_on = asyncio.Event()
        prefill.script = [waits(go_on, fails(400))]
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(router.chat(LONG, ANSWER, "and more", conversation_id="c"))
            await prefill.arrived.wait()
            assert await end(router, "c") == 0
            # Another conversation's release comes through meanwhile.
            await router.chat(LONG, conversation_id="d")
            await end(router, "d")
            await until_metric(router, RELEASED, 1)
            during = named(decode, RELEASE_PATH)
            go_on.set()

        assert turn.result().status == 400
        await until_metric(router, RELEASED, 2)
        read = prefill.carried[1]["remote_request_id"]
        assert read not in during
        assert named(decode, RELEASE_PATH) == [*during, read]

    async def test_a_handle_that_was_read_is_not_released(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        await router.chat(LONG, conversation_id="c")
        go_on = asyncio.Event()
        prefill.script = [waits(go_on)]
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(router.chat(LONG, ANSWER, "and more", conversation_id="c"))
            await prefill.arrived.wait()
            await end(router, "c")
            go_on.set()
        assert turn.result().path == "warm"
        await end(router, "c")

        # Its own is released; what it has read is not.
        await until_metric(router, RELEASED, 1)
        assert prefill.carried[1]["remote_request_id"] not in named(decode, RELEASE_PATH)

    async def test_what_a_running_turn_of_an_ended_conversation_leaves_is_released(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        go_on = asyncio.Event()
        decode.script = [waits(go_on)]
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(router.chat(LONG, conversation_id="c"))
            await decode.arrived.wait()
            await end(router, "another")
            assert await end(router, "c") == 0
            go_on.set()

        assert turn.result().status == 200
        await until_metric(router, RELEASED, 1)
        assert await router.metric("kvloop_router_live_handles") == 0

    async def test_so_is_what_a_long_turn_leaves_whose_history_was_still_being_digested(
        self, router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def aside(size: int, work: Callable[[], T]) -> T:
            begun.set()
            await go_on.wait()
            return work()

        monkeypatch.setattr(turns, "aside", aside)
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(router.chat(LONG, conversation_id="c"))
            await begun.wait()
            assert await end(router, "c") == 0
            go_on.set()

        assert turn.result().status == 200
        await until_metric(router, RELEASED, 1)
        assert await router.metric("kvloop_router_live_handles") == 0

    async def test_a_handle_that_prefill_refused_is_released_by_name(
        self, tmp_path: Path, decode: ScriptedEngine
    ) -> None:
        prefill = ScriptedEngine("prefill-0", Role.PREFILL, verdict="forged")
        async with scripted_router(tmp_path, prefill, decode, kvTransfer={"connector": "KvloopConnector"}) as router:
            await router.chat(LONG)
            second = await router.chat(LONG, ANSWER, "and more")

            assert second.reason == "forged"
            await until(lambda: named(decode, RELEASE_PATH) == [prefill.carried[1]["remote_request_id"]])
            assert await router.metric('kvloop_router_handles_given_up_total{reason="refused"}') == 1


class TestOff:
    @pytest.mark.parametrize(
        "off",
        [
            pytest.param({"kvTransfer": {"bidirectionalKvXfer": False}}, id="one way"),
            pytest.param({"reuse": False}, id="no reuse"),
            pytest.param({"leases": {"renew": False}}, id="no renewal"),
        ],
    )
    async def test_nothing_is_renewed(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, off: dict[str, Any]
    ) -> None:
        async with scripted_router(tmp_path, prefill, decode, **off) as router:
            await router.chat(LONG)
            router.clock.ahead += 25
            assert router.router is not None
            services = router.router.background.services
            assert ("renewals" in services) is False
            one_way = "kvTransfer" in off
            assert ([each.body for each in decode.leased][:1] == []) is one_way

    async def test_services_end_with_the_router(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        async with scripted_router(tmp_path, prefill, decode) as router:
            assert router.router is not None
            background = router.router.background
            assert {"renewals", "releases", "releases by name"} <= background.services
            await router.chat(LONG)
            # A renewal that hangs does not hold up the end.
            decode.leases_wait = asyncio.Event()
            await falls_due(router, decode)
            decode.leases_wait.set()
        assert background.services == frozenset()
