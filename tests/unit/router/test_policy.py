"""Which engines a turn goes to."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.settings import Role
from kvloop_router.errors import Unavailable
from kvloop_router.policy import (
    Candidate,
    Pair,
    choose_one,
    choose_pair,
    choose_releaser,
    has_pair,
    still_serving,
    why_unavailable,
)


def engine(
    name: str, *, kv_revision: str = "a", load: int = 0, serving: bool = True, healthy: bool = True
) -> Candidate:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return Candidate(name, role, f"uid-{name}", kv_revision, load, serving, healthy)


PAIR = [engine("p0"), engine("d0")]

engines = st.lists(
    st.builds(
        lambda role, index, revision, load, serving: engine(
            f"{role}{index}", kv_revision=revision, load=load, serving=serving
        ),
        st.sampled_from("pd"),
        st.integers(0, 4),
        st.sampled_from("ab"),
        st.integers(0, 9),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda candidate: candidate.name,
)


@given(engines, st.integers(), st.sampled_from([None, "uid-d0", "uid-p0", "uid-gone"]))
def test_a_pair_serves_and_has_one_revision(pool: list[Candidate], seed: int, issuer: str | None) -> None:
    by_name = {candidate.name: candidate for candidate in pool}
    try:
        pair = choose_pair(pool, Random(seed), issuer=issuer)
    except Unavailable:
        assert not has_pair([candidate for candidate in pool if candidate.process != issuer])
        return
    prefill, decode = by_name[pair.prefill], by_name[pair.decode]

    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert prefill.serving
    assert decode.serving
    assert prefill.kv_revision == decode.kv_revision
    assert prefill.process != issuer


def test_the_less_loaded_of_two_serves() -> None:
    pool = [engine("p0", load=5), engine("p1", load=1), engine("d0")]

    assert choose_pair(pool, Random(1)).prefill == "p1"


def test_the_most_loaded_of_three_is_never_chosen() -> None:
    pool = [engine("p0", load=9), engine("p1", load=1), engine("p2", load=1), engine("d0")]
    random = Random(1)

    chosen = Counter(choose_pair(pool, random).prefill for _ in range(300))

    assert set(chosen) == {"p1", "p2"}
    assert min(chosen.values()) > 100


def test_a_turn_stays_at_the_engine_that_issued_its_handle() -> None:
    pool = [engine("p0"), engine("d0", load=50), engine("d1")]

    assert choose_pair(pool, Random(1), issuer="uid-d0").decode == "d0"


def test_an_issuer_that_does_not_serve_is_left() -> None:
    pool = [engine("p0"), engine("d0", serving=False), engine("d1")]

    assert choose_pair(pool, Random(1), issuer="uid-d0").decode == "d1"


def test_engines_that_failed_are_passed_over_while_there_are_others() -> None:
    pool = [engine("p0"), engine("p1"), engine("d0")]

    assert choose_pair(pool, Random(1), avoid_prefill={"p0"}).prefill == "p1"
    assert choose_pair(PAIR, Random(1), avoid_prefill={"p0"}, avoid_decode={"d0"}).prefill == "p0"


def test_pairs_that_may_not_be_used_are_passed_over_while_there_are_others() -> None:
    pool = [engine("p0"), engine("p1"), engine("d0")]

    assert choose_pair(pool, Random(1), usable=lambda prefill, decode: prefill == "p1").prefill == "p1"
    assert choose_pair(PAIR, Random(1), usable=lambda prefill, decode: False).prefill == "p0"


def test_a_handles_revision_is_kept() -> None:
    pool = [*PAIR, engine("p1", kv_revision="b"), engine("d1", kv_revision="b")]

    assert all(choose_pair(pool, Random(seed), revision="b").prefill == "p1" for seed in range(9))
    with pytest.raises(Unavailable):
        choose_pair(PAIR, Random(1), revision="b")


def test_both_revisions_get_turns_in_a_rollout() -> None:
    pool = [*PAIR, engine("p1", kv_revision="b"), engine("d1", kv_revision="b")]
    random = Random(1)

    assert {choose_pair(pool, random).decode for _ in range(50)} == {"d0", "d1"}


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        ([], "no_prefill"),
        ([engine("p0")], "no_decode"),
        ([engine("p0", serving=False), engine("d0")], "prefill_unhealthy"),
        ([engine("p0"), engine("d0", serving=False)], "decode_unhealthy"),
        ([engine("p0"), engine("d0", kv_revision="b")], "no_common_revision"),
    ],
)
def test_why_there_is_no_pair_is_told(pool: list[Candidate], reason: str) -> None:
    assert not has_pair(pool)
    assert why_unavailable(pool)[0] == reason


@pytest.mark.parametrize(
    ("pool", "decode"),
    [
        pytest.param([engine("d0"), engine("d1", load=0)], "d0", id="that serves"),
        pytest.param([engine("d0", serving=False), engine("d1")], "d1", id="that stopped"),
        pytest.param([engine("d1")], "d1", id="that is gone"),
        pytest.param([engine("d0", serving=False), engine("d1", serving=False)], "d0", id="with no other"),
        pytest.param(
            [engine("d0", serving=False), engine("d1", kv_revision="b")], "d0", id="with none of its revision"
        ),
        pytest.param([engine("d0", serving=False), engine("d8"), engine("d1")], "d1", id="with one that failed"),
        pytest.param([engine("d0", serving=False), engine("d9"), engine("d1")], "d1", id="with one that cannot pull"),
    ],
)
def test_a_decode_leg_goes_elsewhere_only_from_an_engine(pool: list[Candidate], decode: str) -> None:
    pair = Pair("p0", "d0", "a")

    chosen = still_serving(pair, pool, Random(1), avoid={"d8"}, usable=lambda prefill, decode: decode != "d9")

    assert chosen == Pair("p0", decode, "a")


@pytest.mark.parametrize(
    ("pool", "chosen"),
    [
        pytest.param([engine("p0", load=9), engine("p1", serving=False)], "p0", id="one that serves"),
        pytest.param([engine("p1", serving=False)], "p1", id="one that drains, where there is no other"),
        pytest.param([engine("p8"), engine("p1", serving=False)], "p1", id="one that reaches the issuer"),
        pytest.param([engine("p8")], "p8", id="one that may not, where there is no other"),
        pytest.param([engine("p0", serving=False, healthy=False), engine("p1")], "p1", id="one that answers"),
    ],
)
def test_a_release_goes_by(pool: list[Candidate], chosen: str) -> None:
    others = [engine("d0"), engine("p7", kv_revision="b")]

    assert choose_releaser([*pool, *others], Random(1), "a", usable=lambda name: name != "p8") == chosen


def test_a_release_needs_a_prefill_engine_of_the_revision() -> None:
    with pytest.raises(Unavailable):
        choose_releaser([engine("d0"), engine("p0", kv_revision="b")], Random(1), "a", usable=lambda name: True)


def test_one_engine_is_chosen_by_role() -> None:
    assert choose_one(PAIR, Random(1), Role.DECODE) == "d0"
    with pytest.raises(Unavailable):
        choose_one([engine("p0")], Random(1), Role.DECODE)
