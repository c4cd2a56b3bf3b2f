"""A router before engines with KvloopConnector: it asks for no tokens, proves nothing, and says what engines found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.handle import COLD_PREFILL_PARAMS, RETAIN_PARAMS
from kvloop_connector.settings import Role
from tests.integration.router_process import RouterUnderTest, chat_body, scripted, until, until_only_pair_is
from tests.integration.scripted_engine import ANSWER, BLOCK_SIZE, ScriptedEngine, fails, handle, rendered

LONG = "a question that is long enough to be worth a pull"
KVLOOP: dict[str, Any] = {"connector": "KvloopConnector", "kvRecomputeThreshold": 8}


@pytest.fixture
def prefill() -> ScriptedEngine:
    return ScriptedEngine("prefill-0", Role.PREFILL, verdict="read")


@pytest.fixture
async def router(tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine) -> AsyncIterator[RouterUnderTest]:
    async with scripted(tmp_path, prefill, decode, kvTransfer=KVLOOP) as under_test:
        yield under_test


def issued(*contents: str) -> int:
    """Tokens of the handle that the turn with these messages leaves."""
    return len(rendered(chat_body(*contents))) + len(ANSWER)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_second_turn_carries_the_handle_as_it_was_issued(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, streamed: bool
) -> None:
    first = await router.chat(LONG, stream=streamed)
    second = await router.chat(LONG, ANSWER, "and more", stream=streamed)

    whole = issued(LONG) // BLOCK_SIZE * BLOCK_SIZE
    assert (first.path, first.reason, first.reused) == ("cold", "miss", 0)
    assert (second.path, second.reason, second.reused) == ("warm", "", whole)
    carried = prefill.carried[1]
    # Field by field as the engine made it: the seal covers all of them.
    expected = handle(decode, issued(LONG))
    assert carried.keys() == expected.keys()
    assert carried == {**expected, "remote_request_id": carried["remote_request_id"]}
    assert await router.metric('kvloop_router_handle_verdicts_total{outcome="read"}') == 1


async def test_no_token_ids_are_asked_for(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    await router.chat(LONG)
    await router.chat(LONG, ANSWER, "and more")

    asked = [*prefill.asked, *decode.asked]
    assert [one.path for one in asked if one.path == "/tokenize"] == []
    assert [one for one in asked if "return_token_ids" in one.body or "prompt_token_ids" in (one.params or {})] == []


async def test_token_ids_that_the_client_asks_for_reach_it(router: RouterUnderTest) -> None:
    got = await router.chat(LONG, return_token_ids=True)

    assert got.json["choices"][0]["token_ids"]


async def test_prompt_tokens_are_those_that_prefill_counted(router: RouterUnderTest) -> None:
    got = await router.chat(LONG)

    report = await router.admin(f"/admin/v1/turns/{got.headers['X-Request-Id']}")
    assert report["prompt_tokens"] == len(rendered(chat_body(LONG)))


@pytest.mark.parametrize("verdict", ["diverged", "expired", "forged", "spent", "other_hash"])
async def test_a_handle_that_prefill_does_not_read_makes_a_cold_turn_with_its_reason(
    router: RouterUnderTest, prefill: ScriptedEngine, verdict: str
) -> None:
    await router.chat(LONG)
    prefill.verdict = verdict
    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.status, second.path, second.reason, second.reused) == (200, "cold", verdict, 0)
    assert await router.metric(f'kvloop_router_handle_verdicts_total{{outcome="{verdict}"}}') == 1
    # It was used all the same: it never goes out again.
    third = await router.chat(LONG, ANSWER, "and more")
    assert third.path == "cold"
    assert prefill.carried[2] == COLD_PREFILL_PARAMS or prefill.carried[2]["remote_num_tokens"] == issued(
        LONG, ANSWER, "and more"
    )


async def test_pulls_below_the_threshold_are_no_reuse(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    await router.chat(LONG)
    prefill.cached_tokens = 0
    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, second.reason, second.reused) == ("cold", "below_threshold", 0)


async def test_an_engine_that_says_nothing_is_not_believed(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    await router.chat(LONG)
    prefill.verdict = ""
    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, second.reason) == ("cold", "no_verdict")
    assert await router.metric('kvloop_router_handle_verdicts_total{outcome="none"}') == 1


async def test_what_cannot_be_told_by_tokens_is_reused_too(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    seen = [{"role": "user", "content": [picture, {"type": "text", "text": LONG}]}]
    body = {"model": "tiny", "messages": seen}
    await router.post("/v1/chat/completions", body)
    answered = [*seen, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "and more"}]
    second = await router.post("/v1/chat/completions", {**body, "messages": answered})

    assert second.path == "warm"


async def test_another_conversation_takes_no_handle(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    await router.chat(LONG, conversation_id="one")
    other = await router.chat(LONG, "another answer", "and more", conversation_id="another")
    again = await router.chat(LONG)

    assert (other.path, other.reason) == (again.path, again.reason) == ("cold", "miss")
    assert prefill.carried[1:] == [COLD_PREFILL_PARAMS] * 2


async def test_a_conversation_under_a_wrong_id_is_known_by_its_history(router: RouterUnderTest) -> None:
    await router.chat(LONG, ANSWER, "and more", conversation_id="one")
    other = await router.chat(LONG, ANSWER, "and more", ANSWER, "still more", conversation_id="another")

    assert other.path == "warm"


async def test_the_end_of_a_conversation_releases_its_handle_whole(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    await router.chat(LONG, conversation_id="one")
    async with router.session.delete(f"{router.url}/kvloop/v1/conversations/one") as ended:
        assert (await ended.json())["released"] == 1

    def released() -> bool:
        router.clock.ahead += 1
        return bool(prefill.fillers)

    await until(released)
    params = prefill.fillers[0].params
    assert params["remote_num_tokens"] == 0
    assert params["remote_block_ids"] == handle(decode, issued(LONG))["remote_block_ids"]


async def test_a_prompt_that_engines_refuse_leaves_the_handle_for_the_next(
    router: RouterUnderTest, prefill: ScriptedEngine
) -> None:
    await router.chat(LONG)
    prefill.script = [fails(400, "too long")]
    refused = await router.chat(LONG, ANSWER, "and more")
    again = await router.chat(LONG, ANSWER, "and more")

    assert (refused.status, again.path) == (400, "warm")


async def test_of_two_turns_at_a_time_one_gets_the_handle(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    await router.chat(LONG)
    both = await asyncio.gather(*(router.chat(LONG, ANSWER, f"and more, {number}") for number in range(2)))

    assert sorted(got.path for got in both) == ["cold", "warm"]
    carrying = [params for params in prefill.carried if params.get("remote_num_tokens")]
    assert len(carrying) == 1


class TestCanary:
    @pytest.fixture
    async def router(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> AsyncIterator[RouterUnderTest]:
        async with scripted(tmp_path, prefill, decode, kvTransfer=KVLOOP, canary={"enabled": True}) as under_test:
            yield under_test

    async def test_kv_is_seen_to_move_both_ways_under_one_salt(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        pair = await until_only_pair_is(router, "verified")

        assert (pair["detail"], pair["streams"]) == ("", True)
        assert min(pair["toDecodeBytes"], pair["toPrefillBytes"]) > 0
        alone, second = decode.legs[:2]
        (leg,) = prefill.legs[:1]
        assert alone.params == RETAIN_PARAMS
        assert alone.body["cache_salt"] == second.body["cache_salt"] == leg.body["cache_salt"]
        # Prefill never saw the first turn's prompt, so that it has to pull.
        assert leg.params["remote_engine_id"] == decode.engine_id
        assert leg.params["remote_num_tokens"] >= 8

    async def test_a_verdict_other_than_read_fails_the_pair_and_is_told(
        self, tmp_path: Path, decode: ScriptedEngine
    ) -> None:
        prefill = ScriptedEngine("prefill-0", Role.PREFILL, verdict="foreign_engine")
        directory = tmp_path / "foreign"
        directory.mkdir()
        async with scripted(directory, prefill, decode, kvTransfer=KVLOOP, canary={"enabled": True}) as router:
            pair = await until_only_pair_is(router, "failed")

        assert "foreign_engine" in json.dumps(pair)
