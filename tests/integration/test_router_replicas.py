"""Two routers over the same engines, with the distribution's own server for their handles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.store_server import StoreServer, store_server
from tests.integration.router_process import RouterUnderTest, routing, until
from tests.integration.scripted_engine import ANSWER, ScriptedEngine, answers, running

LONG = "a question that is long enough to be worth a pull"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with store_server(tmp_path) as started:
        yield started


@asynccontextmanager
async def replica(
    directory: Path, server: StoreServer, *engines: ScriptedEngine, seconds: float = 20.0, **changes: Any
) -> AsyncIterator[RouterUnderTest]:
    """One router of a resource, which has learnt how the engines render a chat."""
    await asyncio.to_thread(directory.mkdir)
    store = {"kind": "valkey", "url": server.url, "name": "namespace/name", "timeoutSeconds": seconds}
    entries = [engine.entry() for engine in engines]
    async with routing(directory, entries, handleStore=store, **changes) as router:
        engines[1].script = [answers(lambda answer: answer.update(kv_transfer_params=None))]
        await router.chat("short")
        for engine in engines:
            engine.asked.clear()
        yield router


@pytest.fixture
async def replicas(
    tmp_path: Path, server: StoreServer, prefill: ScriptedEngine, decode: ScriptedEngine
) -> AsyncIterator[tuple[RouterUnderTest, RouterUnderTest]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(running(engine)) for engine in (prefill, decode)]
        one, other = [
            await stack.enter_async_context(replica(tmp_path / name, server, *engines)) for name in ("one", "other")
        ]
        yield one, other


Replicas = tuple[RouterUnderTest, RouterUnderTest]


async def test_a_conversation_goes_on_warm_at_the_other_router(replicas: Replicas, prefill: ScriptedEngine) -> None:
    one, other = replicas
    contents = [LONG]
    for number, router in enumerate([one, other, one, other, other]):
        turn = await router.chat(*contents)
        assert (turn.status, turn.path) == (200, "warm" if number else "cold"), turn.reason
        contents += [ANSWER, f"and more, for the {number}th time"]

    assert len([params for params in prefill.carried if params.get("remote_num_tokens")]) == 4


async def test_of_turns_that_race_at_both_one_gets_the_handle(replicas: Replicas, prefill: ScriptedEngine) -> None:
    for round_ in range(5):
        first = f"{LONG} {round_}"
        await replicas[0].chat(first)
        before = len(prefill.carried)

        turns = await asyncio.gather(
            *(router.chat(first, ANSWER, f"question {number}") for number, router in enumerate(replicas * 2))
        )

        assert sorted((turn.path, turn.reason) for turn in turns) == [("cold", "taken")] * 3 + [("warm", "")]
        assert len([params for params in prefill.carried[before:] if params.get("remote_num_tokens")]) == 1


async def test_a_conversation_that_ends_at_one_has_ended_at_the_other(replicas: Replicas) -> None:
    one, other = replicas
    await one.chat(LONG, conversation_id="c")

    async with other.session.delete(f"{other.url}/kvloop/v1/conversations/c") as response:
        assert response.status == 200

    turn = await one.chat(LONG, ANSWER, "and more", conversation_id="c")
    assert (turn.path, turn.reason) == ("cold", "evicted")


async def test_both_say_what_is_retained_for_either(replicas: Replicas) -> None:
    for number, router in enumerate(replicas * 2):
        await router.chat(f"{LONG} {number}")

    for router in replicas:
        engines = {engine["name"]: engine for engine in (await router.admin("/admin/v1/engines"))["engines"]}
        assert engines["decode-0"]["liveHandles"] == 4
        assert 400 < engines["decode-0"]["lastDeadlineSeconds"] <= 450
        assert await router.metric("kvloop_router_live_handles") == 4


async def test_an_engine_that_one_finds_started_anew_has_nothing_for_the_other(
    replicas: Replicas, decode: ScriptedEngine
) -> None:
    one, other = replicas
    await one.chat(LONG)
    decode.restart()
    await one.chat("another conversation, of some length")

    turn = await other.chat(LONG, ANSWER, "and more")

    assert (turn.path, turn.reason) == ("cold", "engine_gone")


async def test_a_router_that_ends_leaves_its_handles_to_the_others(
    tmp_path: Path, server: StoreServer, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    async with running(prefill), running(decode):
        async with replica(tmp_path / "one", server, prefill, decode) as router:
            await router.chat(LONG)
        assert not [asked for asked in prefill.asked if asked.params and asked.params.get("remote_num_tokens") == 0]

        async with replica(tmp_path / "other", server, prefill, decode) as router:
            turn = await router.chat(LONG, ANSWER, "and more")
    assert (turn.path, turn.reason) == ("warm", "")


async def test_a_server_that_is_killed_makes_turns_cold_until_it_is_back(
    tmp_path: Path, server: StoreServer, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    async with running(prefill), running(decode), replica(tmp_path / "one", server, prefill, decode) as router:
        await router.chat(LONG)
        server.kill()

        without = await router.chat(LONG, ANSWER, "and more")
        assert (without.status, without.path, without.reason) == (200, "cold", "store_unavailable")
        assert await router.metric("kvloop_router_handle_store_up") == 0
        assert await router.metric('kvloop_router_no_handle_total{reason="store_unavailable"}') == 1
        # What nobody can find is not retained either.
        await until(lambda: router.router is not None and len(router.router.releases) == 0)

        server.start()
        await until_store_answers(router)
        assert (await router.chat(LONG, ANSWER, "and more")).path == "cold"
        assert (await router.chat(LONG, ANSWER, "and more", ANSWER, "and again")).path == "warm"


async def test_a_server_that_hangs_holds_one_turn_up_and_for_a_moment(
    tmp_path: Path, server: StoreServer, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    async with (
        running(prefill),
        running(decode),
        replica(tmp_path / "one", server, prefill, decode, seconds=0.5) as router,
    ):
        await router.chat(LONG)
        server.freeze()

        turns = [await router.chat(LONG, ANSWER, "and more") for _ in range(5)]
        assert [(turn.status, turn.path, turn.reason) for turn in turns] == [(200, "cold", "store_unavailable")] * 5
        failed = [
            await router.metric(f'kvloop_router_handle_store_calls_total{{operation="{name}",outcome="timeout"}}')
            for name in ("find", "retained", "tidy")
        ]
        assert sum(failed) == 1, "after the first one nobody asks"

        server.thaw()
        await until_store_answers(router)
        assert (await router.chat(LONG, ANSWER, "and more")).path == "warm", "its handle was never taken"


async def until_store_answers(router: RouterUnderTest) -> None:
    async with asyncio.timeout(30):
        while not await router.metric("kvloop_router_handle_store_up"):  # noqa: ASYNC110  read over HTTP
            await asyncio.sleep(0.05)
