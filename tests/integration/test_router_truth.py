"""Warm turns that are computed anew beside: a pair that reuses wrong KV is found, an honest one is left alone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.settings import Role
from tests.harness.engines import Engine, Engines, Kind, start
from tests.integration.router_process import Got, RouterUnderTest, routing, scripted, until
from tests.integration.scripted_engine import ANSWER, Asked, ScriptedEngine, fails, good, waits
from tests.integration.simulated import order, spec, state

LONG = "a question that is long enough to be worth a pull"
LIKELY = {f"token_id:{number}": -1.0 - number for number in range(10)}
OTHER = {f"token_id:{number}": -1.0 - number for number in range(100, 110)}
KVLOOP: dict[str, Any] = {"connector": "KvloopConnector", "kvRecomputeThreshold": 8}
ALWAYS = {"everyNthWarmTurn": 1}
SAMPLES = "kvloop_router_truth_samples_total"


async def samples(router: RouterUnderTest, outcome: str) -> float:
    return await router.metric(f'{SAMPLES}{{outcome="{outcome}"}}')


async def settled(router: RouterUnderTest) -> None:
    """Until nothing is computed anew any more."""
    assert router.router is not None
    await router.router.background.idle()


class Talk:
    """One conversation, turn by turn; after each of them what is computed anew has ended."""

    def __init__(self, router: RouterUnderTest, first: str = LONG, **fields: Any) -> None:
        self.router = router
        self.contents = [first]
        self.fields = fields

    async def turn(self) -> Got:
        got = await self.router.chat(*self.contents, **self.fields)
        assert got.status == 200, got.text
        await settled(self.router)
        self.contents += [got.content, "and more of the same, please, at some length"]
        return got


class TestScripted:
    """What is asked of engines, and what is made of their answers."""

    @pytest.fixture(params=["NixlConnector", "KvloopConnector"])
    def prefill(self, request: pytest.FixtureRequest) -> ScriptedEngine:
        verdict = "read" if request.param == "KvloopConnector" else ""
        return ScriptedEngine("prefill-0", Role.PREFILL, verdict=verdict, likely=[LIKELY])

    @pytest.fixture
    async def router(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> AsyncIterator[RouterUnderTest]:
        changes = {"kvTransfer": KVLOOP} if prefill.verdict else {}
        async with scripted(tmp_path, prefill, decode, truthSampling=ALWAYS, **changes) as under_test:
            yield under_test

    def anew(self, prefill: ScriptedEngine) -> list[Asked]:
        return [asked for asked in prefill.legs if asked.headers["X-Request-Id"].startswith("truth-")]

    async def test_first_warm_turn_is_for_the_noise_and_the_next_is_compared(
        self, router: RouterUnderTest, prefill: ScriptedEngine
    ) -> None:
        talk = Talk(router)
        cold, first, second = await talk.turn(), await talk.turn(), await talk.turn()

        assert [got.path for got in (cold, first, second)] == ["cold", "warm", "warm"]
        assert (await samples(router, "calibrated"), await samples(router, "agrees")) == (1, 1)
        assert len(self.anew(prefill)) == 4
        legs = [asked for asked in prefill.legs if asked not in self.anew(prefill)]
        # No client's leg is the first to ask.
        assert ["logprobs" in leg.body for leg in legs] == [False, False, True]

    async def test_what_is_computed_anew_is_the_same_prompt_with_nothing_to_reuse_and_nothing_to_retain(
        self, router: RouterUnderTest, prefill: ScriptedEngine
    ) -> None:
        talk = Talk(router, temperature=0.3, logit_bias={"7": 1}, max_completion_tokens=50, stream=True)
        await talk.turn()
        await talk.turn()

        leg = prefill.legs[1].body
        one, other = (asked.body for asked in self.anew(prefill))
        assert one == other
        assert one["messages"] == leg["messages"]
        assert one.get("kv_transfer_params", {}).get("prompt_token_ids") == leg["kv_transfer_params"].get(
            "prompt_token_ids"
        )
        assert set(one.get("kv_transfer_params", {})) <= {"prompt_token_ids"}
        assert one["cache_salt"] != leg["cache_salt"]
        assert (one["max_tokens"], one["stream"], one["temperature"], one["logit_bias"]) == (1, False, 0.3, {"7": 1})
        assert (one["logprobs"], one["top_logprobs"], one["return_tokens_as_token_ids"]) == (True, 20, True)

    async def test_client_sees_no_difference(self, router: RouterUnderTest, prefill: ScriptedEngine) -> None:
        talk = Talk(router)
        got = [await talk.turn() for _ in range(3)]

        assert await samples(router, "agrees") == 1
        assert [set(each.json["choices"][0]) for each in got] == [set(got[0].json["choices"][0])] * 3

    async def test_wrong_reuse_stops_reuse_between_the_two_and_is_told(
        self, router: RouterUnderTest, prefill: ScriptedEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        talk = Talk(router)
        prefill.likely = [LIKELY, LIKELY, OTHER, LIKELY]
        with caplog.at_level(logging.INFO):
            warm = [await talk.turn() for _ in range(3)][-1]
            after = [await talk.turn() for _ in range(2)]

        assert await samples(router, "mismatch") == 1
        assert warm.path == "warm"
        assert [got.path for got in after] == ["cold", "cold"]
        # The turn that was found wrong may have left a handle by then.
        assert (after[0].reason in ("evicted", "no_handle"), after[1].reason) == (True, "pair_failed")
        assert prefill.legs[-1].body["cache_salt"] != prefill.legs[0].body["cache_salt"]
        (pair,) = (await router.admin("/admin/v1/pairs"))["pairs"]
        assert pair["verdict"] == "wrong"
        assert "nats" in pair["detail"]
        assert await router.metric('kvloop_router_pair_verified{decode="decode-0",prefill="prefill-0"}') == -2
        (line,) = [record for record in caplog.records if record.message == "wrong reuse"]
        assert (line.levelname, vars(line)["prefill"], vars(line)["decode"]) == ("ERROR", "prefill-0", "decode-0")
        assert LONG not in json.dumps([vars(record) for record in caplog.records], default=str)

    async def test_wrong_reuse_is_over_with_either_process(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        talk = Talk(router)
        prefill.likely = [LIKELY, LIKELY, OTHER, LIKELY]
        for _ in range(3):
            await talk.turn()
        decode.restart()
        router.list_engines([prefill.entry(), decode.entry()])
        assert router.router is not None
        pairs = router.router.pairs
        await until(lambda: [report.verdict.value for report in pairs.reports()] == ["unknown"])
        engines = router.router.engines
        await until(lambda: engines.present(decode.pod_uid))

        got = [(await talk.turn()).path for _ in range(2)]

        assert got == ["cold", "warm"]

    async def test_engine_that_gives_no_logprobs_is_asked_once_and_no_client_hears_of_it(
        self, router: RouterUnderTest, prefill: ScriptedEngine
    ) -> None:
        talk = Talk(router)
        await talk.turn()
        prefill.script = [good, fails(400, "Requested sample logprobs of 20")]
        got = [await talk.turn() for _ in range(4)]

        assert [each.path for each in got] == ["warm"] * 4
        assert await samples(router, "refused") == 1
        assert len(self.anew(prefill)) == 1
        assert [leg for leg in prefill.legs if "logprobs" in leg.body] == self.anew(prefill)

    @pytest.mark.parametrize("answer", ["without", "status 500"])
    async def test_answer_of_no_use_changes_nothing(
        self, router: RouterUnderTest, prefill: ScriptedEngine, answer: str
    ) -> None:
        talk = Talk(router)
        await talk.turn()
        if answer == "without":
            prefill.likely = []
        else:
            prefill.script = [good, fails(500)]
        await talk.turn()
        prefill.likely = [LIKELY]
        got = await talk.turn()

        assert (got.path, got.status) == ("warm", 200)
        assert (await samples(router, "failed"), await samples(router, "calibrated")) == (1, 1)

    async def test_one_at_a_time_is_computed_anew(self, router: RouterUnderTest, prefill: ScriptedEngine) -> None:
        goes_on = asyncio.Event()
        talk = Talk(router)
        await talk.turn()
        prefill.script = [good, waits(goes_on)]
        await router.chat(*talk.contents)
        await prefill.arrived.wait()
        other = Talk(router, "another " + LONG)
        other_turns = [await router.chat(*other.contents)]
        other.contents += [ANSWER, "and more of the same, please, at some length"]
        other_turns.append(await router.chat(*other.contents))
        assert len(self.anew(prefill)) == 1
        goes_on.set()
        await settled(router)

        assert [got.path for got in other_turns] == ["cold", "warm"]
        assert len(self.anew(prefill)) == 2

    async def test_engine_with_other_work_is_left_alone_until_it_has_none(
        self, router: RouterUnderTest, prefill: ScriptedEngine
    ) -> None:
        goes_on = asyncio.Event()
        talk = Talk(router)
        await talk.turn()
        prefill.script = [waits(goes_on)]
        async with asyncio.TaskGroup() as group:
            group.create_task(router.chat("something else that takes its time"))
            await prefill.arrived.wait()
            assert (await router.chat(*talk.contents)).path == "warm"
            assert await samples(router, "busy") == 1
            assert self.anew(prefill) == []
            goes_on.set()
        talk.contents += [ANSWER, "and more of the same, please, at some length"]
        await talk.turn()

        assert await samples(router, "calibrated") == 1

    async def test_router_that_is_to_end_begins_none_and_leaves_none(
        self, router: RouterUnderTest, prefill: ScriptedEngine
    ) -> None:
        goes_on = asyncio.Event()
        talk = Talk(router)
        await talk.turn()
        prefill.script = [good, waits(goes_on)]
        await router.chat(*talk.contents)
        await prefill.arrived.wait()
        assert router.router is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(router.router.drained())
            await asyncio.sleep(0)
            goes_on.set()

        assert len(self.anew(prefill)) == 1
        assert router.router.background.working == 0


WORK = "read the ticket, look at the code, run the tests and say what they tell you. " * 12


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines whose log-probabilities are never the same twice; the second prefill engine has no prefix cache."""
    noisy = ("--sim-logprob-noise", "0.1")
    prefills = [spec(Role.PREFILL, *noisy, prefix_caching=caching) for caching in (True, False)]
    with start(Kind.SIM, tmp_path_factory.mktemp("engines"), [*prefills, spec(Role.DECODE, *noisy)]) as started:
        yield started


