"""Retained blocks are released and renewed on simulated engines, with kvloop's plug-in and without."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.lease_requests import PLUGIN, RELEASE_PATH, WORKER_EXTENSION
from kvloop_connector.settings import Role
from tests.harness import client
from tests.harness.engines import Engine, Engines, Kind, start
from tests.integration.router_process import RouterUnderTest, routing, until, until_metric
from tests.integration.simulated import advance, spec, state
from tests.integration.test_router_leases import RELEASED, RENEWED, TTL_SECONDS, end
from tests.integration.test_router_simulated import MORE, WORK, cold_text, counted, holds_nothing, say

SHARE = 0.3


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A prefill engine, a decode engine with kvloop's plug-in and one without."""
    leases: Any = {"transfer_config": {"decoder_kv_blocks_ttl": TTL_SECONDS}}
    able = ("--worker-extension-cls", WORKER_EXTENSION)
    specs = [
        spec(Role.PREFILL),
        spec(Role.DECODE, *able, environment={"VLLM_PLUGINS": PLUGIN}, **leases),
        spec(Role.DECODE, **leases),
    ]
    with start(Kind.SIM, tmp_path_factory.mktemp("engines"), specs) as started:
        yield started


@asynccontextmanager
async def over(directory: Path, engines: Engines, decode: Engine, **changes: Any) -> AsyncIterator[RouterUnderTest]:
    """A router over the prefill engine and this decode engine, which holds nothing in the end."""
    names = {engines.prefill[0].name, decode.name}
    entries = [entry for entry in engines.as_discovery_file() if entry["name"] in names]
    transfer = {"decoderKvBlocksTtlSeconds": TTL_SECONDS, "kvRecomputeThreshold": 64, **changes.pop("kvTransfer", {})}
    async with routing(directory, entries, kvTransfer=transfer, handleTtlSeconds=TTL_SECONDS - 30, **changes) as router:
        yield router
    await holds_nothing(decode)
    assert state(decode)["counters"]["released_while_read"] == 0


async def test_a_renewed_handle_is_read_warm_after_its_first_time_is_over(engines: Engines, tmp_path: Path) -> None:
    (prefill,), decode = engines.prefill, engines.decode[0]
    async with over(tmp_path, engines, decode) as router:
        first = f"renewed {WORK}"
        answer = (await say(router, first)).content
        # In the last quarter of the thirty seconds for which the router keeps it.
        router.clock.ahead += 25
        advance(decode, 25)
        await until_metric(router, RENEWED, 1)
        router.clock.ahead += 20
        advance(decode, TTL_SECONDS - 20)
        (retained,) = state(decode)["retained"]
        before = await counted(prefill)

        second = await say(router, first, answer, MORE)

        assert retained["seconds_left"] > 0
        assert (second.path, second.reused > 0) == ("warm", True)
        pulled = await counted(prefill) - before
        assert second.reused == pulled.external_hits + pulled.local_hits
        assert second.content == await cold_text(router, first, answer, MORE)
        assert state(decode)["counters"]["reads_not_granted"] == 0


async def test_a_conversation_that_is_not_likely_to_go_on_has_its_time_and_no_more(
    engines: Engines, tmp_path: Path
) -> None:
    decode = engines.decode[0]
    async with over(tmp_path, engines, decode, leases={"expectedGapSeconds": 1}) as router:
        await say(router, f"not renewed {WORK}")
        assert router.router is not None
        router.clock.ahead += 29
        # By then it was looked at once more.
        await until(lambda: router.router is not None and len(router.router.store) == 1)
        router.clock.ahead += 1
        assert (await say(router, f"another {WORK}", conversation_id="c")).path == "cold"
        assert await router.metric(RENEWED) == 0
        assert await router.metric('kvloop_router_handles_total{event="expired"}') == 1
        advance(decode, TTL_SECONDS)


async def test_the_end_of_a_conversation_frees_its_blocks_without_a_leg(engines: Engines, tmp_path: Path) -> None:
    (prefill,), decode = engines.prefill, engines.decode[0]
    async with over(tmp_path, engines, decode) as router:
        await say(router, f"ended {WORK}", conversation_id="c")
        before, of_prefill = await counted(decode), await counted(prefill)
        assert before.kv_usage > 0

        assert await end(router, "c") == 1

        await holds_nothing(decode)
        assert (await counted(decode) - before).expired == 1
        assert await router.metric(RELEASED) == 1
        assert await router.metric('kvloop_router_handles_given_up_total{reason="ended"}') == 1
        assert (await counted(prefill) - of_prefill).computed == 0


async def test_without_the_plug_in_a_request_of_its_own_releases(engines: Engines, tmp_path: Path) -> None:
    decode = engines.decode[1]
    async with over(tmp_path, engines, decode) as router:
        await say(router, f"ended {WORK}", conversation_id="c")
        before = await counted(decode)

        assert await end(router, "c") == 1

        await holds_nothing(decode)
        assert (await counted(decode) - before).expired == 0
        assert await router.metric(RELEASED) == 1


@pytest.mark.parametrize("plug_in", [True, False])
async def test_past_the_budget_the_longest_idle_is_released(engines: Engines, tmp_path: Path, plug_in: bool) -> None:
    decode = engines.decode[0 if plug_in else 1]
    # No question that the prefill engine has in its own cache from the other time.
    work = f"{'told' if plug_in else 'by a leg'} {WORK}"
    budget = 'kvloop_router_handles_given_up_total{reason="budget"}'
    async with over(tmp_path, engines, decode, kvTransfer={"retainedShareLimit": SHARE}) as router:
        answers: list[str] = []
        while not await router.metric(budget):
            assert len(answers) < 50, "it retains whatever comes"
            name = f"idle {len(answers)} {work}"
            answers.append((await say(router, name, conversation_id=f"c{len(answers)}")).content)
        await until_metric(router, RELEASED, await router.metric(budget))

        assert len(answers) > 3
        assert (await counted(decode)).kv_usage <= SHARE
        oldest, newest = 0, len(answers) - 1
        second = await say(router, f"idle {newest} {work}", answers[newest], MORE, conversation_id=f"c{newest}")
        gone = await say(router, f"idle {oldest} {work}", answers[oldest], MORE, conversation_id=f"c{oldest}")
        assert (second.path, gone.path, gone.reason) == ("warm", "cold", "evicted")


async def test_a_handle_that_its_engine_does_not_hold_any_more_is_forgotten_before_a_turn_fails_on_it(
    engines: Engines, tmp_path: Path
) -> None:
    decode = engines.decode[0]
    async with over(tmp_path, engines, decode) as router:
        first = f"released behind its back {WORK}"
        answer = (await say(router, first)).content
        (retained,) = state(decode)["retained"]
        client.post(decode.url + RELEASE_PATH, {"remote_request_ids": [retained["request_id"]]})
        router.clock.ahead += 25
        await until_metric(router, 'kvloop_router_lease_renewals_total{outcome="not_held"}', 1)

        second = await say(router, first, answer, MORE)

        assert (second.path, second.reason) == ("cold", "evicted")
        report = await router.admin(f"/admin/v1/turns/{second.headers['X-Request-Id']}")
        assert report["attempts"] == []


async def test_a_router_that_ends_tells_whom_it_can(engines: Engines, tmp_path: Path) -> None:
    for decode in engines.decode:
        before = await counted(decode)
        directory = tmp_path / decode.name
        directory.mkdir()
        async with over(directory, engines, decode) as router:
            for number in range(3):
                await say(router, f"kept {number} {WORK}")
        assert (await counted(decode) - before).expired == (3 if decode is engines.decode[0] else 0)
