"""What the paths for leases answer, with ranks whose deadlines are plain maps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvloop_connector.errors import InvalidHandle, UnsupportedEngine
from kvloop_connector.handle import KVHandle
from kvloop_connector.lease_ranks import RankLeases
from kvloop_connector.lease_service import Answer, LeaseService, refusal
from kvloop_connector.proof import FIELD, Proof, Term, is_sealed
from kvloop_connector.verdict import Outcome
from tests.unit.connector.proofs import KEY, NOW, OTHER_KEY, TERM, Issuer, judged

TOKENS = range(18)
HANDLE = Issuer(tokens=TOKENS).handle()
STOCK = Issuer(tokens=TOKENS).bare()
LATENCY = 0.25
"""Seconds that a call takes to reach the ranks, and the answer to come back."""


class Engine:
    """The ranks of a decode engine, ten seconds before the deadline of the handle that they retain."""

    def __init__(self, ranks: Sequence[dict[str, float]]) -> None:
        self.passed = 0.0
        self.ranks = [(RankLeases(3000.0), deadlines) for deadlines in ranks]
        self.calls: list[str] = []
        self.fault: str | None = None
        self.next_step: dict[str, float] = {}

    @property
    def deadlines(self) -> list[dict[str, float]]:
        return [deadlines for _, deadlines in self.ranks]

    async def call(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        self.calls.append(method)
        if self.fault is not None:
            return [{"fault": self.fault}]
        self.passed += LATENCY
        answers = [json.loads(json.dumps(self.answer(*rank, method, arguments))) for rank in self.ranks]
        self.passed += LATENCY
        for deadlines in self.deadlines:
            deadlines.update(self.next_step)
        return answers

    def clock(self) -> float:
        return TERM.expiry - 10 + self.passed

    def wall(self) -> float:
        return TERM.deadline - 10 + self.passed

    def answer(self, leases: RankLeases, held: dict[str, float], method: str, arguments: tuple[Any, ...]) -> Any:
        now = self.clock()
        if method == "kvloop_release":
            return leases.release(held, arguments[0], now)
        if method == "kvloop_set_back":
            return leases.set_back(held, arguments[0])
        return leases.renew(held, arguments[0], arguments[1], now=now, engine_id="decode")


def engine(*deadlines: dict[str, float]) -> Engine:
    return Engine(deadlines or [{"turn-1": TERM.expiry}, {"turn-1": TERM.expiry + 0.01}])


def service(of: Engine, *, sealed: bool = True) -> LeaseService:
    return LeaseService(call=of.call, key=KEY if sealed else None, clock=of.clock, wall=of.wall)


def asking(*ids: str, **fields: Any) -> bytes:
    return json.dumps({"remote_request_ids": ids, **fields}).encode()


def entry(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200
    [found] = answer.body["handles"]
    return dict(json.loads(json.dumps(found)))


async def test_each_handle_has_an_answer_in_the_order_of_the_request() -> None:
    decode = engine({"a": 100.0, "b": 100.0}, {"a": 100.0})

    answer = await service(decode).release(asking("gone", "a", "b"))

    assert answer == Answer(
        200,
        {
            "handles": [
                {"remote_request_id": "gone", "outcome": "not_held"},
                {"remote_request_id": "a", "outcome": "released"},
                {"remote_request_id": "b", "outcome": "not_held"},
            ]
        },
    )


async def test_what_the_ranks_are_told_to_retain_only_after_they_are_asked_is_released_too() -> None:
    decode = engine()
    decode.next_step = {"turn-2": TERM.expiry}

    answer = await service(decode).release(asking("turn-2"))

    assert entry(answer)["outcome"] == "released"
    assert [deadlines["turn-1"] for deadlines in decode.deadlines] == [TERM.expiry, TERM.expiry + 0.01]


async def test_a_renewed_handle_is_read_past_its_old_deadline() -> None:
    late = TERM.deadline + 30
    assert judged(HANDLE, TOKENS, now=late).outcome is Outcome.EXPIRED

    answer = await service(engine()).renew(asking("turn-1", seconds=60))
    handle = KVHandle.parse(HANDLE).renewed(entry(answer))

    assert judged(dict(handle.params), TOKENS, now=late).outcome is Outcome.READ


async def test_a_renewed_deadline_is_none_that_a_rank_does_not_keep() -> None:
    decode = engine()

    answer = await service(decode).renew(asking("turn-1", seconds=60))

    term = Proof.parse(KVHandle.parse(HANDLE).renewed(entry(answer)).params[FIELD]).term
    assert term == Term(deadline=TERM.deadline + 50, expiry=TERM.expiry + 50, number=1)
    assert all(term.expiry <= deadlines["turn-1"] for deadlines in decode.deadlines)


async def test_a_renewed_deadline_is_sealed_for_that_handle_only() -> None:
    other = Issuer(tokens=TOKENS, request_id="turn-2").handle()

    answer = await service(engine()).renew(asking("turn-1", seconds=60))

    mine, others = (KVHandle.parse(handle).renewed(entry(answer)).params for handle in (HANDLE, other))
    assert is_sealed(KEY, mine, Proof.parse(mine[FIELD]))
    assert not is_sealed(KEY, others, Proof.parse(others[FIELD]))
    assert not is_sealed(OTHER_KEY, mine, Proof.parse(mine[FIELD]))


async def test_a_stock_handle_is_moved_by_what_the_answer_says() -> None:
    decode = engine()

    answer = await service(decode, sealed=False).renew(asking("turn-1", seconds=60))
    handle = KVHandle.parse(STOCK).renewed(entry(answer))

    assert "term" not in entry(answer)
    moved = handle.params["remote_blocks_expiry_time"]
    assert TERM.expiry + 50 <= moved <= min(deadlines["turn-1"] for deadlines in decode.deadlines)
    assert {**handle.params, "remote_blocks_expiry_time": TERM.expiry} == STOCK


async def test_renewing_what_is_gone_says_so() -> None:
    answer = await service(engine()).renew(asking("turn-7", seconds=60))

    assert entry(answer) == {"remote_request_id": "turn-7", "outcome": "not_held"}


async def test_what_one_rank_does_not_hold_is_not_renewed_on_the_others() -> None:
    decode = engine({"turn-1": TERM.expiry}, {})

    answer = await service(decode).renew(asking("turn-1", seconds=60))

    assert entry(answer)["outcome"] == "not_held"
    assert decode.deadlines == [{"turn-1": TERM.expiry}, {}]


async def test_a_request_that_is_none_reaches_no_rank() -> None:
    decode = engine()

    for answer in (
        await service(decode).release(b"?"),
        await service(decode).renew(asking("a", seconds=1, force=True)),
    ):
        assert answer.status == 400
        assert answer.body["error"]["type"] == "BadRequestError"

    assert answer.body["error"]["param"] == "force"
    assert decode.calls == []


async def test_what_a_rank_cannot_do_is_an_error_of_the_engine() -> None:
    decode = engine()
    decode.fault = "no KV connector"

    for answer in (await service(decode).release(asking("a")), await service(decode).renew(asking("a", seconds=1))):
        assert (answer.status, answer.body["error"]["message"]) == (500, "no KV connector")


def test_an_engine_that_cannot_says_what_to_do() -> None:
    answer = refusal(UnsupportedEngine("start it otherwise"))

    assert (answer.status, answer.body["error"]["message"]) == (501, "start it otherwise")


@pytest.mark.parametrize(
    ("params", "answer"),
    [
        (HANDLE, {"outcome": "renewed", "seconds": 5.0}),
        (HANDLE, {"outcome": "renewed", "seconds": 5.0, "term": {"deadline": NOW}}),
        (HANDLE, {"outcome": "renewed", "seconds": 5.0, "term": None}),
        (STOCK, {"outcome": "renewed", "seconds": 5.0, "term": HANDLE[FIELD]["term"]}),
        (STOCK, {"outcome": "not_held"}),
        ({**STOCK, "remote_blocks_expiry_time": None}, {"outcome": "renewed", "seconds": 5.0}),
    ],
)
def test_an_answer_that_does_not_fit_the_handle_is_refused(params: dict[str, Any], answer: dict[str, Any]) -> None:
    with pytest.raises(InvalidHandle):
        KVHandle.parse(params).renewed(answer)
