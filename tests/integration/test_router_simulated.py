"""Conversations through the router on simulated engines, which know what text each block holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.settings import KVTransferSettings, Role
from kvloop_router import background, proof
from tests.harness.engines import Engine, Engines, EngineSpec, Kind, start
from tests.harness.metrics import EngineMetrics
from tests.integration.router_process import Got, RouterUnderTest, routing, until
from tests.integration.simulated import advance, order, spec

BLOCK = 32
THRESHOLD = 64
WORK = "read the ticket, look at the code, run the tests and say what they tell you. " * 12
MORE = "now look at the second file and say what it does, at some length. " * 8
SAMPLING = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    specs = [spec(Role.PREFILL), spec(Role.PREFILL), spec(Role.DECODE)]
    with start(Kind.SIM, tmp_path_factory.mktemp("engines"), specs) as started:
        yield started


@asynccontextmanager
async def over(
    directory: Path, engines: Engines, prefills: Sequence[Engine], **changes: Any
) -> AsyncIterator[RouterUnderTest]:
    """A router over these prefill engines and all decode engines."""
    async with routing(directory, entries(engines, prefills), **changes) as router:
        yield router


def entries(engines: Engines, prefills: Sequence[Engine]) -> list[dict[str, str]]:
    names = {engine.name for engine in (*prefills, *engines.decode)}
    return [entry for entry in engines.as_discovery_file() if entry["name"] in names]


async def say(router: RouterUnderTest, *contents: str, **fields: Any) -> Got:
    got = await router.chat(*contents, **{**SAMPLING, **fields})
    assert got.status == 200, got.text
    return got


async def cold_text(router: RouterUnderTest, *contents: str) -> str:
    """What the model answers where nothing can be reused: under a salt that nobody else has."""
    return (await say(router, *contents, cache_salt=f"cold {len(contents)} {hash(contents)}")).content


async def counted(engine: Engine) -> EngineMetrics:
    return await asyncio.to_thread(engine.metrics)


async def holds_nothing(engine: Engine) -> None:
    async with asyncio.timeout(20):
        while (await counted(engine)).kv_usage > 0:  # noqa: ASYNC110  a counter is read over HTTP
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_each_turn_claims_what_prefill_counted_and_answers_as_a_cold_one(
    engines: Engines, tmp_path: Path, streamed: bool, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:
        # What is done in parts for prompts that would take a test too long.
        monkeypatch.setattr(background, "_LONG_BYTES", 1)
        monkeypatch.setattr(proof, "_LONG_TOKENS", 1)
        monkeypatch.setattr(proof, "_BLOCKS_AT_ONCE", 2)
    prefill = engines.prefill[0]
    async with over(tmp_path, engines, [prefill]) as router:
        contents = [f"{streamed} {long} {WORK}"]
        for number in range(4):
            before = await counted(prefill)
            got = await say(router, *contents, stream=streamed)
            after = await counted(prefill) - before

            assert got.path == ("warm" if number else "cold")
            assert got.reused == (after.external_hits + after.local_hits if number else 0)
            assert got.content == await cold_text(router, *contents)
            contents += [got.content, f"{number} {MORE}"]


async def test_a_prefill_engine_that_never_saw_the_conversation_pulls_all_that_is_claimed(
    engines: Engines, tmp_path: Path
) -> None:
    first, second = engines.prefill
    async with over(tmp_path, engines, [first]) as router:
        answer = (await say(router, "elsewhere " + WORK)).content
        router.list_engines(entries(engines, [second]))
        assert router.router is not None
        pool = router.router.engines
        await until(lambda: pool.get(first.name) is None and pool.present(second.pod_uid))
        before = await counted(second)
        got = await say(router, "elsewhere " + WORK, answer, MORE)
        after = await counted(second) - before

        assert got.path == "warm"
        assert got.headers["X-Kvloop-Prefill"] == second.name
        assert got.reused == after.external_hits > 0
        assert after.local_hits == 0


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(
            lambda contents: [contents[0].replace("code", "mood", 1), *contents[1:]], id="in the first message"
        ),
        pytest.param(lambda contents: [contents[0], "I said no such thing.", contents[2]], id="of the answer"),
        pytest.param(lambda contents: [contents[0], contents[1], "something else"], id="of the last message"),
        pytest.param(lambda contents: [contents[0], contents[1][:5], contents[2]], id="of the answer, cut short"),
        pytest.param(lambda contents: [contents[0]], id="that takes everything back"),
        pytest.param(lambda contents: [contents[0][: len(contents[0]) // 2]], id="that cuts the first message"),
    ],
)
async def test_an_edited_history_gets_the_right_answer(engines: Engines, tmp_path: Path, edit: Any) -> None:
    async with over(tmp_path, engines, engines.prefill) as router:
        first = f"{edit} {WORK}"
        contents = [first, (await say(router, first, conversation_id="c")).content, MORE]
        await say(router, *contents, conversation_id="c")

        edited = edit(contents)
        got = await say(router, *edited, conversation_id="c")

        assert got.content == await cold_text(router, *edited)
        assert got.reused % BLOCK == 0
        assert (got.path == "warm") == (got.reused >= THRESHOLD)


async def test_of_racing_turns_one_is_warm_and_all_are_right(engines: Engines, tmp_path: Path) -> None:
    async with over(tmp_path, engines, engines.prefill) as router:
        first = "racing " + WORK
        answer = (await say(router, first)).content
        variants = [[first, answer, f"variant {index}"] for index in range(4)]
        turns = await asyncio.gather(*(say(router, *contents) for contents in variants))

        assert sorted(turn.path for turn in turns) == ["cold", "cold", "cold", "warm"]
        for contents, turn in zip(variants, turns, strict=True):
            assert turn.content == await cold_text(router, *contents)


async def test_nothing_is_left_at_decode_when_conversations_have_ended(engines: Engines, tmp_path: Path) -> None:
    (decode,) = engines.decode
    async with over(tmp_path, engines, engines.prefill) as router:
        for index in range(4):
            first = f"ended {index} {WORK}"
            answer = (await say(router, first, conversation_id=f"e{index}")).content
            await say(router, first, answer, MORE, conversation_id=f"e{index}", stream=bool(index % 2))
        assert (await counted(decode)).kv_usage > 0

        for index in range(4):
            async with router.session.delete(f"{router.url}/kvloop/v1/conversations/e{index}") as response:
                assert (await response.json())["released"] == 1

        await holds_nothing(decode)


async def test_a_canary_sees_kv_move_both_ways_and_leaves_nothing(engines: Engines, tmp_path: Path) -> None:
    async with over(tmp_path, engines, engines.prefill, canary={"enabled": True}) as router:
        assert router.router is not None
        pairs, releases = router.router.pairs, router.router.releases
        await until(lambda: [report.verdict for report in pairs.reports()] == ["verified"] * 2, seconds=60)
        told = (await router.admin("/admin/v1/pairs"))["pairs"]
        await until(lambda: len(releases) == 0)

    assert all(pair["toDecodeBytes"] > 0 and pair["toPrefillBytes"] > 0 for pair in told)
    assert [pair["streams"] for pair in told] == [True, True]


async def test_a_canary_tells_how_long_transfers_took_and_is_content_with_one_direction(tmp_path: Path) -> None:
    settings = KVTransferSettings(bidirectional_kv_xfer=False)
    specs = [EngineSpec(role=role, settings=settings) for role in Role]
    with start(Kind.SIM, tmp_path / "engines", specs) as engines:
        off = {"bidirectionalKvXfer": False}
        async with over(tmp_path, engines, engines.prefill, canary={"enabled": True}, kvTransfer=off) as router:
            assert router.router is not None
            pairs = router.router.pairs
            await until(lambda: [report.verdict for report in pairs.reports()] == ["verified"], seconds=60)
            (pair,) = (await router.admin("/admin/v1/pairs"))["pairs"]

        await holds_nothing(engines.decode[0])
    assert pair["toDecodeBytes"] > 0
    assert pair["toDecodeSeconds"] > 0
    assert (pair["toPrefillBytes"], pair["toPrefillSeconds"]) == (0, 0)


async def test_handles_that_the_engine_has_let_go_are_made_good_by_a_cold_leg(tmp_path: Path) -> None:
    specs = [spec(Role.PREFILL), spec(Role.DECODE)]
    with start(Kind.SIM, tmp_path / "engines", specs) as engines:
        (decode,) = engines.decode
        async with over(tmp_path, engines, engines.prefill) as router:
            answer = (await say(router, WORK)).content
            # The router's clock knows nothing of it.
            await asyncio.to_thread(advance, decode, 481)
            got = await say(router, WORK, answer, MORE)

            assert (got.path, got.reason, got.reused) == ("cold", "engine_failed", 0)
            assert got.content == await cold_text(router, WORK, answer, MORE)


async def test_a_conversation_goes_on_after_its_decode_engine_restarted(tmp_path: Path) -> None:
    specs = [spec(Role.PREFILL), spec(Role.DECODE)]
    with start(Kind.SIM, tmp_path / "engines", specs) as engines:
        (decode,) = engines.decode
        async with over(tmp_path, engines, engines.prefill) as router:
            answer = (await say(router, WORK)).content
            await asyncio.to_thread(decode.restart)
            router.list_engines(engines.as_discovery_file())
            assert router.router is not None
            pool = router.router.engines
            await until(lambda: pool.present(decode.pod_uid))

            got = await say(router, WORK, answer, MORE)
            following = await say(router, WORK, answer, MORE, got.content, "and now?")

            assert (got.path, got.reason) == ("cold", "engine_gone")
            assert got.content == await cold_text(router, WORK, answer, MORE)
            assert following.path == "warm"


async def test_rejected_drafts_are_never_reused(tmp_path: Path) -> None:
    """A decode engine that counts more tokens than exist, as with speculative decoding."""
    specs = [spec(Role.PREFILL), spec(Role.DECODE, "--sim-overshoot", "40")]
    with start(Kind.SIM, tmp_path / "engines", specs) as engines:
        async with over(tmp_path, engines, engines.prefill) as router:
            contents = [WORK]
            for number in range(3):
                got = await say(router, *contents)
                assert got.path == ("warm" if number else "cold")
                assert got.content == await cold_text(router, *contents)
                contents += [got.content, MORE]


async def test_conversations_that_are_never_taken_up_again_do_not_fill_the_engine(tmp_path: Path) -> None:
    """Retained blocks cannot be evicted by the engine: without a bound on them, requests would wait for the TTL."""
    specs = [spec(Role.PREFILL), spec(Role.DECODE, kv_blocks=256)]
    with start(Kind.SIM, tmp_path / "engines", specs) as engines:
        (decode,) = engines.decode
        async with over(tmp_path, engines, engines.prefill) as router:
            for index in range(30):
                await say(router, f"abandoned {index} {WORK}")
                assert (await counted(decode)).kv_usage < 0.75

        await holds_nothing(decode)


async def test_a_failed_prefill_leg_leaves_the_answer_right(engines: Engines, tmp_path: Path) -> None:
    (prefill, _) = engines.prefill
    async with over(tmp_path, engines, [prefill]) as router:
        first = "failing " + WORK
        answer = (await say(router, first)).content
        await asyncio.to_thread(order, prefill, fail_requests=1)
        got = await say(router, first, answer, MORE)

        assert got.reason == "engine_failed"
        assert got.content == await cold_text(router, first, answer, MORE)


async def test_retained_memory_is_freed_when_a_history_diverges(tmp_path: Path) -> None:
    specs = [spec(Role.PREFILL), spec(Role.DECODE)]
    with start(Kind.SIM, tmp_path / "engines", specs) as engines:
        (decode,) = engines.decode
        async with over(tmp_path, engines, engines.prefill, reuse=False) as router:
            first = await say(router, WORK, conversation_id="c")
            second = await say(router, WORK, first.content, MORE, conversation_id="c")
            assert second.reason == "off"
            async with router.session.delete(f"{router.url}/kvloop/v1/conversations/c") as response:
                assert response.status == 200

            await holds_nothing(decode)
