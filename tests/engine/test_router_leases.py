"""A router that renews and releases what real decode engines retain, by kvloop's plug-in."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract.legs import SAMPLING, fresh_salt, holds_nothing
from tests.engine.test_router import MORE, VLLM_0_32, WORK, entries, transfer
from tests.harness.engines import Engine, Engines, Kind, wait_until
from tests.harness.fixtures import BRIEF_TTL_SECONDS, REAL_ENGINES
from tests.integration.router_process import Got, RouterUnderTest, routing, until

pytestmark = [*REAL_ENGINES]

KEPT_SECONDS = 30
"""The router believes that engines retain for so long and a margin; this one does for a few seconds only."""


@pytest.fixture(params=[pytest.param(Kind.VLLM, marks=pytest.mark.stock), Kind.VLLM_KVLOOP])
def engines(request: pytest.FixtureRequest) -> Engines:
    """The shared engines of both connectors."""
    found = request.getfixturevalue(f"{request.param.replace('-', '_')}_engines")
    assert isinstance(found, Engines)
    return found


async def say(router: RouterUnderTest, *contents: str, **fields: Any) -> Got:
    got = await router.chat(*contents, **{**SAMPLING, **fields})
    assert got.status == 200, got.text
    return got


async def metric(router: RouterUnderTest, line: str, value: float) -> None:
    async with asyncio.timeout(60):
        while await router.metric(line) != value:  # noqa: ASYNC110  a counter is read over HTTP
            await asyncio.sleep(0.05)


async def only(router: RouterUnderTest, engines: Engines, *wanted: Engine) -> None:
    """Let the router have these engines and no others."""
    router.list_engines(entries(engines, *wanted))
    assert router.router is not None
    pool = router.router.engines
    await until(lambda: {engine.spec.name for engine in pool if engine.healthy} == {each.name for each in wanted})


async def freed(decode: Engine) -> bool:
    return await asyncio.to_thread(wait_until, lambda: holds_nothing(decode))


async def test_a_conversation_is_warm_after_its_engines_own_time_and_nothing_is_left_of_it(
    engines: Engines, tmp_path: Path
) -> None:
    (first, prefill), decode = engines.prefill, engines.decode[1]
    name = f"renewed {fresh_salt()} {WORK}"
    settings = {
        "kvTransfer": {**transfer(engines), "decoderKvBlocksTtlSeconds": KEPT_SECONDS + 30},
        "handleTtlSeconds": KEPT_SECONDS,
        "engine": VLLM_0_32,
    }
    async with routing(tmp_path, entries(engines, first, decode), **settings) as router:
        answer = (await say(router, name, conversation_id="c")).content
        ended = time.monotonic()
        # Its own cache holds nothing of the conversation.
        await only(router, engines, prefill, decode)
        router.clock.ahead += KEPT_SECONDS * 5 / 6
        await metric(router, 'kvloop_router_lease_renewals_total{outcome="renewed"}', 1)
        before = await asyncio.to_thread(decode.metrics)
        await asyncio.to_thread(wait_until, lambda: time.monotonic() > ended + BRIEF_TTL_SECONDS + 1)
        assert not await asyncio.to_thread(holds_nothing, decode)
        of_prefill = await asyncio.to_thread(prefill.metrics)

        second = await say(router, name, answer, MORE, conversation_id="c")

        pulled = await asyncio.to_thread(prefill.metrics) - of_prefill
        assert (second.path, second.reused) == ("warm", pulled.external_hits + pulled.local_hits)
        assert pulled.reads == 1
        assert second.content == (await say(router, name, answer, MORE, cache_salt=fresh_salt())).content
        # What the cold one left, its conversation being another, and what the warm one left.
        async with router.session.delete(f"{router.url}/kvloop/v1/conversations/c") as gone:
            assert (await gone.json())["released"] == 1
        assert router.router is not None
        await router.router.release_all()
        await metric(router, 'kvloop_router_handles_total{event="released"}', 2)
        assert await freed(decode)
        assert (await asyncio.to_thread(decode.metrics) - before).expired == 2
