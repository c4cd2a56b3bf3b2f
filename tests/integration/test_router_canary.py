"""What the canary says of pairs of engines between which something is wrong, and what follows from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.settings import Role
from tests.integration.router_process import RouterUnderTest, scripted, until_only_pair_is
from tests.integration.scripted_engine import ANSWER, ScriptedEngine, answers, fails

LONG = "a question that is long enough to be worth a pull"


@pytest.fixture
async def router(tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine) -> AsyncIterator[RouterUnderTest]:
    async with scripted(tmp_path, prefill, decode, canary={"enabled": True}) as under_test:
        yield under_test


async def test_engines_that_move_kv_both_ways_are_verified(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    pair = await until_only_pair_is(router, "verified")

    assert (pair["detail"], pair["streams"]) == ("", True)
    assert (pair["toDecodeBytes"], pair["toDecodeSeconds"]) == (1000, 0.25)
    assert (pair["toPrefillBytes"], pair["toPrefillSeconds"]) == (1000, 0.25)
    first, second = prefill.legs[:2]
    assert first.body["cache_salt"] != second.body["cache_salt"]
    assert second.params["remote_engine_id"] == decode.engine_id
    assert second.params["remote_num_tokens"] >= 8
    assert await router.metric('kvloop_router_pair_verified{decode="decode-0",prefill="prefill-0"}') == 1


async def test_where_nothing_goes_back_to_prefill_the_other_direction_is_verified_alone(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    def keeps_nothing(answer: dict[str, Any]) -> None:
        answer["kv_transfer_params"] = None

    decode.script = [answers(keeps_nothing)]
    off = {"kvRecomputeThreshold": 8, "bidirectionalKvXfer": False}
    async with scripted(tmp_path, prefill, decode, canary={"enabled": True}, kvTransfer=off) as router:
        pair = await until_only_pair_is(router, "verified")

    assert "bidirectionalKvXfer is off" in pair["detail"]
    assert (pair["toDecodeBytes"], pair["toPrefillBytes"], pair["streams"]) == (1000, 0, None)
    assert len(prefill.legs) == 1


async def test_where_nothing_goes_back_to_prefill_the_other_direction_can_fail(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    decode.counts = False
    off = {"kvRecomputeThreshold": 8, "bidirectionalKvXfer": False}
    async with scripted(tmp_path, prefill, decode, canary={"enabled": True}, kvTransfer=off) as router:
        pair = await until_only_pair_is(router, "failed")

    assert "prefill to decode" in pair["detail"]


async def test_engines_whose_counters_stand_still_fail(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    prefill.counts = False

    pair = await until_only_pair_is(router, "failed")

    assert "decode to prefill" in pair["detail"]
    assert await router.metric('kvloop_router_pair_verified{decode="decode-0",prefill="prefill-0"}') == -1


@pytest.mark.parametrize(
    ("role", "step", "detail"),
    [
        (Role.PREFILL, fails(400, "the engine's own words"), "the engine's own words"),
        (Role.PREFILL, fails(500), "status 500"),
        (Role.PREFILL, answers(lambda answer: answer.pop("kv_transfer_params")), "no kv_transfer_params"),
        (Role.DECODE, answers(lambda answer: answer.pop("kv_transfer_params")), "bidirectional_kv_xfer"),
        (Role.DECODE, answers(lambda answer: answer.update(kv_transfer_params={"remote_engine_id": "x"})), "missing"),
    ],
)
async def test_what_is_wrong_is_told(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, role: Role, step: Any, detail: str
) -> None:
    (prefill if role is Role.PREFILL else decode).script = [step] * 99
    async with scripted(tmp_path, prefill, decode, canary={"enabled": True}) as router:
        pair = await until_only_pair_is(router, "failed")

    assert detail in pair["detail"]


async def test_a_pair_that_failed_serves_cold_and_is_tried_again(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    prefill.counts = False
    await until_only_pair_is(router, "failed")

    await router.chat(LONG)
    second = await router.chat(LONG, ANSWER, "and more")
    assert (second.status, second.path, second.reason) == (200, "cold", "pair_failed")

    prefill.counts = True
    await until_only_pair_is(router, "verified")
    third = await router.chat(LONG, ANSWER, "and more", ANSWER, "and yet more")
    assert third.path == "warm"
