"""Conversations through the router on real engines: what the router claims, the engines' own counters bear out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.handle import to_ranges
from kvloop_connector.settings import Connector
from kvloop_router.kept import HandleStore
from tests.contract.legs import ANSWER_TOKENS, BLOCK, SAMPLING, Legs, Messages, fresh_salt, holds_nothing, tokenize
from tests.harness.engines import Engine, Engines, Kind, wait_until
from tests.harness.fixtures import REAL_ENGINES
from tests.harness.metrics import EngineMetrics
from tests.integration.router_process import Got, RouterUnderTest, chat_body, routing, until

pytestmark = [*REAL_ENGINES]

VLLM_0_32 = {"promptTokenIds": True, "streamHandles": True, "multiGroupReuse": True}
WORK = " ".join(["The agent reads the ticket, looks at the code and runs the tests."] * 12)
OTHER = " ".join(["Nobody knew where the river went after the last mill of the old town."] * 20)
LOOKING: dict[str, Any] = {"everyNthWarmTurn": 1, "leastToleranceNats": 0.01}
"""In float32 nothing is off by as much, and the tiny model finds many tokens nearly as likely as one another."""

MORE = " ".join(["Now look at the second file and say what it does."] * 3)


@pytest.fixture(params=[pytest.param(Kind.VLLM, marks=pytest.mark.stock), Kind.VLLM_KVLOOP])
def engines(request: pytest.FixtureRequest) -> Engines:
    """The shared engines of both connectors."""
    found = request.getfixturevalue(f"{request.param.replace('-', '_')}_engines")
    assert isinstance(found, Engines)
    return found


@dataclass(slots=True)
class Conversation:
    """One conversation through a router, and what its prefill engines count meanwhile."""

    router: RouterUnderTest
    engines: Engines
    prefills: Sequence[Engine]
    decode: Engine
    name: str
    contents: list[str]

    @property
    def prompt(self) -> str:
        """A first message that no other conversation has, so that no cache knows it."""
        return f"{self.name}: {WORK}"

    async def turn(self, user: str, **fields: Any) -> tuple[Got, EngineMetrics]:
        """The answer to the next turn, and what prefill counted for it."""
        self.contents.append(user)
        before = await self.counted()
        got = await self.router.chat(*self.contents, **{**SAMPLING, "conversation_id": self.name, **fields})
        assert got.status == 200, got.text
        self.contents.append(got.content)
        after = await self.counted()
        return got, after - before

    async def settled(self) -> None:
        """Until nothing is computed anew any more."""
        assert self.router.router is not None
        await self.router.router.background.idle()

    async def samples(self) -> dict[str, int]:
        """What came of the turns that were looked at, and how often."""
        lines = (await self.router.get("/metrics")).text.splitlines()
        found = [line.split('"') for line in lines if line.startswith("kvloop_router_truth_samples_total{")]
        return {outcome: int(float(rest.split()[1])) for _, outcome, rest in found}

    async def move_to(self, prefill: Engine) -> None:
        """Let the router have this prefill engine only."""
        self.prefills = [prefill]
        self.router.list_engines(entries(self.engines, prefill, self.decode))

        def seen() -> set[str]:
            assert self.router.router is not None
            return {engine.spec.name for engine in self.router.router.engines if engine.healthy}

        await until(lambda: seen() == {prefill.name, self.decode.name})

    async def counted(self) -> EngineMetrics:
        first, *others = [await asyncio.to_thread(engine.metrics) for engine in self.prefills]
        for other in others:
            first = first + other
        return first

    async def prompt_tokens(self) -> int:
        """Tokens of the latest turn's prompt."""
        return len(await asyncio.to_thread(tokenize, self.decode, self.messages))

    @property
    def messages(self) -> Messages:
        return list(chat_body(*self.contents[:-1])["messages"])

    async def cold_text(self) -> str:
        """What engines that reuse nothing answer to the latest turn, asked past the router."""
        legs = Legs()
        answer = await asyncio.to_thread(legs.cold, self.prefills[0], self.decode, self.messages)
        for handle, prefill, _ in list(legs.issued.values()):
            await asyncio.to_thread(legs.release, prefill, handle)
        return answer.text


@asynccontextmanager
async def conversing(
    directory: Path, engines: Engines, *, prefills: Sequence[Engine], decode: Engine, **changes: Any
) -> AsyncIterator[Conversation]:
    """A conversation through a router of its own over some of the engines; in the end nothing is left of it."""
    async with routing(
        directory,
        entries(engines, *prefills, decode),
        **{"engine": VLLM_0_32, "kvTransfer": transfer(engines), **changes},
    ) as router:
        conversation = Conversation(router, engines, prefills, decode, f"conversation-{fresh_salt()}", [])
        try:
            yield conversation
        finally:
            async with router.session.delete(f"{router.url}/kvloop/v1/conversations/{conversation.name}") as ended:
                assert ended.status == 200
        assert await asyncio.to_thread(wait_until, lambda: holds_nothing(decode))


