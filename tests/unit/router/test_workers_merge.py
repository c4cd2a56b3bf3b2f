"""What several workers say, as what their router says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.settings import Role
from kvloop_router import workers_merge
from kvloop_router.admin import _engine, _pair
from kvloop_router.pairs import PairReport
from tests.unit.router.test_metrics import engine as an_engine

ENGINE: dict[str, Any] = _engine(an_engine(Role.DECODE, "decode-0"), None, 0.0) | {
    "retainedBlocks": 0,
    "retainedBlocksLimit": None,
}
PAIR: dict[str, Any] = _pair(
    PairReport(an_engine(Role.PREFILL, "prefill-0").spec, an_engine(Role.DECODE, "decode-0").spec)
)


def engines(*told: dict[str, Any], draining: bool = False) -> dict[str, Any]:
    turns = sum(each.get("runningTurns", 0) for each in told)
    return {"engines": [ENGINE | each for each in told], "draining": draining, "runningTurns": turns}


def pairs(*told: dict[str, Any]) -> dict[str, Any]:
    return {"pairs": [PAIR | each for each in told]}


@pytest.mark.parametrize(
    ("field", "told", "merged"),
    [
        ("runningTurns", (2, 3), 5),
        ("load", (1, 0), 1),
        ("loadTokens", (10, 20), 30),
        ("liveHandles", (7, 6), 7),
        ("lastDeadlineSeconds", (12.5, 40.0), 40.0),
        ("retainedBlocks", (3, 3), 3),
        ("retainedBlocksLimit", (None, 50), 50),
        ("draining", (True, False), False),
        ("draining", (True, True), True),
        ("ready", (True, False), False),
        ("healthy", (False, True), False),
        ("suspect", (False, True), True),
        ("version", (None, "0.33.0"), "0.33.0"),
        ("leases", (None, True), True),
        ("blockSize", (16, 16), 16),
    ],
)
def test_an_engine_is_what_its_routers_workers_say_of_it(field: str, told: tuple[Any, Any], merged: Any) -> None:
    (found,) = workers_merge.engines([engines({field: value}) for value in told])["engines"]

    assert found == ENGINE | {field: merged}


def test_engines_that_only_one_knows_are_there_and_so_are_two_pods_of_one_name() -> None:
    found = workers_merge.engines(
        [engines({"podUID": "old", "draining": True, "runningTurns": 1}), engines({"podUID": "new"}, draining=True)]
    )

    assert [(each["podUID"], each["draining"]) for each in found["engines"]] == [("old", True), ("new", False)]
    assert (found["draining"], found["runningTurns"]) == (True, 1)


def test_a_pair_is_what_its_worst_verdict_says_with_what_was_measured_then() -> None:
    told = [
        pairs({"verdict": "verified", "toDecodeBytes": 9, "attempts": 1}),
        pairs({"verdict": "failed", "toDecodeBytes": 4, "attempts": 3, "detail": "no KV moved"}),
        pairs({"verdict": "unknown"}),
    ]

    (found,) = workers_merge.pairs(told)["pairs"]

    assert found == PAIR | {"verdict": "failed", "toDecodeBytes": 4, "attempts": 3, "detail": "no KV moved"}
    assert workers_merge.pairs([*told, pairs({"verdict": "wrong"})])["pairs"][0]["verdict"] == "wrong"


def test_what_one_measured_and_others_heard_counts_once() -> None:
    told = pairs({"verdict": "verified", "toDecodeBytes": 9, "attempts": 1})

    assert workers_merge.pairs([told, told, told]) == told


def test_the_last_turns_of_all_come_first() -> None:
    told: list[dict[str, Any]] = [
        {"turns": [{"request_id": "d", "at": 4.0}, {"request_id": "a", "at": 1.0}]},
        {"turns": [{"request_id": "c", "at": 3.0}, {"request_id": "b", "at": 2.0}]},
    ]

    assert [turn["request_id"] for turn in workers_merge.turns(told, most=3)["turns"]] == ["d", "c", "b"]


def test_of_each_model_one_template_is_shown() -> None:
    told = [{"templates": [{"model": "a", "engine": "x"}]}, {"templates": [{"model": "a"}, {"model": "b"}]}]

    assert workers_merge.templates(told)["templates"] == [{"model": "a", "engine": "x"}, {"model": "b"}]


ABLE, UNABLE = (200, "ok\n"), (503, "no_prefill: There is no prefill engine.\n")


@pytest.mark.parametrize(
    ("answers", "before", "ready"),
    [
        pytest.param([ABLE, ABLE], False, True, id="all are"),
        pytest.param([ABLE, UNABLE], False, False, id="one is not yet"),
        pytest.param([ABLE, UNABLE], True, True, id="one is no more"),
        pytest.param([UNABLE, UNABLE], True, False, id="none is"),
        pytest.param([ABLE], True, True, id="one of two is away"),
        pytest.param([], True, False, id="all are away"),
    ],
)
def test_a_router_becomes_ready_with_all_workers_and_stays_so_with_one(
    answers: list[tuple[int, str]], before: bool, ready: bool
) -> None:
    able, why = workers_merge.ready(answers, before=before)

    assert able is ready
    assert why == ("ok" if ready else "no_prefill: There is no prefill engine." if answers else "no worker serves")


verdicts = st.sampled_from(["unknown", "verified", "failed", "wrong"])
told_engines = st.lists(
    st.fixed_dictionaries(
        {
            "podUID": st.sampled_from(["a", "b", "c"]),
            "runningTurns": st.integers(0, 5),
            "liveHandles": st.integers(0, 5),
            "draining": st.booleans(),
        }
    ),
    unique_by=lambda engine: str(engine["podUID"]),
)


@given(st.lists(told_engines, min_size=1, max_size=5))
def test_what_the_operator_waits_for_is_so_for_every_worker(told: list[list[dict[str, Any]]]) -> None:
    merged = workers_merge.engines([engines(*worker) for worker in told])

    assert merged["runningTurns"] == sum(engine["runningTurns"] for engine in merged["engines"])
    for engine in merged["engines"]:
        of_it = [each for worker in told for each in worker if each["podUID"] == engine["podUID"]]
        assert engine["draining"] == all(each["draining"] for each in of_it)
        assert engine["runningTurns"] == sum(each["runningTurns"] for each in of_it)
        assert engine["liveHandles"] == max(each["liveHandles"] for each in of_it)


@given(st.lists(verdicts, min_size=1, max_size=5), st.randoms())
def test_the_order_of_workers_changes_no_verdict(told: list[str], random: Any) -> None:
    answers = [pairs({"verdict": verdict}) for verdict in told]
    shuffled = random.sample(answers, len(answers))

    assert workers_merge.pairs(answers) == workers_merge.pairs(shuffled)
    assert workers_merge.pairs([workers_merge.pairs(answers)]) == workers_merge.pairs(answers)