class TestSimulated:
    """Engines that know what text each block holds."""

    @asynccontextmanager
    async def over(self, directory: Path, engines: Engines, prefill: Engine) -> AsyncIterator[RouterUnderTest]:
        names = {prefill.name, engines.decode[0].name}
        entries = [entry for entry in engines.as_discovery_file() if entry["name"] in names]
        async with routing(directory, entries, truthSampling=ALWAYS) as router:
            yield router

    @pytest.mark.parametrize("index", [0, 1], ids=["prefix cache", "no prefix cache"])
    async def test_honest_pair_never_trips(self, engines: Engines, tmp_path: Path, index: int) -> None:
        async with self.over(tmp_path, engines, engines.prefill[index]) as router:
            for number in range(8):
                talk = Talk(router, f"honest {index} {number} {WORK}", max_tokens=80, ignore_eos=True)
                for turn in range(7):
                    got = await talk.turn()
                    assert got.path == ("warm" if turn else "cold")

            assert await samples(router, "calibrated") == 1
            assert await samples(router, "agrees") == 8 * 6 - 1
            (pair,) = (await router.admin("/admin/v1/pairs"))["pairs"]
            assert pair["verdict"] == "unknown"

        # Nothing is retained for what was computed anew, and nothing runs.
        seen = await asyncio.to_thread(state, engines.prefill[index])
        assert [record for record in seen["retained"] if record["state"] == "leaked"] == []

    @pytest.mark.parametrize("index", [0, 1], ids=["prefix cache", "no prefix cache"])
    async def test_pair_that_reads_something_else_is_found_and_its_turns_are_right_again(
        self, engines: Engines, tmp_path: Path, index: int
    ) -> None:
        (decode,) = engines.decode
        async with self.over(tmp_path, engines, engines.prefill[index]) as router:
            talk = Talk(router, f"corrupted {index} {WORK}", max_tokens=80, ignore_eos=True)
            await talk.turn()
            await talk.turn()
            await asyncio.to_thread(order, decode, corrupt_reads=1)
            assert (await talk.turn()).path == "warm"
            assert await samples(router, "mismatch") == 1

            # Neither the handle of that turn nor what it left in prefix caches is used.
            right = await router.chat(*talk.contents, max_tokens=80, ignore_eos=True, cache_salt="nobody else's")
            got = [await talk.turn() for _ in range(2)]

            assert [each.path for each in got] == ["cold", "cold"]
            assert got[1].reason == "pair_failed"
            assert got[0].content == right.content
            (pair,) = (await router.admin("/admin/v1/pairs"))["pairs"]
            assert pair["verdict"] == "wrong"