def transfer(engines: Engines) -> dict[str, Any]:
    """What the router is told of the engines' settings."""
    connector = Connector.KVLOOP if engines.kind.verifies else Connector.NIXL
    return {"connector": connector.value, "kvRecomputeThreshold": 64}


def entries(engines: Engines, *wanted: Engine) -> list[dict[str, str]]:
    names = {engine.name for engine in wanted}
    return [entry for entry in engines.as_discovery_file() if entry["name"] in names]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_each_turn_claims_what_the_engines_counted_and_answers_as_a_cold_one(
    engines: Engines, tmp_path: Path, stream: bool
) -> None:
    async with conversing(tmp_path, engines, prefills=[engines.prefill[0]], decode=engines.decode[0]) as talk:
        retained = 0
        for number, user in enumerate([talk.prompt, MORE, MORE, "And the last?"]):
            if number:
                # The one of the turn before has nearly all of it in its own cache.
                await talk.move_to(engines.prefill[number % 2])
            got, counted = await talk.turn(user, stream=stream)

            assert (got.path, got.reason) == (("warm", "") if number else ("cold", "miss"))
            assert got.reused == counted.external_hits + (counted.local_hits if number else 0)
            assert got.reused >= 0.9 * retained
            assert counted.reads == (1 if counted.external_hits else 0)
            assert got.content == await talk.cold_text()
            assert "kv_transfer_params" not in got.text
            assert "token_ids" not in got.text
            retained = await talk.prompt_tokens() + ANSWER_TOKENS


async def test_other_prefill_engine_pulls_all_that_is_claimed(engines: Engines, tmp_path: Path) -> None:
    decode = engines.decode[0]
    first, second = engines.prefill
    async with conversing(tmp_path, engines, prefills=[first], decode=decode) as talk:
        await talk.turn(talk.prompt)
        await talk.move_to(second)

        got, counted = await talk.turn(MORE)

        assert got.path == "warm"
        assert got.headers["X-Kvloop-Prefill"] == second.name
        assert got.reused == counted.external_hits > 0
        assert counted.local_hits == 0
        assert got.content == await talk.cold_text()


async def test_edited_history_reuses_what_is_common_and_is_answered_right(engines: Engines, tmp_path: Path) -> None:
    first, second = engines.prefill
    async with conversing(tmp_path, engines, prefills=[first], decode=engines.decode[0]) as talk:
        await talk.turn(talk.prompt)
        before_the_edit = await talk.prompt_tokens()
        await talk.turn(MORE)
        retained = await talk.prompt_tokens() + ANSWER_TOKENS
        talk.contents[2] = MORE.replace("second", "third")
        await talk.move_to(second)

        got, counted = await talk.turn(MORE)

        assert got.path == "warm"
        assert before_the_edit // BLOCK * BLOCK <= got.reused < retained - BLOCK
        assert (got.reused, counted.local_hits) == (counted.external_hits, 0)
        assert got.reused % BLOCK == 0
        assert got.content == await talk.cold_text()


async def test_handle_past_its_time_is_not_used(engines: Engines, tmp_path: Path) -> None:
    async with conversing(tmp_path, engines, prefills=[engines.prefill[0]], decode=engines.decode[1]) as talk:
        await talk.turn(talk.prompt)
        talk.router.clock.ahead = 451.0

        got, counted = await talk.turn(MORE)

        assert (got.path, got.reason, got.reused) == ("cold", "expired", 0)
        assert counted.external_hits == 0
        assert got.content == await talk.cold_text()


async def test_read_that_the_engine_declines_is_made_good_by_a_cold_leg(engines: Engines, tmp_path: Path) -> None:
    forgetful = engines.decode[1]
    first, second = engines.prefill
    async with conversing(tmp_path, engines, prefills=[first], decode=forgetful) as talk:
        await talk.turn(talk.prompt)
        # The router believes in 450 s; this engine forgets after 8.
        assert await asyncio.to_thread(wait_until, lambda: holds_nothing(forgetful), seconds=60)
        await talk.move_to(second)

        got, counted = await talk.turn(MORE)

        assert got.path == "cold"
        assert got.reused == 0
        if engines.kind.verifies:
            # It is refused before anything is read, and its leg is the cold one.
            assert (got.reason, counted.expired) == ("expired", 0)
        else:
            assert counted.expired >= 1
        assert counted.computed >= await talk.prompt_tokens()
        assert got.content == await talk.cold_text()


