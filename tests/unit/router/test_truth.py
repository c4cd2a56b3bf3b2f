"""Which warm turns are looked at, and when a first token that was reused differs from one that was computed."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_router.truth import (
    FACTOR,
    FIRST_TURNS,
    FLOOR,
    MOST,
    TOP_TOKENS,
    FirstToken,
    Noise,
    Outcome,
    Schedule,
    distance,
    first_token,
    judge,
)

WORDS = [f"token_id:{number}" for number in range(60)]


def logits(random: Random) -> dict[str, float]:
    """What a model makes of a context: one token far ahead of the others, or not."""
    found = {word: random.gauss(0.0, 3.0) for word in random.sample(WORDS, 40)}
    found[random.choice(list(found))] += random.choice([0.0, 5.0, 20.0])
    return found


def told(weights: dict[str, float], error: float = 0.0, random: Random | None = None) -> FirstToken:
    """What an engine tells of it, each logit being off by as much as ``error``."""
    off = {word: weight + (random.uniform(-error, error) if random else 0.0) for word, weight in weights.items()}
    total = math.log(sum(map(math.exp, off.values())))
    likeliest = sorted(off, key=lambda word: -off[word])[:TOP_TOKENS]
    return {word: off[word] - total for word in likeliest}


class TestDistance:
    def test_of_equal_answers_is_nothing(self) -> None:
        answer = told(logits(Random(1)))

        assert distance(answer, answer) == 0.0

    def test_is_the_mean_difference_of_a_token(self) -> None:
        one, other = {"a": -1.0, "b": -2.0, "c": -3.0}, {"a": -1.0, "b": -2.0, "c": -3.9}

        assert distance(one, other) == pytest.approx(0.3)

    def test_leaves_out_what_moves_all_alike(self) -> None:
        # The first token is rounded by a quarter, and has nearly all of the probability.
        one = {"a": 0.0, "b": -10.0, "c": -11.0, "d": -12.0}
        other = {"a": 0.0, "b": -10.25, "c": -11.25, "d": -12.25}

        assert distance(one, other) == pytest.approx(0.25 / 4)

    def test_token_that_only_one_tells_is_no_likelier_than_the_others_last(self) -> None:
        # c is at most -3 in the other answer, and b at most -2 in the first.
        assert distance({"a": -1.0, "c": -2.0}, {"a": -1.0, "b": -3.0}) == pytest.approx((0.0 + 1.0 + 0.0) / 3)
        assert distance({"a": -1.0}, {"b": -1.0}) == 0.0

    def test_changes_little_where_a_token_barely_makes_it_among_the_likeliest(self) -> None:
        just, just_not = {"a": -1.0, "b": -3.0}, {"a": -1.0, "c": -3.001}

        assert distance(just, just_not) < 0.001

    def test_token_that_a_grammar_forbids_does_not_speak_for_all(self) -> None:
        allowed = dict.fromkeys(WORDS[:20], -3.0)

        assert distance(allowed, {**allowed, WORDS[0]: -9999.0}) <= 5.0 / 20

    @given(st.integers(), st.integers())
    def test_is_the_same_both_ways(self, one: int, other: int) -> None:
        left, right = told(logits(Random(one))), told(logits(Random(other)))

        assert distance(left, right) == pytest.approx(distance(right, left))

    @given(st.integers(), st.floats(0.0, 1.0))
    def test_is_no_more_than_twice_what_each_logit_is_off(self, seed: int, error: float) -> None:
        random = Random(seed)
        weights = logits(random)

        assert distance(told(weights), told(weights, error, random)) <= 2 * error + 1e-9


class TestVerdict:
    @given(st.integers(), st.floats(0.0, FLOOR / 4))
    def test_noise_that_stays_below_the_floor_is_never_a_mismatch(self, seed: int, error: float) -> None:
        random, noise = Random(seed), Noise()
        weights = logits(random)
        one, other, third = (told(weights, error, random) for _ in range(3))

        assert judge(one, other, third, noise).outcome is Outcome.AGREES

    @pytest.mark.parametrize("error", [0.001, 0.1, 0.3, 2.0])
    def test_pair_whose_turns_are_as_noisy_as_computing_anew_never_trips(self, error: float) -> None:
        random, noise = Random(f"honest {error}"), Noise()

        for _ in range(2000):
            weights = logits(random)
            warm, anew, again = (told(weights, error, random) for _ in range(3))
            outcome = judge(warm, anew, again, noise).outcome
            assert outcome is Outcome.AGREES or (outcome is Outcome.NOISY and error > 0.3)

    @pytest.mark.parametrize("error", [0.001, 0.1])
    def test_another_context_is_a_mismatch_however_long_the_noise_was_watched(self, error: float) -> None:
        random, noise, found = Random(f"wrong {error}"), Noise(), 0
        for _ in range(200):
            weights, others = logits(random), logits(random)
            anew, again = (told(weights, error, random) for _ in range(2))
            found += judge(told(others, error, random), anew, again, noise).outcome is Outcome.MISMATCH

        assert found == 200

    def test_token_that_is_settled_whatever_was_said_does_not_hide_a_mismatch(self) -> None:
        random = Random(3)
        weights, others = ({**logits(random), "settled": 60.0} for _ in range(2))
        assert told(weights)["settled"] == told(others)["settled"] == 0.0

        assert judge(told(others), told(weights), told(weights), Noise()).outcome is Outcome.MISMATCH

    def test_engine_that_differs_much_from_itself_tells_nothing(self) -> None:
        anew, again = {"a": -1.0, "b": -2.0, "c": -2.0}, {"a": -1.0 - 2 * MOST, "b": -2.0, "c": -2.0}

        assert judge({"z": -1.0}, anew, again, Noise()).outcome is Outcome.NOISY

    def test_what_was_seen_of_the_noise_widens_what_is_let_pass_and_is_forgotten_in_time(self) -> None:
        noise, quiet = Noise(), {"a": -1.0}
        noise.add(FLOOR / 2)
        assert noise.tolerance == FACTOR * FLOOR / 2

        for _ in range(64):
            judge(quiet, quiet, quiet, noise)

        assert noise.tolerance == FLOOR

    @given(st.floats(0.0, 5.0), st.lists(st.floats(0.0, 1.0), max_size=100))
    def test_no_distance_is_let_pass_that_neither_floor_nor_noise_explains(
        self, apart: float, seen: list[float]
    ) -> None:
        noise = Noise()
        for each in seen:
            noise.add(each)
        computed = {"a": -1.0, "b": -2.0, "c": -3.0}
        judged = judge({**computed, "a": -1.0 - apart}, computed, computed, noise)

        explained = max(FLOOR, FACTOR * max(seen[-63:], default=0.0))
        assert judged.tolerance == explained
        assert judged.distance == pytest.approx(apart / 3)
        if explained <= MOST:
            assert (judged.outcome is Outcome.MISMATCH) == (judged.distance > explained)
        else:
            assert judged.outcome is Outcome.NOISY


class TestSchedule:
    def due(self, schedule: Schedule, turns: int) -> list[int]:
        """Which of so many turns are looked at."""
        looked_at = []
        for number in range(1, turns + 1):
            wanted = schedule.next_is_due
            schedule.count()
            assert schedule.due == wanted
            if schedule.due:
                looked_at.append(number)
                schedule.start_over()
        return looked_at

    def test_one_in_so_many_and_the_first_one_sooner(self) -> None:
        assert self.due(Schedule(100), 300) == [FIRST_TURNS, FIRST_TURNS + 100, FIRST_TURNS + 200]

    def test_fewer_than_the_first_turns(self) -> None:
        assert self.due(Schedule(3), 10) == [3, 6, 9]

    def test_every_turn(self) -> None:
        assert self.due(Schedule(1), 3) == [1, 2, 3]

    def test_none(self) -> None:
        assert self.due(Schedule(0), 300) == []

    def test_one_that_was_put_off_stays_due(self) -> None:
        schedule = Schedule(2)
        for _ in range(5):
            schedule.count()

        assert schedule.due
        assert schedule.next_is_due


class TestWhatAnEngineTells:
    def test_of_a_chat(self) -> None:
        entry = {"token": "token_id:7", "logprob": -0.5, "bytes": [], "top_logprobs": []}
        top = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:9", "logprob": -1.5}]
        answer = {"choices": [{"logprobs": {"content": [{**entry, "top_logprobs": top}]}}]}

        assert first_token(answer) == {"token_id:7": -0.5, "token_id:9": -1.5}

    def test_of_a_completion(self) -> None:
        told = {"tokens": ["token_id:7"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:7": -0.5}]}

        assert first_token({"choices": [{"logprobs": told}]}) == {"token_id:7": -0.5}

    @pytest.mark.parametrize(
        "logprobs",
        [
            None,
            {},
            {"content": None},
            {"content": []},
            {"content": [{"top_logprobs": []}]},
            {"content": [{"top_logprobs": [{"token": "a", "logprob": None}]}]},
            {"top_logprobs": None},
            {"top_logprobs": [None]},
            {"top_logprobs": [{}]},
            {"top_logprobs": [{"a": float("nan")}]},
        ],
    )
    def test_nothing_of_use(self, logprobs: Any) -> None:
        assert first_token({"choices": [{"logprobs": logprobs}]}) is None

    @pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{}]}, {"choices": None}])
    def test_no_answer(self, answer: Any) -> None:
        assert first_token(answer) is None
