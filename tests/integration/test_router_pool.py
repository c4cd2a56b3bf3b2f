"""Many engines behind one router: which get turns, how many, of which model, at which rank."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvloop_connector.settings import Role
from tests.integration.router_process import Got, RouterUnderTest, chat_body, scripted, until
from tests.integration.scripted_engine import ANSWER, RANK_HEADER, ScriptedEngine, event, fails, stream_events, waits
from tests.integration.settled import settled

LONG = "a question that is long enough to be worth a pull"
CHECKED_ONCE = {"intervalSeconds": 60}
MUCH = 1_000
CHUNK = event({"choices": [{"index": 0, "delta": {"content": "x" * 65_536}, "finish_reason": None}]})


def engines(role: Role, count: int, **facts: Any) -> list[ScriptedEngine]:
    return [ScriptedEngine(f"{role}-{index}", role, **facts) for index in range(count)]


@pytest.mark.parametrize("role", list(Role))
async def test_an_engine_whose_legs_fail_is_passed_over_and_tried_again_later(tmp_path: Path, role: Role) -> None:
    pools = {Role.PREFILL: engines(Role.PREFILL, 2), Role.DECODE: engines(Role.DECODE, 2)}
    bad, good = pools[role]
    bad.script = [fails(500)] * 3
    checks = {"intervalSeconds": 60, "legFailures": 3, "suspectSeconds": 100}
    every = [*pools[Role.PREFILL], *pools[Role.DECODE]]
    async with scripted(tmp_path, *every, healthChecks=checks) as router:
        asked = 0
        while bad.script:
            assert (await router.chat(f"{LONG} {asked}")).status == 200
            asked += 1
        for index in range(10):
            assert (await router.chat(f"{LONG} more {index}")).headers[f"X-Kvloop-{role.title()}"] == good.name
        assert len(bad.legs) == 3
        shown = {engine["name"]: engine for engine in (await router.admin("/admin/v1/engines"))["engines"]}
        assert (shown[bad.name]["suspect"], shown[bad.name]["healthy"]) == (True, True)

        router.clock.ahead += 100
        while len(bad.legs) == 3:
            assert (await router.chat(f"{LONG} later {len(good.legs)}")).status == 200
        await settled(router, every)


async def test_what_one_client_does_wrong_takes_no_engine_from_anybody(tmp_path: Path) -> None:
    prefills, decodes = engines(Role.PREFILL, 2), engines(Role.DECODE, 1)
    checks = {"intervalSeconds": 60, "legFailures": 1}
    async with scripted(tmp_path, *prefills, *decodes, healthChecks=checks) as router:
        for status in (400, 404, 422, 429) * 3:
            for prefill in prefills:
                prefill.script = [fails(status)]
            assert (await router.chat(LONG)).status == status
        for prefill in prefills:
            prefill.script = []
        shown = (await router.admin("/admin/v1/engines"))["engines"]
        assert not any(engine["suspect"] for engine in shown)

        # Even a request that fails everywhere leaves the engines to others.
        for prefill in prefills:
            prefill.script = [fails(500)]
        assert (await router.chat(LONG)).status == 502
        assert (await router.chat(LONG)).status == 200


async def test_engines_serve_their_own_model_and_no_other(tmp_path: Path) -> None:
    tiny = [*engines(Role.PREFILL, 1), *engines(Role.DECODE, 1)]
    large = [
        ScriptedEngine("large-prefill", Role.PREFILL, model="large", revision="l"),
        ScriptedEngine("large-decode", Role.DECODE, model="large", revision="l"),
    ]
    async with scripted(tmp_path, *tiny, *large) as router:
        for prefill, decode in (tiny, large):
            model = prefill.model
            first = await router.chat(LONG, model=model)
            second = await router.chat(LONG, ANSWER, "and more", model=model)
            served = (second.headers["X-Kvloop-Prefill"], second.headers["X-Kvloop-Decode"])
            assert (first.status, second.path, served) == (200, "warm", (prefill.name, decode.name))
        unknown = await router.chat(LONG, model="huge")
        listed = {model["id"] for model in (await router.get("/v1/models")).json["data"]}

        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
        assert "'large', 'tiny'" in unknown.error["message"]
        assert listed == {"large", "tiny"}
        assert (await router.chat(LONG, ANSWER, "and more", model="large", conversation_id="c")).status == 200
        await settled(router, [*tiny, *large])


async def test_a_conversation_goes_back_to_the_rank_that_holds_it(tmp_path: Path) -> None:
    (prefill,), (decode,) = engines(Role.PREFILL, 1, ranks=2), engines(Role.DECODE, 1, ranks=4)
    async with scripted(tmp_path, prefill, decode) as router:
        questions = [f"{LONG} {index}" for index in range(8)]
        for question in questions:
            assert (await router.chat(question)).status == 200
        chosen = [leg.headers[RANK_HEADER] for leg in decode.legs]
        assert len(set(chosen)) > 1
        for question, rank in zip(questions, chosen, strict=True):
            second = await router.chat(question, ANSWER, "and more")
            assert (second.path, decode.legs[-1].headers[RANK_HEADER]) == ("warm", rank)

        assert not any(RANK_HEADER in leg.headers for leg in prefill.legs), "prefill chooses itself"
        await settled(router, [prefill, decode])


async def test_running_turns_are_spread_over_the_ranks(tmp_path: Path) -> None:
    (prefill,), (decode,) = engines(Role.PREFILL, 1), engines(Role.DECODE, 1, ranks=4)
    go_on = asyncio.Event()
    decode.script = [waits(go_on)] * 8
    async with scripted(tmp_path, prefill, decode) as router:
        async with asyncio.TaskGroup() as group:
            turns = [group.create_task(router.chat(f"{LONG} {index}")) for index in range(8)]
            await until(lambda: decode.running == 8)
            assert Counter(leg.headers[RANK_HEADER] for leg in decode.legs) == dict.fromkeys("0123", 2)
            go_on.set()
        assert {turn.result().status for turn in turns} == {200}
        await settled(router, [prefill, decode])


async def test_an_engine_without_ranks_is_told_none(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    await router.chat(LONG)

    assert not any(RANK_HEADER in leg.headers for leg in (*prefill.legs, *decode.legs))


async def test_turns_wait_for_a_place_and_too_many_are_refused(tmp_path: Path) -> None:
    (prefill,), decodes = engines(Role.PREFILL, 1), engines(Role.DECODE, 2)
    go_on = asyncio.Event()
    for decode in decodes:
        decode.script = [waits(go_on)] * 2
    limits = {"turnsPerEngine": 2, "waitingTurnsPerEngine": 1}
    async with scripted(tmp_path, prefill, *decodes, limits=limits) as router, asyncio.TaskGroup() as group:

        def come(*names: str) -> list[asyncio.Task[Got]]:
            return [group.create_task(router.chat(f"{LONG} {name}")) for name in names]

        running = come("1", "2", "3", "4")
        await until(lambda: [decode.running for decode in decodes] == [2, 2])
        waiting = come("5", "6")
        await until(lambda: router.router is not None and router.router.state.turns == 6)
        await until(lambda: router.router is not None and router.router.admission.waiting == 2)
        refused = await router.chat(f"{LONG} 7")
        assert len(prefill.legs) == 4, "no leg is sent for what waits"
        go_on.set()

        assert (refused.status, refused.error["code"], refused.error["type"]) == (
            429,
            "engines_busy",
            "rate_limit_error",
        )
        assert int(refused.headers["Retry-After"]) >= 1
        assert {(await turn).status for turn in (*running, *waiting)} == {200}
        assert await router.metric('kvloop_router_refused_turns_total{model="tiny"}') == 1
        await settled(router, [prefill, *decodes])


async def test_a_client_that_reads_slowly_holds_up_the_engine_and_not_the_answer_in_memory(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    sent, held_up = [0], asyncio.Event()

    async def streams_much(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        first, *_, last, mark = stream_events(engine, request.path, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first)
        while not held_up.is_set() and sent[0] < MUCH:
            written = asyncio.get_running_loop().create_task(response.write(CHUNK))
            done, _ = await asyncio.wait([written], timeout=2)
            if not done:
                held_up.set()
                await written
            sent[0] += 1
        for item in (last, mark):
            await response.write(item)
        await response.write_eof()
        engine.finished.set()
        return response

    decode.script = [streams_much]
    url, body = router.url + "/v1/chat/completions", chat_body(LONG, stream=True)
    async with router.session.post(url, json=body) as response:
        await until(lambda: held_up.is_set() or sent[0] == MUCH)
        # What is on its way lies in the sockets of both connections, which the system lets grow to some megabytes.
        assert held_up.is_set()
        assert not decode.finished.is_set()
        size = len(await response.read())

    assert size > sent[0] * len(CHUNK)
    await settled(router, [prefill, decode])


@pytest.mark.parametrize("connector", ["NixlConnector", "KvloopConnector"])
async def test_a_spent_handle_goes_to_no_other_prefill_engine(tmp_path: Path, connector: str) -> None:
    prefills, (decode,) = engines(Role.PREFILL, 2), engines(Role.DECODE, 1)
    if connector == "KvloopConnector":
        for prefill in prefills:
            prefill.verdict = "read"
    changes = {"kvTransfer": {"connector": connector}, "healthChecks": CHECKED_ONCE}
    async with scripted(tmp_path, *prefills, decode, **changes) as router:
        await router.chat(LONG)
        # It reads, and then nobody hears of it.
        for prefill in prefills:
            prefill.script = [fails(500)]
        second = await router.chat(LONG, ANSWER, "and more")
        for prefill in prefills:
            prefill.script = []
        third = await router.chat(LONG, ANSWER, "and another")

        assert (second.status, third.status) == (502, 200)
        carried = [params["remote_request_id"] for each in prefills for params in each.carried if len(params) > 3]
        assert len(carried) == len(set(carried)) == 1
        await settled(router, [*prefills, decode], burnt=1)
