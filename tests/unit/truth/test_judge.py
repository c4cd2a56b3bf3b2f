from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.truth.judge import WRONG_KEPT, Answered, Tally, faults, judge, tally_of, together
from tests.truth.turns import Kind

RIGHT = Answered(
    seed=1, number=3, kind=Kind.GROW, text=" yes", right=" yes", path="warm", reused=64, reusable=64, prompt_tokens=90
)
WRONG = replace(RIGHT, kind=Kind.EDIT, text=" no")
COLD = replace(RIGHT, path="cold", reason="miss", reused=0, reusable=32)
FAILED = replace(RIGHT, status=503, text="", path="")
DIRECT = replace(RIGHT, kind=Kind.FORGED, direct=True, path="", reused=0, reusable=0, engine_said="forged")

PASSED = judge([RIGHT, replace(COLD, reusable=0)], pulled_bytes=4096)
STOCK = judge([RIGHT, WRONG], pulled_bytes=4096)


def test_counts_what_was_answered() -> None:
    tally = judge([RIGHT, WRONG, COLD, FAILED, DIRECT], reads=2, pulled_bytes=7, seconds=1.23)

    assert (tally.turns, tally.wrong, tally.failed, tally.routed, tally.warm) == (5, 1, 1, 3, 2)
    assert (tally.prompt, tally.reused, tally.reusable, tally.reads, tally.pulled_bytes) == (270, 128, 160, 2, 7)
    assert (tally.warm_share, tally.reused_share, tally.seconds) == (2 / 3, 0.8, 1.2)
    assert (tally.reasons, tally.lost, tally.verdicts) == ({"miss": 1}, {"miss": 32}, {"forged": 1})
    assert {kind: (sums.answers, sums.wrong, sums.failed, sums.warm) for kind, sums in tally.kinds.items()} == {
        "grow": (3, 0, 1, 1),
        "edit": (1, 1, 0, 1),
        "forged": (1, 0, 0, 0),
    }


def test_what_prefill_had_itself_is_not_lost_and_counts_no_more_than_could_be_reused() -> None:
    had = replace(COLD, reason="below_threshold", had=96)
    tally = judge([RIGHT, had, replace(had, had=16)])

    assert (tally.reused, tally.had, tally.reusable) == (64, 32 + 16, 128)
    assert (tally.reused_share, tally.lost) == (112 / 128, {"below_threshold": 16})


def test_wrong_answer_is_told_in_full_but_not_all_of_many() -> None:
    tally = judge([WRONG] * (WRONG_KEPT + 1))

    assert tally.wrong == WRONG_KEPT + 1
    assert len(tally.wrongs) == WRONG_KEPT
    assert (tally.wrongs[0]["text"], tally.wrongs[0]["right"], tally.wrongs[0]["number"]) == (" no", " yes", 3)


def test_answer_that_never_came_is_not_wrong() -> None:
    assert judge([FAILED]).wrong == 0


def test_parts_add_up_to_the_whole() -> None:
    first, second = [RIGHT, WRONG, DIRECT], [COLD, FAILED, WRONG]
    parts = together([judge(first, reads=1), judge(second, reads=2)])

    assert parts == judge([*first, *second], reads=3)


def test_of_no_parts_there_is_nothing() -> None:
    assert together([]) == Tally()


def test_comes_back_from_json_as_it_was() -> None:
    tally = judge([RIGHT, WRONG, DIRECT])

    assert tally_of(json.loads(json.dumps(tally.as_json()))) == tally


def test_passes_where_one_arm_is_right_and_the_other_wrong() -> None:
    assert faults(PASSED, STOCK, least_share=1.0) == []


@pytest.mark.parametrize(
    ("kvloop", "stock", "told"),
    [
        (judge([RIGHT, WRONG], pulled_bytes=1), STOCK, "1 of 2 answers are wrong"),
        (judge([RIGHT, FAILED], pulled_bytes=1), STOCK, "1 of 2 requests got no answer"),
        (judge([RIGHT]), STOCK, "nothing was pulled"),
        (PASSED, judge([RIGHT, COLD]), "prove nothing"),
        (PASSED, Tally(), "not known"),
        (judge([replace(RIGHT, reusable=100)], pulled_bytes=1), STOCK, "0.640 of what could be reused"),
    ],
)
def test_one_fault_is_enough(kvloop: Tally, stock: Tally, told: str) -> None:
    (fault,) = faults(kvloop, stock, least_share=0.95)

    assert told in fault


def test_nothing_asked_is_no_success() -> None:
    assert "nothing was asked" in faults(Tally(), Tally())
