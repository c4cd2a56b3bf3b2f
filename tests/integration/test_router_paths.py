"""The path of a turn through the router: local ones, what becomes of their handles, and who chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.handle import RETAIN_PARAMS
from kvloop_connector.settings import Role
from kvloop_router.engine import Engine
from tests.harness.engines import Engines, Kind, start
from tests.integration.router_process import RouterUnderTest, routing, scripted, until
from tests.integration.scripted_engine import ANSWER, ScriptedEngine, fails, streams
from tests.integration.simulated import spec, state

LONG = "a question that is long enough to be worth a pull"
LOCAL: dict[str, Any] = {"mode": "Local"}
KVLOOP: dict[str, Any] = {"connector": "KvloopConnector", "kvRecomputeThreshold": 8}
WORK = "read the ticket, look at the code, run the tests and say what they tell you. " * 12
SAMPLING: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def caching(decode: ScriptedEngine) -> ScriptedEngine:
    decode.prefix_caching = True
    return decode


@asynccontextmanager
async def local(directory: Path, *engines: ScriptedEngine, **changes: Any) -> AsyncIterator[RouterUnderTest]:
    async with scripted(directory, *engines, **{"pathChoice": LOCAL, **changes}) as router:
        assert router.router is not None
        pool = router.router.engines
        await until(lambda: all(engine.version is not None for engine in pool))
        yield router


def known(router: RouterUnderTest, engine: ScriptedEngine) -> Engine:
    """What the router knows of it."""
    assert router.router is not None
    found = router.router.engines.get(engine.name)
    assert found is not None
    return found


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_local_turn_is_one_plain_decode_leg(
    tmp_path: Path, prefill: ScriptedEngine, caching: ScriptedEngine, streamed: bool
) -> None:
    async with local(tmp_path, prefill, caching) as router:
        await router.chat(LONG)
        got = await router.chat(LONG, ANSWER, "and more", stream=streamed)

        assert (got.status, got.path, got.reason, got.content) == (200, "local", "cheaper", ANSWER)
        assert got.headers["X-Kvloop-Decode"] == caching.name
        assert "X-Kvloop-Prefill" not in got.headers
        assert len(prefill.legs) == 1
        # Nothing that a stock engine would retain for ever.
        assert caching.carried[1] is None
        assert await router.metric('kvloop_router_no_handle_total{reason="local"}') == 1
        assert await router.metric('kvloop_router_turns_total{path="local",reason="cheaper"}') == 1


async def test_the_handle_of_the_turn_before_stays_and_is_warm_again(
    tmp_path: Path, prefill: ScriptedEngine, caching: ScriptedEngine
) -> None:
    async with local(tmp_path, prefill, caching) as router:
        await router.chat(LONG)
        second = await router.chat(LONG, ANSWER, "and more")
        known(router, caching).prefix_caching = False
        third = await router.chat(LONG, ANSWER, "and more", ANSWER, "and still more")

        # What is proven of it is what it was before.
        assert (second.path, third.path) == ("local", "warm")
        assert third.reused == second.reused > 0
        carried = prefill.carried[1]
        assert carried["remote_num_tokens"] == third.reused


async def test_with_kvloop_connector_a_local_turn_leaves_a_handle_that_takes_the_old_ones_place(
    tmp_path: Path, prefill: ScriptedEngine, caching: ScriptedEngine
) -> None:
    prefill.verdict = "read"
    caching.leases = 200
    async with local(tmp_path, prefill, caching, kvTransfer=KVLOOP) as router:
        engine = known(router, caching)
        await until(lambda: engine.leases is True)
        await router.chat(LONG)
        second = await router.chat(LONG, ANSWER, "and more")

        assert second.path == "local"
        assert caching.carried[1] == RETAIN_PARAMS
        assert await router.metric('kvloop_router_handles_total{event="kept"}') == 2
        assert await router.metric('kvloop_router_handles_given_up_total{reason="superseded"}') == 1
        engine.prefix_caching = False
        third = await router.chat(LONG, ANSWER, "and more", ANSWER, "and still more")
        assert third.path == "warm"
        assert prefill.carried[1]["remote_num_tokens"] > len(LONG) + len("and more")


@pytest.mark.parametrize("caches", [False, None])
async def test_an_engine_that_keeps_no_prefixes_serves_no_turn_alone(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, caches: bool | None
) -> None:
    decode.prefix_caching = caches
    async with local(tmp_path, prefill, decode) as router:
        await router.chat(LONG)

        assert (await router.chat(LONG, ANSWER, "and more")).path == "warm"


async def test_one_of_several_ranks_serves_no_turn_alone(
    tmp_path: Path, prefill: ScriptedEngine, caching: ScriptedEngine
) -> None:
    caching.engine_id = "of-two_dp1"
    caching.pod_uid = "uid"
    async with local(tmp_path, prefill, caching) as router:
        await router.chat(LONG)

        assert (await router.chat(LONG, ANSWER, "and more")).path == "warm"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_local_turn_that_fails_is_played_cold(
    tmp_path: Path, prefill: ScriptedEngine, caching: ScriptedEngine, streamed: bool
) -> None:
    async with local(tmp_path, prefill, caching) as router:
        await router.chat(LONG)
        caching.script = [fails(500)]
        got = await router.chat(LONG, ANSWER, "and more", stream=streamed)

        assert (got.status, got.path, got.reason, got.reused) == (200, "cold", "engine_failed", 0)
        assert len(prefill.legs) == 2
        assert caching.carried[2]["do_remote_prefill"] is True


async def test_a_local_stream_that_breaks_off_is_cut(
    tmp_path: Path, prefill: ScriptedEngine, caching: ScriptedEngine
) -> None:
    async with local(tmp_path, prefill, caching) as router:
        await router.chat(LONG)
        caching.script = [streams(lambda events: events[:2], reset=True)]
        with pytest.raises(Exception, match=r"payload|disconnected|reset"):
            await router.chat(LONG, ANSWER, "and more", stream=True)

        assert len(prefill.legs) == 1


async def test_a_refusal_of_a_local_turn_reaches_the_client(
    tmp_path: Path, prefill: ScriptedEngine, caching: ScriptedEngine
) -> None:
    async with local(tmp_path, prefill, caching) as router:
        await router.chat(LONG)
        caching.script = [fails(400, "not like this")]
        got = await router.chat(LONG, ANSWER, "and more")

        assert (got.status, got.error["message"]) == (400, "not like this")


async def test_cold_pulls_nothing_and_the_old_handle_is_given_up_for_the_new_one(
    tmp_path: Path, prefill: ScriptedEngine, caching: ScriptedEngine
) -> None:
    async with scripted(tmp_path, prefill, caching, pathChoice={"mode": "Cold"}) as router:
        await router.chat(LONG)
        got = await router.chat(LONG, ANSWER, "and more")

        assert (got.path, got.reason) == ("cold", "cheaper")
        assert not prefill.carried[1].get("remote_num_tokens")
        assert await router.metric('kvloop_router_handles_given_up_total{reason="superseded"}') == 1


async def test_what_was_expected_is_reported(tmp_path: Path, prefill: ScriptedEngine, caching: ScriptedEngine) -> None:
    async with scripted(tmp_path, prefill, caching, pathChoice={"mode": "Auto"}) as router:
        await router.chat(LONG)
        got = await router.chat(LONG, ANSWER, "and more")
        report = await router.admin(f"/admin/v1/turns/{got.headers['X-Request-Id']}")

        # Of engines that were hardly seen nothing is believed.
        assert got.path == "warm"
        assert set(report["expected"]) >= {"cold", "warm"}
        assert all(seconds > 0 for seconds in report["expected"].values())


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with start(Kind.SIM, tmp_path_factory.mktemp("engines"), [spec(Role.PREFILL), spec(Role.DECODE)]) as started:
        yield started


@pytest.mark.parametrize("streamed", [False, True])
async def test_local_turns_on_simulated_engines_answer_as_cold_ones_whatever_the_history(
    engines: Engines, tmp_path: Path, streamed: bool
) -> None:
    (decode,) = engines.decode
    first = f"{streamed} {WORK}"
    async with routing(tmp_path, list(engines.as_discovery_file()), pathChoice=LOCAL) as router:
        assert router.router is not None
        pool = router.router.engines
        await until(lambda: all(engine.version is not None for engine in pool))

        async def say(*contents: str, **fields: Any) -> Any:
            got = await router.chat(*contents, **{**SAMPLING, "stream": streamed, **fields})
            assert got.status == 200, got.text
            return got

        answer = (await say(first, conversation_id="c")).content
        kept = len(state(decode)["retained"])
        for contents in (
            [first, answer, "go on"],
            [first, answer, "go on", "I said no such thing.", "and now?"],
            [first, answer[:5], "go on"],
            [first, answer],
        ):
            before = decode.metrics()
            got = await say(*contents, conversation_id="c")
            hits = (decode.metrics() - before).local_hits
            cold = await say(*contents, cache_salt=f"cold {contents}")

            assert got.path == "local"
            assert got.content == cold.content
            # The engine itself looked what it holds.
            assert got.reused <= hits
        # One handle each of the cold turns, and still that of the first.
        assert len(state(decode)["retained"]) == kept + 4
