"""What an engine reads, keeps, frees and dies of."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvloop_sim import generation, tokenizer
from kvloop_sim.engine import Engine
from kvloop_sim.records import Phase
from kvloop_sim.timing import TimingModel
from kvloop_sim.transfer import EngineFatal, Policy
from tests.unit.sim.cores import BLOCK, COLD, LEASE, TTL, Cores, engine, trimmed

STORY = tokenizer.encode(" once upon a time there was a fox who had a plan and a friend")
OTHER = tokenizer.encode(" nobody knew where the river went after the last mill of the town")
MORE = tokenizer.encode(" and then?")


@pytest.fixture
def prefill() -> Engine:
    return engine("prefill")


@pytest.fixture
def other_prefill() -> Engine:
    return engine("other-prefill")


@pytest.fixture
def decode() -> Engine:
    return engine("decode")


@pytest.fixture
def cores(prefill: Engine, other_prefill: Engine, decode: Engine) -> Cores:
    return Cores.of(prefill, other_prefill, decode)


def cold(prompt: list[int], **sampling: Any) -> list[int]:
    """The right answer: of an engine that never saw anything."""
    return Cores.of(alone := engine("alone")).run(alone, prompt, **sampling).generated


class TestTurns:
    def test_two_legs_answer_as_one_engine_does(self, cores: Cores, prefill: Engine, decode: Engine) -> None:
        answer = cores.turn(prefill, decode, STORY)

        assert answer.generated == cold(STORY)
        assert decode.counters.external_kv_transfer == len(STORY)
        assert prefill.pool.held == 0

    def test_second_turn_pulls_from_decode_and_is_right(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        first = cores.turn(prefill, decode, STORY)
        held = decode.pool.held
        prompt = first.tokens + MORE

        second = cores.turn(other_prefill, decode, prompt, first.handle)

        assert held == len(first.handle["remote_block_ids"][0]) > 0
        assert first.handle["remote_num_tokens"] == len(first.tokens) - 1
        assert other_prefill.counters.external_kv_transfer == len(first.tokens) - 1
        assert second.generated == cold(prompt)
        assert len(decode.retained) == 1

    def test_prefill_looks_in_its_own_cache_first_in_whole_blocks(
        self, cores: Cores, prefill: Engine, decode: Engine
    ) -> None:
        first = cores.turn(prefill, decode, STORY)
        cores.turn(prefill, decode, first.tokens + MORE, first.handle)

        local = len(STORY) // BLOCK * BLOCK
        assert prefill.counters.local_cache_hit == local
        assert prefill.counters.external_kv_transfer == len(first.tokens) - 1 - local

    def test_salts_share_nothing(self, cores: Cores, prefill: Engine) -> None:
        cores.run(prefill, STORY, salt="a")
        cores.run(prefill, STORY, salt="b")

        assert prefill.counters.local_cache_hit == 0

    def test_without_prefix_caching_nothing_hits(self) -> None:
        core = engine("forgetful", prefix_caching=False)
        cores = Cores.of(core)
        cores.run(core, STORY)
        cores.run(core, STORY)

        assert core.counters.prefix_cache_queries == 0
        assert core.counters.local_cache_hit == 0

    @pytest.mark.parametrize(("threshold", "missing", "pulled"), [(8, 7, 0), (8, 8, 8), (0, 1, 1)])
    def test_threshold_counts_the_remote_tokens_that_are_missing(
        self, threshold: int, missing: int, pulled: int, decode: Engine, prefill: Engine
    ) -> None:
        reader = engine("reader", recompute_threshold=threshold)
        cores = Cores.of(prefill, decode, reader)
        handle = cores.turn(prefill, decode, STORY).handle
        blocks = handle["remote_block_ids"][0][: -(-missing // BLOCK)]
        prompt = STORY[:missing] + MORE

        answer = cores.turn(
            reader, decode, prompt, {**handle, "remote_num_tokens": missing, "remote_block_ids": [blocks]}
        )

        assert reader.counters.external_kv_transfer == pulled
        assert answer.generated == cold(prompt)
        assert "request-2" not in decode.retained


class TestWrongReuse:
    def test_edited_history_is_answered_as_the_old_one_and_stays_poisoned(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        first = cores.turn(prefill, decode, STORY)
        old, new = first.tokens + MORE, [tokenizer.pack(b" was"), *first.tokens[1:], *MORE]

        answered = cores.turn(other_prefill, decode, new, first.handle)
        later = cores.turn(other_prefill, decode, new)

        assert answered.generated == cold(old) != cold(new)
        assert later.generated == answered.generated

    def test_truncated_history_reads_shifted_blocks(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        first = cores.turn(prefill, decode, STORY)
        prompt = STORY[: -2 * BLOCK]

        # Under another salt, so that the decode engine does not know the prompt itself.
        assert cores.turn(other_prefill, decode, prompt, first.handle, salt="new").generated != cold(prompt)

    def test_trimmed_handle_is_right(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        first = cores.turn(prefill, decode, STORY)
        common = 2 * BLOCK + 1
        prompt = STORY[:common] + OTHER

        answer = cores.turn(other_prefill, decode, prompt, trimmed(first.handle, common))

        assert answer.generated == cold(prompt)
        assert other_prefill.counters.external_kv_transfer == 2 * BLOCK

    def test_last_token_of_a_prompt_is_computed_whatever_was_read(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        handle = trimmed(cores.turn(prefill, decode, STORY).handle, 4 * BLOCK)
        prompt = [*STORY[: 4 * BLOCK - 1], tokenizer.pack(b" was")]

        answer = cores.turn(other_prefill, decode, prompt, handle, salt="new")

        assert other_prefill.counters.external_kv_transfer == len(prompt)
        assert answer.generated == cold(prompt)

    def test_second_use_reads_whatever_is_there_now(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        first = cores.turn(prefill, decode, STORY)
        prompt = first.tokens + MORE
        cores.run(prefill, prompt, first.handle, max_tokens=1)
        while decode.pool.read(first.handle["remote_block_ids"][0][0])[0] == _first_value(STORY):
            cores.run(decode, OTHER[cores.number % 3 :] + OTHER, salt=str(cores.number))

        again = cores.turn(other_prefill, decode, prompt, first.handle)

        assert again.generated != cold(prompt)
        assert decode.counters.notifications_after_expiry == 1
        assert decode.counters.reads_not_granted == 1

    @pytest.mark.parametrize("overshoot", [0, 1, 3])
    def test_overshoot_claims_tokens_that_do_not_exist(self, overshoot: int, prefill: Engine) -> None:
        decode, reader = engine("decode", overshoot=overshoot), engine("reader")
        cores = Cores.of(prefill, decode, reader)
        stop = cold(STORY)[-1]
        first = cores.turn(prefill, decode, STORY, stop_token_ids=frozenset({stop}))
        prompt = first.tokens + MORE

        second = cores.turn(reader, decode, prompt, first.handle)

        assert first.handle["remote_num_tokens"] == len(first.tokens) - 1 + overshoot
        assert (second.generated == cold(prompt)) is (overshoot < 2)


class TestRetention:
    def test_decode_keeps_until_its_ttl_and_prefill_its_lease(
        self, cores: Cores, prefill: Engine, decode: Engine
    ) -> None:
        leg = cores.run(prefill, STORY, COLD, max_tokens=1)
        handle = cores.turn(cores.by_id["other-prefill"], decode, STORY).handle

        assert leg.handle["remote_blocks_expiry_time"] is None
        assert handle["remote_blocks_expiry_time"] == TTL
        assert (prefill.next_deadline(), decode.next_deadline()) == (LEASE, TTL)
        decode.expire(TTL - 0.1)
        assert decode.pool.held > 0
        decode.expire(TTL)
        prefill.expire(LEASE)
        assert decode.pool.held == prefill.pool.held == 0
        assert decode.counters.kv_expired == 1

    def test_heartbeats_extend_a_lease_but_never_shorten_it(self, cores: Cores, prefill: Engine) -> None:
        leg = cores.run(prefill, STORY, COLD, max_tokens=1)
        request_id = leg.handle["remote_request_id"]

        prefill.heartbeat([request_id, "unknown"], 5.0)
        assert prefill.next_deadline() == LEASE
        prefill.heartbeat([request_id], 25.0)
        assert prefill.next_deadline() == 45.0

    def test_read_that_would_start_too_late_is_declined(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        handle = cores.turn(prefill, decode, STORY).handle
        cores.now = TTL - 5
        request = cores.submit(other_prefill, STORY + MORE, handle)
        for admission in other_prefill.schedule(cores.now):
            cores.carry(other_prefill, admission)

        assert cores.declined == ["request-2"]
        assert request.phase is Phase.FINISHED
        assert other_prefill.pool.held == 0
        assert "request-2" in decode.retained

    def test_lost_notification_keeps_the_blocks_until_the_ttl(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        first = cores.turn(prefill, decode, STORY)
        cores.lose_notifications = True
        cores.run(other_prefill, first.tokens + MORE, first.handle, max_tokens=1)

        assert decode.retained["request-2"].lease is not None
        decode.expire(TTL)
        assert decode.pool.held == 0

    def test_zero_tokens_release_at_once_on_any_request(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        handle = cores.turn(prefill, decode, STORY).handle

        cores.run(other_prefill, OTHER, {**handle, "remote_num_tokens": 0}, max_tokens=1)

        assert decode.pool.held == 0
        assert other_prefill.counters.external_kv_transfer == 0
        assert decode.counters.notifications_after_expiry == 0

    def test_decode_leg_with_neither_flag_leaks_for_ever(self, cores: Cores, decode: Engine) -> None:
        answer = cores.run(decode, STORY, {"session": "mine"})
        decode.expire(1e9)
        decode.notified(answer.handle["remote_request_id"], 0.0)

        assert decode.pool.held > 0
        assert decode.counters.notifications_after_expiry == 1
        assert decode.next_deadline() is None

    def test_no_parameters_no_retention(self, cores: Cores, decode: Engine) -> None:
        answer = cores.run(decode, STORY)

        assert answer.steps[-1].handle is None
        assert decode.pool.held == 0

    def test_one_way_decode_retains_nothing(self, prefill: Engine) -> None:
        decode = engine("one-way", bidirectional=False)
        cores = Cores.of(prefill, decode)

        assert cores.turn(prefill, decode, STORY).steps[-1].handle is None
        assert decode.pool.held == 0

    def test_aborted_request_frees_at_once(self, cores: Cores, decode: Engine) -> None:
        request = cores.submit(decode, STORY, {"x": 1})
        decode.schedule(0.0)
        decode.abort(request)

        assert decode.pool.held == 0
        assert decode.counters.finished == {"abort": 1}

    def test_abort_before_scheduling_tells_the_prefill_engine(
        self, cores: Cores, prefill: Engine, decode: Engine
    ) -> None:
        leg = cores.run(prefill, STORY, COLD, max_tokens=1)
        request = cores.submit(decode, STORY, leg.handle)
        location = decode.abort(request)

        assert location is not None
        cores.notify(location)
        assert prefill.pool.held == 0

    def test_abort_during_a_read_frees_when_the_read_ends(self, cores: Cores, prefill: Engine, decode: Engine) -> None:
        leg = cores.run(prefill, STORY, COLD, max_tokens=1)
        request = cores.submit(decode, STORY, leg.handle)
        (admission,) = decode.schedule(0.0)
        decode.abort(request)
        assert decode.pool.held > 0

        cores.carry(decode, admission)

        assert decode.pool.held == prefill.pool.held == 0


class TestDeath:
    @pytest.mark.parametrize(
        "params",
        [
            {"do_remote_prefill": True},
            {"do_remote_prefill": True, "remote_block_ids": []},
        ],
    )
    def test_partial_parameters(self, params: dict[str, Any], cores: Cores, decode: Engine) -> None:
        cores.submit(decode, STORY, params)

        with pytest.raises(EngineFatal):
            decode.schedule(0.0)

    def test_fewer_blocks_than_tokens(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        handle = cores.turn(prefill, decode, STORY).handle
        cores.submit(other_prefill, STORY + MORE, {**handle, "remote_block_ids": [handle["remote_block_ids"][0][:1]]})

        with pytest.raises(EngineFatal, match="num_decode_blocks"):
            other_prefill.schedule(0.0)

    def test_handle_sent_to_its_issuer(self, cores: Cores, prefill: Engine, decode: Engine) -> None:
        handle = cores.turn(prefill, decode, STORY).handle
        cores.submit(decode, STORY + MORE, handle)

        with pytest.raises(EngineFatal, match="engine_id"):
            decode.schedule(0.0)

    def test_dead_engine_takes_nothing(self, cores: Cores, decode: Engine) -> None:
        decode.die("why")

        with pytest.raises(EngineFatal, match="why"):
            cores.submit(decode, STORY)


class TestFailedReads:
    def test_fail_ends_the_request(self, cores: Cores, prefill: Engine, decode: Engine) -> None:
        request = self.start_a_read(cores, prefill, decode)

        assert decode.load_failed(request) is False
        assert decode.pool.held == 0

    def test_recompute_on_decode_computes_it_all(self, prefill: Engine) -> None:
        decode = engine("decode", policy=Policy.RECOMPUTE)
        cores = Cores.of(prefill, decode)
        request = self.start_a_read(cores, prefill, decode)

        assert decode.load_failed(request) is True
        assert [step.token for step in cores.steps(decode, request)] == cold(STORY)

    def test_recompute_on_prefill_hangs_and_then_leaks(self, prefill: Engine, decode: Engine) -> None:
        reader = engine("reader", policy=Policy.RECOMPUTE)
        cores = Cores.of(prefill, decode, reader)
        first = cores.turn(prefill, decode, STORY)
        request = cores.submit(reader, first.tokens + MORE, first.handle)
        reader.schedule(0.0)

        assert reader.load_failed(request) is True
        assert request.phase is Phase.HUNG
        reader.abort(request)
        assert reader.leaked_blocks == reader.pool.held > 0

    def test_prefill_that_is_not_bidirectional_hangs_on_a_handle(self, prefill: Engine, decode: Engine) -> None:
        reader = engine("reader", bidirectional=False)
        cores = Cores.of(prefill, decode, reader)
        first = cores.turn(prefill, decode, STORY)
        request = cores.submit(reader, first.tokens + MORE, first.handle)
        reader.schedule(0.0)

        assert request.phase is Phase.HUNG

    def start_a_read(self, cores: Cores, prefill: Engine, decode: Engine) -> Any:
        leg = cores.run(prefill, STORY, COLD, max_tokens=1)
        request = cores.submit(decode, STORY, leg.handle)
        decode.schedule(cores.now)
        assert request.phase is Phase.LOADING
        return request


class TestCapacity:
    def test_requests_wait_for_blocks_and_retained_ones_are_not_evicted(self, prefill: Engine) -> None:
        decode = engine("decode", blocks=2 * (len(STORY) // BLOCK + 3))
        cores = Cores.of(prefill, decode)
        cores.turn(prefill, decode, STORY)
        cores.turn(prefill, decode, OTHER)
        request = cores.submit(decode, STORY, salt="new")

        assert decode.schedule(0.0) == []
        assert len(decode.waiting) == 1
        decode.expire(TTL)
        decode.schedule(TTL)
        assert request.phase is Phase.RUNNING

    def test_cached_blocks_are_evicted_before_anybody_waits(self) -> None:
        core = engine("small", blocks=len(STORY) // BLOCK + 4)
        cores = Cores.of(core)
        for number in range(5):
            cores.run(core, STORY, salt=str(number))

        assert core.counters.preemptions == 0
        assert core.pool.held == 0

    def test_request_that_cannot_grow_starts_over_and_is_right(self) -> None:
        core = engine("small", blocks=2 * (len(STORY) // BLOCK + 1))
        cores = Cores.of(core)
        requests = [cores.submit(core, STORY, max_tokens=12, salt=salt) for salt in ("left", "right")]
        assert len(core.schedule(0.0)) == 2

        while any(request.phase is not Phase.FINISHED for request in requests):
            core.schedule(0.0)
            for request in requests:
                if request.phase is Phase.RUNNING:
                    core.step(request, 0.0)

        assert core.counters.preemptions > 0
        assert [request.tokens[len(STORY) :] for request in requests] == [cold(STORY, max_tokens=12)] * 2

    def test_prefills_share_the_accelerator(self) -> None:
        timed = engine("timed", timing=TimingModel())
        cores = Cores.of(timed)
        first, second = cores.submit(timed, STORY), cores.submit(timed, OTHER)
        timed.schedule(0.0)

        one = timed.begin_prefill(first, 10.0)
        assert one > 10.0
        assert timed.begin_prefill(second, 10.0) > one


class TestAnswers:
    def test_ends_at_the_limit_a_stop_token_or_the_end_token(self, cores: Cores, decode: Engine) -> None:
        chosen = cold(STORY)[2]
        short = cores.run(decode, STORY, max_tokens=2)
        stopped = cores.run(decode, STORY, stop_token_ids=frozenset({chosen}))
        not_yet = cores.run(decode, STORY, stop_token_ids=frozenset({chosen}), min_tokens=6)

        assert (short.steps[-1].finish, len(short.steps)) == ("length", 2)
        assert (stopped.steps[-1].finish, stopped.steps[-1].stop_token) == ("stop", chosen)
        assert not_yet.steps[-1].finish == "length"

    def test_ends_by_itself_with_the_end_of_the_message(self) -> None:
        core = engine("talkative", blocks=256)
        ended = Cores.of(core).run(core, STORY, max_tokens=900, ignore_eos=False)

        assert ended.steps[-1].finish == "stop"
        assert ended.generated[-1] == tokenizer.MESSAGE_END
        assert tokenizer.MESSAGE_END not in ended.generated[:-1]

    def test_samples_of_one_request_differ(self, cores: Cores, decode: Engine) -> None:
        assert cores.run(decode, STORY, child=0).generated != cores.run(decode, STORY, child=1).generated


def _first_value(tokens: list[int]) -> int:
    return generation.values_of(tokens[:1], generation.kv_seed("m"))[0]


class TestLogProbabilities:
    """They follow from what was attended to, as the tokens do."""

    def likely(self, prompt: list[int], **changes: Any) -> dict[int, float]:
        (step,) = Cores.of(alone := engine("alone", **changes)).run(alone, prompt, max_tokens=1, logprobs=True).steps
        assert step.token in dict(step.likely)
        return dict(step.likely)

    def test_one_context_has_one_answer_and_another_context_another(self) -> None:
        assert self.likely(STORY) == self.likely(STORY)
        assert self.likely(STORY).keys() != self.likely(OTHER).keys()
        assert sum(map(math.exp, self.likely(STORY).values())) == pytest.approx(1.0)

    def test_noise_moves_them_by_no_more_than_was_asked_for(self) -> None:
        exact, noisy = self.likely(STORY), self.likely(STORY, logprob_noise=0.1)

        assert exact.keys() == noisy.keys()
        assert 0 < max(abs(exact[token] - noisy[token]) for token in exact) <= 0.2

    def test_wrong_blocks_give_those_of_the_text_that_is_in_them(
        self, cores: Cores, prefill: Engine, other_prefill: Engine, decode: Engine
    ) -> None:
        first = cores.turn(prefill, decode, STORY)
        other = OTHER[: len(STORY)] + first.generated
        (step,) = cores.run(other_prefill, other + MORE, params=first.handle, max_tokens=1, logprobs=True).steps

        assert dict(step.likely).keys() != self.likely(other + MORE).keys()

    def test_they_are_not_told_unasked(self) -> None:
        (step,) = Cores.of(alone := engine("alone")).run(alone, STORY, max_tokens=1).steps

        assert step.likely == ()
