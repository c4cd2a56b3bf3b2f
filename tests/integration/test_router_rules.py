"""Each failure of a leg, for both legs: what becomes of the turn and of its handle, and that nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvloop_connector.lease_requests import RELEASE_PATH
from kvloop_connector.settings import Role
from tests.integration.engine_scripts import aborts, stops
from tests.integration.router_process import Got, RouterUnderTest, chat_body, scripted, until
from tests.integration.scripted_engine import (
    ANSWER,
    ScriptedEngine,
    Step,
    fails,
    good,
    resets,
    starts_then_waits,
    streams,
)
from tests.integration.settled import settled

LONG = "a question that is long enough to be worth a pull"
MORE = (LONG, ANSWER, "and more")
GIVEN_UP = {"prefillSeconds": 1.5, "decodeSeconds": 1.5, "decodeStallSeconds": 1.5}
"""Seconds after which ``stops`` is given up; no other engine here takes any time."""
BUSY = fails(429, "too many", {"Retry-After": "7"})


@dataclass
class Scene:
    """A router over two engines of each role, one conversation behind it."""

    router: RouterUnderTest
    prefills: list[ScriptedEngine]
    decodes: list[ScriptedEngine]
    home: ScriptedEngine

    @property
    def engines(self) -> list[ScriptedEngine]:
        return [*self.prefills, *self.decodes]

    def next_prefill(self, step: Step) -> None:
        """Whichever prefill engine is asked next does this, once."""

        async def once(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            for other in self.prefills:
                other.script = []
            return await step(engine, request, body)

        for prefill in self.prefills:
            prefill.script = [once]

    def legs(self, engines: list[ScriptedEngine], got: Got) -> int:
        wanted = got.headers["X-Request-Id"]
        return sum(leg.headers["X-Request-Id"] == wanted for engine in engines for leg in engine.legs)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    prefills = [ScriptedEngine(f"prefill-{index}", Role.PREFILL) for index in range(2)]
    decodes = [ScriptedEngine(f"decode-{index}", Role.DECODE) for index in range(2)]
    checks = {"intervalSeconds": 60}
    changes = {"timeouts": GIVEN_UP, "healthChecks": checks}
    async with scripted(tmp_path, *prefills, *decodes, **changes) as router:
        first = await router.chat(LONG)
        assert first.status == 200
        home = next(decode for decode in decodes if decode.name == first.headers["X-Kvloop-Decode"])
        yield Scene(router, prefills, decodes, home)


async def stopped(engine: ScriptedEngine) -> None:
    assert engine.stop is not None
    await engine.stop()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(fails(500), id="500"),
        pytest.param(resets, id="reset"),
        pytest.param(stops, id="no answer in time"),
        pytest.param(aborts, id="draining"),
    ],
)
async def test_a_warm_turn_whose_prefill_leg_fails_goes_cold_and_its_handle_is_not_used_again(
    scene: Scene, step: Step
) -> None:
    scene.next_prefill(step)

    second = await scene.router.chat(*MORE)

    assert (second.status, second.path, second.reason, second.content) == (200, "cold", "engine_failed", ANSWER)
    assert (scene.legs(scene.prefills, second), scene.legs(scene.decodes, second)) == (2, 1)
    await settled(scene.router, scene.engines, burnt=1)


async def test_a_prefill_engine_that_cannot_be_reached_has_read_nothing(scene: Scene) -> None:
    for prefill in scene.prefills:
        await stopped(prefill)

    second = await scene.router.chat(*MORE)

    assert (second.status, second.error["code"]) == (502, "engine_failed")
    await settled(scene.router, scene.decodes, lost=1)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_engine_that_is_busy_says_when_to_come_back(scene: Scene, leg: str, streamed: bool) -> None:
    if leg == "prefill":
        scene.next_prefill(BUSY)
    else:
        scene.home.script = [BUSY]

    refused = await scene.router.chat(*MORE, stream=streamed)
    again = await scene.router.chat(*MORE)

    assert (refused.status, refused.headers["Retry-After"], refused.error["message"]) == (429, "7", "too many")
    assert scene.legs(scene.prefills, refused) == 1, "it is not asked for elsewhere"
    assert again.status == 200
    assert again.path == ("warm" if leg == "prefill" else "cold")
    await settled(scene.router, scene.engines)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(fails(500), id="500"),
        pytest.param(resets, id="reset"),
        pytest.param(stops, id="slow headers"),
        pytest.param(aborts, id="draining"),
    ],
)
async def test_a_decode_leg_that_fails_before_its_first_byte_is_sent_elsewhere_after_a_prefill_leg_of_its_own(
    scene: Scene, step: Step, streamed: bool
) -> None:
    scene.home.script = [step]

    second = await scene.router.chat(*MORE, stream=streamed)

    assert (second.status, second.path, second.reason, second.content) == (200, "cold", "engine_failed", ANSWER)
    assert second.headers["X-Kvloop-Decode"] != scene.home.name
    assert (scene.legs(scene.prefills, second), scene.legs(scene.decodes, second)) == (2, 2)
    await settled(scene.router, scene.engines)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_decode_engine_that_is_gone_is_left_for_another(scene: Scene, streamed: bool) -> None:
    await stopped(scene.home)

    second = await scene.router.chat(*MORE, stream=streamed)
    third = await scene.router.chat(*MORE, ANSWER, "and more still")

    assert (second.status, second.path, second.content) == (200, "cold", ANSWER)
    assert (third.status, third.path) == (200, "warm"), "the conversation goes on where it went"
    await settled(scene.router, scene.engines)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(starts_then_waits(asyncio.Event()), id="stall"),
        pytest.param(streams(lambda events: events[:2], reset=True), id="reset"),
    ],
)
async def test_a_stream_that_stops_after_its_first_byte_is_cut_off(scene: Scene, step: Step) -> None:
    scene.home.script = [step]
    body = chat_body(*MORE, stream=True)

    async with scene.router.session.post(scene.router.url + "/v1/chat/completions", json=body) as response:
        await response.content.readuntil(ANSWER.encode())
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()

    assert response.headers["X-Kvloop-Path"] == "warm"
    third = await scene.router.chat(*MORE)
    assert (third.status, third.path) == (200, "cold"), "what it was played with is spent"
    # The stream broke off before it told of its handle.
    await settled(scene.router, scene.engines, lost=1)


async def test_an_engine_that_was_restarted_has_nothing_of_what_it_retained(scene: Scene) -> None:
    other = "something else that is long enough to be worth a pull"
    scene.home.engine_id = "another-process"

    # The next answer shows it, whoever's it is.
    while True:
        got = await scene.router.chat(other)
        assert got.status == 200
        if got.headers["X-Kvloop-Decode"] == scene.home.name:
            break
    second = await scene.router.chat(*MORE)

    assert (second.status, second.path, second.reason) == (200, "cold", "engine_gone")
    await settled(scene.router, scene.engines, lost=1)


async def test_a_handle_that_prefill_declines_since_it_has_expired_costs_a_cold_turn(scene: Scene) -> None:
    # As its failure policy says: the request fails.
    scene.next_prefill(fails(500, "Internal server error"))

    second = await scene.router.chat(*MORE)
    third = await scene.router.chat(*MORE, ANSWER, "and more still")

    assert (second.path, second.reason) == ("cold", "engine_failed")
    assert third.path == "warm"
    await settled(scene.router, scene.engines, burnt=1)


@pytest.mark.parametrize(("step", "told"), [(fails(500), 1), (resets, 0)])
async def test_an_issuer_with_the_plug_in_is_told_of_a_handle_that_nobody_reads_any_more(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, step: Step, told: int
) -> None:
    decode.leases = 200
    async with scripted(tmp_path, prefill, decode) as router:
        assert router.router is not None
        engines, releases = router.router.engines, router.router.releases
        await until(lambda: any(engine.leases for engine in engines))
        await router.chat(LONG)
        prefill.script = [step]
        second = await router.chat(*MORE)
        assert (second.status, second.path) == (200, "cold")
        (carried,) = [params for params in prefill.carried if params.get("remote_num_tokens")]
        await until(lambda: not len(releases))

    by_name = [asked.body.get("remote_request_ids") for asked in decode.leased if asked.path == RELEASE_PATH]
    # After a reset prefill may still be reading.
    assert by_name.count([carried["remote_request_id"]]) == told


async def test_decode_computes_what_it_cannot_read_any_more(scene: Scene) -> None:
    async def reads_too_late(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        for prefill in scene.prefills:
            await stopped(prefill)
        return await good(engine, request, body)

    scene.home.script = [reads_too_late]
    second = await scene.router.chat(*MORE, stream=True)

    assert (second.status, second.path, second.content) == (200, "warm", ANSWER)
    assert scene.legs(scene.decodes, second) == 1
    await settled(scene.router, scene.engines)


async def test_an_engine_that_drains_without_saying_so_gets_no_more_turns_while_there_is_another(scene: Scene) -> None:
    scene.home.script = [aborts] * 9

    for index in range(6):
        got = await scene.router.chat(f"{LONG} {index}")
        assert (got.status, got.content) == (200, ANSWER)

    assert len(scene.home.script) >= 8, "it was asked once"
    await settled(scene.router, scene.engines)
