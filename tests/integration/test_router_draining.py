"""Engines that are to be ended: what runs there ends well, what they retain is still of use, nothing new begins."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.settings import Role
from kvloop_router import turn as turns
from tests.harness.engines import EngineSpec, Kind, start
from tests.integration.router_process import Got, RouterUnderTest, chat_body, routing, scripted, until
from tests.integration.scripted_engine import ANSWER, ScriptedEngine, fails, running, starts_then_waits, waits
from tests.integration.simulated import pairs, spec, state

LONG = "a question that is long enough to be worth a pull"


@pytest.fixture
def other() -> ScriptedEngine:
    """A second decode engine, which joins later."""
    return ScriptedEngine("decode-1", Role.DECODE)


@pytest.fixture
async def router(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, other: ScriptedEngine
) -> AsyncIterator[RouterUnderTest]:
    async with running(other), scripted(tmp_path, prefill, decode) as under_test:
        yield under_test


async def listed(router: RouterUnderTest, *engines: ScriptedEngine, draining: ScriptedEngine | None = None) -> None:
    """Have discovery name these engines, and wait until the router goes by it."""
    router.list_engines([{**engine.entry(), "draining": engine is draining} for engine in engines])
    assert router.router is not None
    pool = router.router.engines
    wanted = {engine.name: engine is not draining for engine in engines}
    await until(lambda: {engine.spec.name: engine.serving for engine in pool} == wanted)


async def told_of(router: RouterUnderTest, engine: ScriptedEngine) -> dict[str, Any]:
    """What the admin API says of one engine."""
    engines = (await router.admin("/admin/v1/engines"))["engines"]
    return dict(next(told for told in engines if told["name"] == engine.name))


def decoded_by(got: Got) -> str:
    return got.headers["X-Kvloop-Decode"]


@asynccontextmanager
async def streaming(router: RouterUnderTest, *contents: str, **fields: Any) -> AsyncIterator[Any]:
    """A streamed turn whose headers have come."""
    body = chat_body(*contents, stream=True, **fields)
    async with router.session.post(router.url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200
        yield response


async def test_a_running_turn_ends_at_a_draining_engine_while_new_ones_go_elsewhere(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, other: ScriptedEngine
) -> None:
    go_on = asyncio.Event()
    decode.script = [starts_then_waits(go_on)]
    async with streaming(router, LONG) as response:
        before = await told_of(router, decode)
        await listed(router, prefill, decode, other, draining=decode)

        turns = [await router.chat(f"{LONG} {index}") for index in range(6)]
        during = await told_of(router, decode)
        go_on.set()
        text = await response.text()

    assert {decoded_by(turn) for turn in turns} == {"decode-1"}
    assert text.endswith("data: [DONE]\n\n")
    assert (during["podUID"], during["draining"], during["runningTurns"]) == (decode.pod_uid, True, 1)
    assert {**during, "draining": False} == before, "nothing of what was known of the engine is forgotten"
    after = await told_of(router, decode)
    assert (after["runningTurns"], after["liveHandles"]) == (0, 1)


async def test_what_a_draining_engine_retains_is_pulled_and_the_conversation_moves(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, other: ScriptedEngine
) -> None:
    await router.chat(LONG)
    await listed(router, prefill, decode, other, draining=decode)

    second = await router.chat(LONG, ANSWER, "and more")
    third = await router.chat(LONG, ANSWER, "and more", ANSWER, "and yet more")

    assert (second.path, decoded_by(second)) == ("warm", "decode-1")
    assert prefill.carried[1]["remote_engine_id"] == decode.engine_id
    assert (third.path, decoded_by(third)) == ("warm", "decode-1")
    assert prefill.carried[2]["remote_engine_id"] == other.engine_id
    assert (await told_of(router, decode))["liveHandles"] == 0


async def test_a_drain_that_is_taken_back_leaves_everything_as_it_was(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, other: ScriptedEngine
) -> None:
    await router.chat(LONG)
    await listed(router, prefill, decode, other, draining=decode)
    await listed(router, prefill, decode, other)

    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, decoded_by(second)) == ("warm", "decode-0")


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_with_no_engine_that_takes_turns_the_router_is_not_ready(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, name: str
) -> None:
    draining = prefill if name == prefill.name else decode
    await listed(router, prefill, decode, draining=draining)

    ready = await router.get("/readyz")
    turn = await router.chat(LONG)

    assert (ready.status, ready.text.split(":")[0]) == (503, f"{draining.role}_unhealthy")
    assert (turn.status, turn.headers["Retry-After"]) == (503, "1")
    assert (draining.legs, (await told_of(router, draining))["healthy"]) == ([], True)


async def test_a_handle_whose_revision_takes_no_turns_any_more_is_released(tmp_path: Path) -> None:
    old = ScriptedEngine("prefill-0", Role.PREFILL), ScriptedEngine("decode-0", Role.DECODE)
    new = (
        ScriptedEngine("prefill-1", Role.PREFILL, revision="b"),
        ScriptedEngine("decode-1", Role.DECODE, revision="b"),
    )
    async with running(new[0]), running(new[1]), scripted(tmp_path, *old) as router:
        await router.chat(LONG)
        entries = [{**engine.entry(), "draining": engine in old} for engine in (*old, *new)]
        router.list_engines(entries)
        assert router.router is not None
        pool = router.router.engines
        await until(lambda: {engine.spec.name for engine in pool if engine.serving} == {"prefill-1", "decode-1"})

        second = await router.chat(LONG, ANSWER, "and more")
        await until(lambda: len(old[0].fillers) == 1)

    assert (second.path, second.reason, decoded_by(second)) == ("cold", "no_pair", "decode-1")
    assert old[0].fillers[0].params["remote_engine_id"] == old[1].engine_id
    assert "remote_engine_id" not in new[0].carried[0]


async def test_an_engine_that_does_not_answer_holds_up_none_that_is_new(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, other: ScriptedEngine
) -> None:
    assert router.router is not None
    pool = router.router.engines

    def stuck() -> bool:
        engine = pool.get("decode-0")
        # Its first check is still on its way: none has failed.
        return (
            engine is not None and engine.spec.pod_uid == "silent" and engine.probed and not engine.health.checks_failed
        )

    # It takes connections, and nobody reads from them.
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = {**decode.entry(), "url": f"http://127.0.0.1:{server.getsockname()[1]}", "podUID": "silent"}
        router.list_engines([prefill.entry(), silent])
        await until(stuck)
        router.list_engines([prefill.entry(), silent, other.entry()])
        await until(lambda: {engine.spec.name for engine in pool if engine.healthy} == {"prefill-0", "decode-1"})
        assert stuck()


async def test_what_an_engine_retains_is_released_once_it_has_drained_and_is_ended(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, other: ScriptedEngine
) -> None:
    await router.chat(LONG)
    router.list_engines([prefill.entry(), {**decode.entry(), "ending": True}, other.entry()])
    await until(lambda: len(prefill.fillers) == 1)

    second = await router.chat(LONG, ANSWER, "and more")

    assert prefill.fillers[0].params["remote_engine_id"] == decode.engine_id
    assert (second.path, second.reason, decoded_by(second)) == ("cold", "evicted", "decode-1")
    assert (await told_of(router, decode))["draining"] is True


async def test_a_turn_that_ends_at_an_engine_that_is_ended_leaves_nothing_there(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, other: ScriptedEngine
) -> None:
    go_on = asyncio.Event()
    decode.script = [starts_then_waits(go_on)]
    async with streaming(router, LONG) as response:
        router.list_engines([prefill.entry(), {**decode.entry(), "ending": True}, other.entry()])
        assert router.router is not None
        pool = router.router.engines
        await until(lambda: any(engine.spec.ending for engine in pool))
        go_on.set()
        text = await response.text()
    await until(lambda: len(prefill.fillers) == 1)

    assert text.endswith("data: [DONE]\n\n")
    assert (await told_of(router, decode))["liveHandles"] == 0


async def test_a_turn_counts_at_its_decode_engine_from_the_start_and_moves_on_if_that_drains(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, other: ScriptedEngine
) -> None:
    go_on = asyncio.Event()
    prefill.script = [waits(go_on)]
    async with asyncio.TaskGroup() as tasks:
        turn = tasks.create_task(router.chat(LONG))
        await prefill.arrived.wait()
        await listed(router, prefill, decode, other, draining=decode)
        during = await told_of(router, decode)
        go_on.set()

    assert (during["draining"], during["runningTurns"]) == (True, 1)
    assert decoded_by(turn.result()) == "decode-1"
    assert decode.legs == []
    assert (await told_of(router, decode))["runningTurns"] == 0


async def test_a_decode_engine_that_drains_while_a_long_turn_lets_others_go_on_is_not_thought_idle(
    router: RouterUnderTest,
    prefill: ScriptedEngine,
    decode: ScriptedEngine,
    other: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    during: list[dict[str, Any]] = []

    async def others_go_on(size: int) -> None:
        await listed(router, prefill, decode, other, draining=decode)
        during.append(await told_of(router, decode))

    monkeypatch.setattr(turns, "let_others_go_on", others_go_on)
    got = await router.chat(LONG)

    assert [(told["draining"], told["runningTurns"]) for told in during] == [(True, 1)]
    assert decoded_by(got) == "decode-1"
    assert decode.legs == []


async def test_a_turn_counts_at_its_prefill_engine_until_decode_has_read_from_it(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    reads, go_on = asyncio.Event(), asyncio.Event()
    decode.script = [waits(reads, starts_then_waits(go_on))]
    async with asyncio.TaskGroup() as tasks:
        turn = tasks.create_task(router.chat(LONG, stream=True))
        await decode.arrived.wait()
        reading = await told_of(router, prefill)
        decode.arrived.clear()
        reads.set()
        await decode.arrived.wait()
        assert router.router is not None
        pool = router.router.engines
        await until(lambda: [engine.turns for engine in pool if engine.spec.role is Role.PREFILL] == [0])
        writing = await told_of(router, decode)
        go_on.set()

    assert (reading["runningTurns"], writing["runningTurns"]) == (1, 1)
    assert turn.result().content == ANSWER


async def test_a_leg_whose_client_left_counts_until_it_ends(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    go_on = asyncio.Event()
    prefill.script = [waits(go_on)]
    turn = asyncio.get_running_loop().create_task(router.chat(LONG))
    await prefill.arrived.wait()
    turn.cancel()
    await asyncio.wait([turn])
    assert router.router is not None
    state, pool = router.router.state, router.router.engines
    await until(lambda: state.turns == 0)
    left = [(await told_of(router, engine))["runningTurns"] for engine in (prefill, decode)]
    go_on.set()
    await until(lambda: all(engine.turns == 0 for engine in pool))

    assert left == [1, 0]
    assert not prefill.left.is_set()


async def test_another_process_in_the_same_pod_has_nothing_of_the_old_one(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    await router.chat(LONG)
    assert router.router is not None
    store, pool = router.router.store, router.router.engines
    router.list_engines([prefill.entry(), {**decode.entry(), "process": "the second one"}])
    await until(lambda: len(store) == 0 and pool.present("the second one"))

    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, second.reason) == ("cold", "engine_gone")
    assert (await told_of(router, decode))["podUID"] == decode.pod_uid


async def test_no_canary_is_played_on_a_draining_engine_and_its_verdict_stays(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, other: ScriptedEngine
) -> None:
    third = ScriptedEngine("decode-2", Role.DECODE)
    async with (
        running(other),
        running(third),
        scripted(tmp_path, prefill, decode, canary={"enabled": True}) as router,
    ):
        assert router.router is not None
        pairs = router.router.pairs

        def verdicts() -> dict[str, str]:
            return {report.decode.name: report.verdict.value for report in pairs.reports()}

        await until(lambda: verdicts() == {"decode-0": "verified"})
        # Pairs are considered in this order.
        entries = [prefill, decode, other, third]
        router.list_engines([{**engine.entry(), "draining": engine in (decode, other)} for engine in entries])
        await until(lambda: verdicts().get("decode-2") == "verified")

    assert verdicts() == {"decode-0": "verified", "decode-1": "unknown", "decode-2": "verified"}
    assert other.legs == []


async def test_a_canary_that_fails_at_an_engine_that_is_being_ended_says_nothing(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    go_on = asyncio.Event()
    decode.script = [waits(go_on, fails(500))]
    async with scripted(tmp_path, prefill, decode, canary={"enabled": True}) as router:
        await decode.arrived.wait()
        await listed(router, prefill, decode, draining=decode)
        assert router.router is not None
        pairs, pool = router.router.pairs, router.router.engines
        running_turns = (await told_of(router, decode))["runningTurns"]
        go_on.set()
        await until(lambda: all(engine.turns == 0 for engine in pool))
        await listed(router, prefill, decode)

        def verified() -> bool:
            router.clock.ahead += 1
            (report,) = pairs.reports()
            assert report.verdict.value != "failed"
            return report.verdict.value == "verified"

        await until(verified)

    assert running_turns == 1


async def test_a_conversation_leaves_a_draining_simulated_engine_without_losing_a_token(tmp_path: Path) -> None:
    specs = [spec(Role.PREFILL), spec(Role.DECODE), EngineSpec(role=Role.DECODE)]
    with start(Kind.SIM, tmp_path / "engines", specs) as engines:
        (prefill,), (other, slow) = engines.prefill, engines.decode
        entries = {entry["name"]: entry for entry in engines.as_discovery_file()}
        async with routing(tmp_path, [entries[prefill.name], entries[slow.name]]) as router:
            assert router.router is not None
            pool = router.router.engines
            question = "read the ticket, look at the code and say what it tells you. " * 12
            sampling: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
            async with streaming(router, question, **sampling) as response:
                draining: list[dict[str, Any]] = [
                    entries[prefill.name],
                    {**entries[slow.name], "draining": True},
                    entries[other.name],
                ]
                router.list_engines(draining)
                await until(
                    lambda: {engine.spec.name for engine in pool if engine.serving} == {prefill.name, other.name}
                )
                meanwhile = await router.chat("something else altogether " * 12, **sampling)
                running_there = (await asyncio.to_thread(slow.metrics)).running
                first = Got(response.status, response.headers, await response.text())
            before = await asyncio.to_thread(prefill.metrics)
            second = await router.chat(question, first.content, "go on", **sampling)
            pulled = await asyncio.to_thread(prefill.metrics) - before
            cold = await router.chat(question, first.content, "go on", cache_salt="of its own", **sampling)
        read_from = {pair["engine_id"]: pair["reads"] for pair in await asyncio.to_thread(pairs, prefill)}
        issuer = (await asyncio.to_thread(state, slow))["engine_id"]

    assert (first.path, running_there) == ("cold", 1)
    assert first.text.endswith("data: [DONE]\n\n")
    assert read_from[issuer] == 1
    assert decoded_by(meanwhile) == decoded_by(second) == other.name
    assert second.path == "warm"
    assert second.reused == pulled.external_hits + pulled.local_hits > 0
    assert second.content == cold.content
