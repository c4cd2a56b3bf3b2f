"""Each failure rule, with an engine that fails as the rule says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvloop_connector.settings import Role
from tests.integration.router_process import Got, RouterUnderTest, chat_body, scripted, until
from tests.integration.scripted_engine import (
    ANSWER,
    ScriptedEngine,
    Step,
    answers,
    event,
    fails,
    resets,
    stream_events,
    streams,
)

LONG = "a question that is long enough to be worth a pull"
ABORTED = {"index": 0, "delta": {"role": "assistant", "content": ""}}


@pytest.fixture
def prefills() -> list[ScriptedEngine]:
    return [ScriptedEngine(f"prefill-{index}", Role.PREFILL) for index in range(2)]


@pytest.fixture
def decodes() -> list[ScriptedEngine]:
    return [ScriptedEngine(f"decode-{index}", Role.DECODE) for index in range(2)]


@pytest.fixture
async def router(
    tmp_path: Path, prefills: list[ScriptedEngine], decodes: list[ScriptedEngine]
) -> AsyncIterator[RouterUnderTest]:
    async with scripted(tmp_path, *prefills, *decodes, timeouts={"prefillSeconds": 5}) as under_test:
        yield under_test


def named(engines: list[ScriptedEngine], got: Got, header: str) -> ScriptedEngine:
    return next(engine for engine in engines if engine.name == got.headers[header])


async def a_first_turn(router: RouterUnderTest, decodes: list[ScriptedEngine]) -> ScriptedEngine:
    """Play one; gives the decode engine that retains it."""
    first = await router.chat(LONG)
    assert first.status == 200
    return named(decodes, first, "X-Kvloop-Decode")


async def second_turn(router: RouterUnderTest, **fields: Any) -> Got:
    return await router.chat(LONG, ANSWER, "and more", **fields)


def legs_of(engines: list[ScriptedEngine], got: Got) -> list[Any]:
    """What the turn's legs carried, over all engines."""
    wanted = got.headers["X-Request-Id"]
    return [leg.params for engine in engines for leg in engine.legs if leg.headers["X-Request-Id"] == wanted]


def script_all(engines: list[ScriptedEngine], step: Step) -> None:
    for engine in engines:
        engine.script = [step]


