"""Leases on the ranks of an engine, against what is to hold whatever the ranks' clocks and deadlines are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_connector import lease_ranks
from kvloop_connector.errors import InvalidAnswer
from kvloop_connector.lease_ranks import RankAnswer, RankLeases, Renewal

MOST = 100.0


class Rank:
    """One rank, whose clock is ahead of the test's by ``epoch``."""

    def __init__(self, deadlines: dict[str, float], epoch: float = 0.0) -> None:
        self.epoch = epoch
        self.deadlines = {name: epoch + deadline for name, deadline in deadlines.items()}
        self.leases = RankLeases(MOST)

    def release(self, *ids: str, now: float = 0.0) -> RankAnswer:
        return sent(self.leases.release(self.deadlines, ids, self.epoch + now))

    def renew(self, *ids: str, seconds: float, now: float = 0.0) -> RankAnswer:
        answer = self.leases.renew(self.deadlines, ids, seconds, now=self.epoch + now, engine_id="decode")
        return sent(answer)

    def held_until(self, name: str) -> float:
        return self.deadlines[name] - self.epoch


def sent(answer: RankAnswer) -> RankAnswer:
    """As it comes out of another process."""
    return dict(json.loads(json.dumps(answer)))


def renewed(*answers: Any) -> dict[str, Renewal]:
    return dict(lease_ranks.renewed(answers).leases)


def test_a_release_ends_the_lease_now_and_no_other() -> None:
    rank = Rank({"a": 50, "b": 60})

    answer = rank.release("a", "gone", now=10)

    assert lease_ranks.released([answer]) == {"a"}
    assert rank.deadlines == {"a": 10, "b": 60}


def test_a_release_of_what_is_over_does_not_keep_it() -> None:
    rank = Rank({"a": 5})

    rank.release("a", now=10)

    assert rank.deadlines == {"a": 5}


def test_a_renewal_says_by_how_much_the_deadline_moved() -> None:
    rank = Rank({"a": 50})

    assert renewed(rank.renew("a", seconds=60, now=30)) == {"a": Renewal(40, 60, 1)}
    assert renewed(rank.renew("a", seconds=70, now=30)) == {"a": Renewal(10, 70, 2)}
    assert rank.deadlines == {"a": 100}


def test_a_renewal_never_makes_a_lease_shorter() -> None:
    rank = Rank({"a": 50})

    assert renewed(rank.renew("a", seconds=5, now=10)) == {"a": Renewal(0, 40, 1)}


def test_all_renewals_together_add_no_more_than_they_may() -> None:
    rank = Rank({"a": 50})
    rank.renew("a", seconds=60, now=40)

    assert renewed(rank.renew("a", seconds=1000, now=90)) == {"a": Renewal(50, 60, 2)}
    assert renewed(rank.renew("a", seconds=1000, now=120)) == {"a": Renewal(0, 30, 3)}


def test_what_is_gone_or_over_is_not_renewed() -> None:
    rank = Rank({"a": 50})

    assert renewed(rank.renew("a", "gone", seconds=60, now=50)) == {}
    assert rank.deadlines == {"a": 50}


def test_what_was_renewed_is_forgotten_when_it_is_gone() -> None:
    rank = Rank({"a": 50})
    rank.renew("a", seconds=100, now=40)
    rank.deadlines.clear()
    rank.release()
    rank.deadlines["a"] = 200.0

    # Not what was said of the one before: neither its number nor its limit.
    assert renewed(rank.renew("a", seconds=100, now=190)) == {"a": Renewal(90, 100, 1)}


def test_a_handle_is_released_only_if_all_ranks_held_it() -> None:
    first, second = Rank({"a": 50, "b": 50}), Rank({"b": 51}, epoch=1000)

    assert lease_ranks.released([first.release("a", "b"), second.release("a", "b")]) == {"b"}


@given(
    deadlines=st.lists(st.floats(1, 100), min_size=1, max_size=4),
    seconds=st.floats(0.1, 300),
    delays=st.lists(st.floats(0, 0.5), min_size=4, max_size=4),
    epoch=st.floats(0, 1e6),
)
def test_what_is_said_of_a_renewal_is_never_more_than_any_rank_holds(
    deadlines: list[float], seconds: float, delays: list[float], epoch: float
) -> None:
    ranks = [Rank({"a": deadline}, epoch=epoch * number) for number, deadline in enumerate(deadlines)]

    lease = renewed(*(rank.renew("a", seconds=seconds, now=delay) for rank, delay in zip(ranks, delays, strict=False)))[
        "a"
    ]

    slack = 1e-6
    for rank, before in zip(ranks, deadlines, strict=True):
        # A handle's deadline is none of a rank's that is earlier than any other's.
        assert min(deadlines) + lease.seconds <= rank.held_until("a") + slack
        assert lease.remaining <= rank.held_until("a") + slack
        assert rank.held_until("a") >= before - slack


def test_a_renewal_that_only_some_ranks_made_is_taken_back() -> None:
    first, second, third = Rank({"a": 50, "b": 50}), Rank({"a": 52, "b": 50}), Rank({"b": 50})
    ranks = first, second, third

    outcome = lease_ranks.renewed([rank.renew("a", "b", seconds=60, now=1) for rank in ranks])
    for rank in ranks:
        rank.leases.set_back(rank.deadlines, outcome.set_back)

    assert outcome.leases.keys() == {"b"}
    assert outcome.engine_id == "decode"
    assert (first.deadlines, third.deadlines) == ({"a": 50, "b": 61}, {"b": 61})
    # Never later than before: it is on its way out.
    assert 50 <= second.deadlines["a"] <= 52


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [None],
        [{}],
        [{"held": [], "renewed": {}, "engine_id": "decode"}, {"fault": "no such worker"}],
        [{"held": "a", "renewed": {"a": [1, 2]}, "engine_id": "decode"}],
        [{"held": None, "renewed": {"a": ["x", 2, 3]}, "engine_id": "decode"}],
        [{"held": None, "renewed": {"a": [1, 2, 3]}}],
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error(answers: list[Any]) -> None:
    for combine in (lease_ranks.released, lease_ranks.renewed):
        with pytest.raises(InvalidAnswer):
            combine(answers)


def test_the_error_says_what_the_worker_said() -> None:
    with pytest.raises(InvalidAnswer, match="no such worker"):
        lease_ranks.released([{"held": ["a"]}, {"fault": "no such worker"}])
