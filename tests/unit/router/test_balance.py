"""Turns over engines, as the policy spreads them: a simulation without time, by seeded chance."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings, strategies as st

from kvloop_connector.settings import Role
from kvloop_router.policy import Candidate, choose_pair, decode_load

STEPS = 400


@dataclass
class Pool:
    """Decode engines with the sequences that run there, and one prefill engine."""

    names: list[str]
    running: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running = {name: [] for name in self.names}

    def candidates(self) -> list[Candidate]:
        prefill = Candidate("p0", Role.PREFILL, "uid-p0", "a", 0.0, True, True)
        return [prefill, *map(self.decode, self.names)]

    def decode(self, name: str) -> Candidate:
        tokens = self.running[name]
        return Candidate(name, Role.DECODE, f"uid-{name}", "a", decode_load(len(tokens), sum(tokens)), True, True)

    def end_some(self, random: Random) -> None:
        for tokens in self.running.values():
            if tokens and random.random() < 0.2:
                tokens.pop(random.randrange(len(tokens)))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(0, 2**32))
def test_no_engine_starves_and_none_is_drowned(engines: int, seed: int) -> None:
    random = Random(seed)
    pool = Pool([f"d{index}" for index in range(engines)])
    chosen: Counter[str] = Counter()
    for _ in range(STEPS):
        name = choose_pair(pool.candidates(), random).decode
        chosen[name] += 1
        pool.running[name].append(random.choice([200, 2_000, 30_000]))
        pool.end_some(random)

    fair = STEPS / engines
    assert set(chosen) == set(pool.names)
    assert min(chosen.values()) > fair / 4
    assert max(chosen.values()) < 4 * fair


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(0, 2**32))
def test_conversations_stay_where_they_are_while_the_engines_are_balanced(engines: int, seed: int) -> None:
    random = Random(seed)
    pool = Pool([f"d{index}" for index in range(engines)])
    for index in range(3 * engines):
        pool.running[pool.names[index % engines]].append(random.choice([4_000, 8_000]))

    for name in pool.names:
        assert choose_pair(pool.candidates(), random, issuer=f"uid-{name}").decode == name


@given(st.integers(0, 2**32))
def test_a_conversation_leaves_an_engine_that_is_overloaded_and_no_further_than_needed(seed: int) -> None:
    random = Random(seed)
    pool = Pool(["d0", "d1", "d2"])
    pool.running["d0"] = [8_000] * 40
    pool.running["d1"] = [8_000] * 30

    moved = 0
    while choose_pair(pool.candidates(), random, issuer="uid-d0").decode != "d0":
        chosen = choose_pair(pool.candidates(), random, issuer="uid-d0").decode
        pool.running[chosen].append(8_000)
        moved += 1
        assert moved < 100
    assert len(pool.running["d2"]) > 10
    assert pool.decode("d2").load < pool.decode("d0").load


def test_an_engine_that_is_full_or_suspect_is_passed_over_while_there_is_another() -> None:
    pool = Pool(["d0", "d1"]).candidates()
    for full in (False, True):
        every = [engine._replace(full=full, suspect=not full) for engine in pool]
        marked = [other if other.name == "d0" else engine for engine, other in zip(pool, every, strict=True)]

        assert {choose_pair(marked, Random(seed), issuer="uid-d0").decode for seed in range(20)} == {"d1"}
        assert {choose_pair(every, Random(seed)).decode for seed in range(20)} == {"d0", "d1"}


def test_a_suspect_engine_is_asked_before_one_that_is_full() -> None:
    prefill, first, second = Pool(["d0", "d1"]).candidates()
    pool = [prefill, first._replace(suspect=True), second._replace(full=True)]

    assert {choose_pair(pool, Random(seed)).decode for seed in range(20)} == {"d0"}


def test_of_two_prefill_engines_the_one_with_fewer_tokens_to_compute_serves() -> None:
    decode = Pool(["d0"]).candidates()[1]
    short = Candidate("p0", Role.PREFILL, "uid-p0", "a", 900.0, True, True)
    long = Candidate("p1", Role.PREFILL, "uid-p1", "a", 90_000.0, True, True)

    assert choose_pair([short, long, decode], Random(1)).prefill == "p0"