async def hangs(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


@pytest.mark.parametrize("step", [fails(500), fails(503), resets, answers(lambda answer: answer.clear())])
async def test_a_cold_prefill_leg_that_fails_is_sent_to_another_engine(
    router: RouterUnderTest, prefills: list[ScriptedEngine], decodes: list[ScriptedEngine], step: Step
) -> None:
    prefills[0].script = [step] * 9
    turns = [await router.chat(f"{LONG} {index}") for index in range(6)]

    assert {turn.status for turn in turns} == {200}
    assert len(decodes[0].legs) + len(decodes[1].legs) == 6


async def test_a_handle_of_a_failed_leg_is_never_used_nor_released(
    router: RouterUnderTest, prefills: list[ScriptedEngine], decodes: list[ScriptedEngine]
) -> None:
    await a_first_turn(router, decodes)
    script_all(prefills, fails(500))
    prefills[0].script.append(fails(500))
    prefills[1].script.append(fails(500))
    failed = await second_turn(router)
    for prefill in prefills:
        prefill.script = []
    burnt = [params["remote_request_id"] for params in legs_of(prefills, failed) if "remote_request_id" in params]
    await second_turn(router)
    await router.chat("something else altogether, as long as that")

    assert (failed.status, failed.error["code"]) == (502, "engine_failed")
    assert len(burnt) == 1
    uses = [
        leg
        for prefill in prefills
        for leg in (*prefill.legs, *prefill.fillers)
        if leg.params.get("remote_request_id") == burnt[0]
    ]
    assert len(uses) == 1


async def test_a_refused_connection_is_retried_and_its_handle_released(
    tmp_path: Path, decodes: list[ScriptedEngine], prefills: list[ScriptedEngine]
) -> None:
    gone = {"name": "prefill-gone", "role": "prefill", "url": "http://127.0.0.1:9", "podUID": "u", "kvRevision": "a"}
    async with scripted(tmp_path, prefills[0], decodes[0]) as router:
        await a_first_turn(router, decodes[:1])
        router.list_engines([gone, prefills[0].entry(), decodes[0].entry()])
        assert router.router is not None
        engines = router.router.engines
        await until(lambda: engines.get("prefill-gone") is not None)
        dead = engines.get("prefill-gone")
        assert dead is not None
        turns = 0
        while True:
            dead.health.vouched_for()
            turn = await router.chat(LONG, ANSWER, "and more")
            assert turn.status == 200
            turns += 1
            if turn.reason == "engine_failed":
                break
        assert turns < 50
        await until(lambda: any(params.get("remote_num_tokens") == 0 for params in released(prefills[0])))
        assert not dead.healthy


def released(prefill: ScriptedEngine) -> list[dict[str, Any]]:
    return [leg.params for leg in (*prefill.legs, *prefill.fillers)]


async def test_a_prefill_leg_that_hangs_is_given_up(
    tmp_path: Path, prefills: list[ScriptedEngine], decodes: list[ScriptedEngine]
) -> None:
    prefills[0].script = [hangs] * 9
    prefills[0].tries_patience = True
    async with scripted(tmp_path, *prefills, decodes[0], timeouts={"prefillSeconds": 0.5}) as router:
        turns = [await router.chat(f"{LONG} {index}") for index in range(4)]

    assert {turn.status for turn in turns} == {200}
    assert {turn.headers["X-Kvloop-Prefill"] for turn in turns} == {"prefill-1"}


@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_a_refusal_is_the_clients_and_the_handle_stays(
    router: RouterUnderTest, prefills: list[ScriptedEngine], decodes: list[ScriptedEngine], status: int
) -> None:
    await a_first_turn(router, decodes)
    script_all(prefills, fails(status, "the engine's own words"))

    refused = await second_turn(router)
    for prefill in prefills:
        prefill.script = []
    again = await second_turn(router)

    assert (refused.status, refused.error["message"]) == (status, "the engine's own words")
    assert len(legs_of(prefills, refused)) == 1, "a refusal is not sent to another engine"
    assert again.path == "warm"


async def test_a_handle_that_was_put_back_keeps_its_deadline(
    router: RouterUnderTest, prefills: list[ScriptedEngine], decodes: list[ScriptedEngine]
) -> None:
    await a_first_turn(router, decodes)
    router.clock.ahead += 400
    script_all(prefills, fails(400))
    await second_turn(router)
    for prefill in prefills:
        prefill.script = []
    router.clock.ahead += 50

    assert (await second_turn(router)).reason == "expired"


async def test_without_parameters_from_prefill_decode_gets_none(
    router: RouterUnderTest, prefills: list[ScriptedEngine], decodes: list[ScriptedEngine]
) -> None:
    await a_first_turn(router, decodes)
    script_all(prefills, answers(lambda answer: answer.pop("kv_transfer_params")))

    second = await second_turn(router)

    assert second.status == 200
    assert legs_of(decodes, second) == [None]


async def test_an_error_in_a_stream_before_any_text_is_tried_again(
    router: RouterUnderTest, decodes: list[ScriptedEngine]
) -> None:
    issuer = await a_first_turn(router, decodes)
    issuer.script = [streams(lambda events: [events[0], event({"error": {"code": 500, "message": "x"}}), events[-1]])]

    second = await second_turn(router, stream=True)

    assert (second.status, second.content) == (200, ANSWER)


async def test_an_error_that_is_the_clients_own_passes_in_the_stream(
    router: RouterUnderTest, decodes: list[ScriptedEngine]
) -> None:
    refusal = event({"error": {"code": 400, "message": "not this"}})
    script_all(decodes, streams(lambda events: [refusal, events[-1]]))

    got = await router.chat(LONG, stream=True)

    assert got.text.encode() == refusal + b"data: [DONE]\n\n"


def all_but(*left_out: int) -> Callable[[list[bytes]], list[bytes]]:
    return lambda events: [item for index, item in enumerate(events) if index - len(events) not in left_out]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(streams(lambda events: events[:2], reset=True), id="reset in the middle"),
        pytest.param(streams(lambda events: events[:2]), id="an end in the middle"),
        pytest.param(streams(all_but(-1)), id="an end without its mark"),
        pytest.param(streams(all_but(-2)), id="a mark without a reason to end"),
        pytest.param(streams(lambda events: [*events[:-1], events[-1][:9]]), id="an end within an event"),
    ],
)
async def test_a_stream_that_breaks_upstream_breaks_for_the_client(
    router: RouterUnderTest, prefills: list[ScriptedEngine], decodes: list[ScriptedEngine], step: Step
) -> None:
    script_all(decodes, step)

    body = chat_body(LONG, stream=True)
    async with router.session.post(router.url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200
        assert ANSWER.encode() in await response.content.readuntil(ANSWER.encode())
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()

    engine = response.headers["X-Kvloop-Decode"]
    assert await router.metric(f'kvloop_router_upstream_breaks_total{{engine="{engine}"}}') == 1
    assert sum(len(prefill.legs) for prefill in prefills) == 1, "after the first byte nothing is tried again"


async def test_an_event_whose_handle_cannot_be_read_breaks_the_stream(
    router: RouterUnderTest, decodes: list[ScriptedEngine]
) -> None:
    go_on = asyncio.Event()

    async def garbles(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for item in stream_events(engine, request.path, body)[:2]:
            await response.write(item)
        await go_on.wait()
        await response.write(b'data: {"kv_transfer_params":{"remote_host"\n\n')
        await response.write_eof()
        return response

    script_all(decodes, garbles)
    async with router.session.post(router.url + "/v1/chat/completions", json=chat_body(LONG, stream=True)) as response:
        await response.content.readuntil(ANSWER.encode())
        go_on.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.readuntil(b"remote_host")


async def test_a_broken_turns_conversation_goes_on_cold(router: RouterUnderTest, decodes: list[ScriptedEngine]) -> None:
    script_all(decodes, streams(lambda events: events[:2]))
    with pytest.raises(aiohttp.ClientPayloadError):
        await router.chat(LONG, stream=True)
    for decode in decodes:
        decode.script = []

    assert (await second_turn(router)).path == "cold"


async def test_an_answer_with_an_unreadable_handle_is_not_passed_on(
    router: RouterUnderTest, decodes: list[ScriptedEngine]
) -> None:
    async def garbled(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=b'{"kv_transfer_params": {"remote_host": ', content_type="application/json")

    for decode in decodes:
        decode.script = [garbled, garbled]

    got = await router.chat(LONG)

    assert got.status == 502
    assert "remote_host" not in got.text


async def test_when_everything_fails_the_client_gets_an_error_in_openais_shape(
    router: RouterUnderTest, prefills: list[ScriptedEngine]
) -> None:
    for prefill in prefills:
        prefill.script = [fails(500)] * 4

    got = await router.chat(LONG)

    assert got.status == 502
    assert set(got.error) == {"message", "type", "param", "code"}
    assert got.headers["X-Request-Id"]