async def test_honest_reuse_is_looked_at_and_agrees(engines: Engines, tmp_path: Path) -> None:
    async with conversing(
        tmp_path, engines, prefills=[engines.prefill[0]], decode=engines.decode[0], truthSampling=LOOKING
    ) as talk:
        for number, user in enumerate([talk.prompt, MORE, MORE, "And the last?"]):
            # Long enough for a pull: what prefill computed itself is in its own cache.
            got, counted = await talk.turn(user, max_tokens=80)
            await talk.settled()
            assert (got.path, counted.reads) == (("warm", 1) if number else ("cold", 0))

        assert await talk.samples() == {"calibrated": 1, "agrees": 2}
        # What was computed anew retains nothing.
        assert await asyncio.to_thread(wait_until, lambda: holds_nothing(engines.prefill[0]))


@pytest.mark.stock
async def test_wrong_reuse_of_stock_engines_is_found_and_stops(vllm_engines: Engines, tmp_path: Path) -> None:
    engines, decode = vllm_engines, vllm_engines.decode[0]
    first, second = engines.prefill
    async with conversing(tmp_path, engines, prefills=[first], decode=decode, truthSampling=LOOKING) as talk:
        router = talk.router.router
        assert router is not None
        honest, longer = (
            Conversation(talk.router, engines, [first], decode, f"conversation-{fresh_salt()}", []) for _ in range(2)
        )
        await talk.turn(talk.prompt)
        await honest.turn(honest.prompt)
        await longer.turn(f"{longer.name}: {OTHER}")
        await talk.move_to(second)
        honest.prefills = [second]
        got, _ = await honest.turn(MORE)
        await talk.settled()
        assert (got.path, await talk.samples()) == ("warm", {"calibrated": 1})

        await read_blocks_of(router.store, reader=talk.name, read=longer.name)
        wrong, counted = await talk.turn(MORE)
        await talk.settled()

        assert (wrong.path, counted.reads) == ("warm", 1)
        assert await talk.samples() == {"calibrated": 1, "mismatch": 1}
        verdicts = [report.verdict.value for report in router.pairs.reports()]
        assert verdicts == ["wrong"]

        talk.contents[-1] = await talk.cold_text()
        assert talk.contents[-1] != wrong.content
        got, counted = await talk.turn("And the last?")
        assert (got.path, counted.reads) == ("cold", 0)
        assert got.content == await talk.cold_text()


async def read_blocks_of(store: HandleStore, *, reader: str, read: str) -> None:
    """Have the handle of one conversation name the blocks of another."""
    kept = {each.conversation: each for each in await store.due(inf)}
    own, others = kept[reader].handle.block_ids[0], kept[read].handle.block_ids[0]
    assert await store.withdraw(kept[reader].ident)
    await store.put(replace(kept[reader], blocks=(to_ranges(others[: len(own)]),)))


async def test_canary_sees_kv_move_both_ways_between_each_pair(engines: Engines, tmp_path: Path) -> None:
    decode = engines.decode[0]
    async with routing(
        tmp_path,
        entries(engines, *engines.prefill, decode),
        engine=VLLM_0_32,
        kvTransfer=transfer(engines),
        canary={"enabled": True},
    ) as router:
        assert router.router is not None
        pairs = router.router.pairs
        await until(lambda: [report.verdict.value for report in pairs.reports()] == ["verified"] * 2, seconds=120)

        # What the canary's second turn left is released too.
        assert await asyncio.to_thread(wait_until, lambda: holds_nothing(decode))


async def test_a_local_turn_is_answered_as_a_cold_one_and_the_next_is_warm(engines: Engines, tmp_path: Path) -> None:
    decode = engines.decode[0]
    changes: dict[str, Any] = {"prefills": [engines.prefill[0]], "decode": decode, "pathChoice": {"mode": "Local"}}
    async with conversing(tmp_path, engines, **changes) as talk:
        await talk.turn(talk.prompt)
        before = await asyncio.to_thread(decode.metrics)
        got, counted = await talk.turn(MORE)
        alone = await asyncio.to_thread(decode.metrics) - before

        assert (got.path, got.reason) == ("local", "cheaper")
        assert (counted.reads, alone.external_hits) == (0, 0)
        assert alone.local_hits >= got.reused
        assert alone.local_hits > 0
        assert got.content == await talk.cold_text()
        report = await talk.router.admin(f"/admin/v1/turns/{got.headers['X-Request-Id']}")
        assert report["no_handle"] == ("" if engines.kind.verifies else "local")

        assert talk.router.router is not None
        known = talk.router.router.engines.get(decode.name)
        assert known is not None
        known.prefix_caching = False
        after, counted = await talk.turn(MORE)
        assert after.path == "warm"
        assert after.content == await talk.cold_text()
