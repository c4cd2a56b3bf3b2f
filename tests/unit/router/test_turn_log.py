"""What is remembered of turns."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.digest import DigestKey
from kvloop_router import history
from kvloop_router.errors import EngineFailed, EngineRejected, EngineUnreachable, StreamBroken
from kvloop_router.gaps import BOUNDS, Gaps
from kvloop_router.outline import outline
from kvloop_router.request import Api, Request
from kvloop_router.turn_log import TurnLog, TurnReport


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def log(*, most: int = 1000, outline_bytes: int = 1_000_000) -> TurnLog:
    return TurnLog(clock=Clock(), wall_clock=lambda: 0.0, most=most, outline_bytes=outline_bytes)


def ended(turns: TurnLog, name: str, messages: int = 1) -> TurnReport:
    report = turns.begin(name, "/v1/chat/completions", {})
    key = DigestKey(b"k" * 32, b"")
    body = {"messages": [{"role": "user", "content": "text"}] * messages}
    request = Request(Api.CHAT, body, "tiny", None, False)
    report.outline = outline(key, request, history.trail(key, request))
    turns.record(report)
    return report


def test_the_last_turns_are_kept_and_the_older_ones_go() -> None:
    turns = log(most=2)
    for name in ("one", "two", "three"):
        ended(turns, name)

    assert [report.request_id for report in turns] == ["three", "two"]
    assert turns.get("one") is None


def test_long_histories_push_out_more_than_short_ones() -> None:
    turns = log(outline_bytes=20 * 37)
    for number in range(40):
        ended(turns, str(number), messages=2)
    assert [report.request_id for report in turns] == [str(number) for number in range(39, 29, -1)]

    ended(turns, "long", messages=1000)
    assert [report.request_id for report in turns] == ["long"]
    ended(turns, "short")
    assert [report.request_id for report in turns] == ["short"]


def test_an_id_that_comes_again_stands_for_the_last_turn() -> None:
    turns = log(outline_bytes=3 * 37)
    ended(turns, "same", messages=2)
    last = ended(turns, "same", messages=2)
    ended(turns, "other")

    assert turns.get("same") is last
    assert len(list(turns)) == 2


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (EngineUnreachable("p", "refused"), "unreachable"),
        (EngineRejected("p", 400, b"", ""), "rejected"),
        (EngineFailed("p", "status 500"), "failed"),
        (StreamBroken("p", "reset"), "broken"),
        (KeyboardInterrupt(), "cut"),
    ],
)
def test_a_leg_says_how_it_ended(error: BaseException | None, outcome: str) -> None:
    clock = Clock()
    report = TurnReport(request_id="one", api="/", at=0.0, clock=clock)
    clock.now += 2

    with suppress(BaseException), report.leg("prefill", "p"):
        clock.now += 3
        if error is not None:
            raise error

    (leg,) = report.legs
    assert (leg.began, leg.seconds, leg.outcome) == (2, 3, outcome)


@pytest.mark.parametrize(
    ("data", "reasoned"),
    [
        (b'data: {"choices":[{"delta":{"reasoning":"hm"}}]}', True),
        (b'{"choices":[{"message":{"content":"yes","reasoning_content": "hm"}}]}', True),
        (b'data: {"choices":[{"delta":{"content":"<think>"}}]}', True),
        (b'{"choices":[{"message":{"content":"yes","reasoning":null}}]}', False),
        (b'data: {"choices":[{"delta":{"reasoning":"","content":"yes"}}]}', False),
    ],
)
def test_whether_an_answer_begins_with_reasoning_is_seen_at_its_first_byte(data: bytes, reasoned: bool) -> None:
    report = TurnReport(request_id="one", api="/", at=0.0, clock=Clock())
    report.first_byte(101.0, data)

    assert (report.ttft_seconds, report.reasoned) == (1.0, reasoned)


@given(st.lists(st.floats(0, 20), max_size=20))
def test_gaps_count_every_time_between_two_pieces_once(gaps: list[float]) -> None:
    counted, now = Gaps(), 0.0
    counted.note(now)
    for gap in gaps:
        now += gap
        counted.note(now)

    assert sum(counted.counts or [0]) == len(gaps)
    assert counted.total == pytest.approx(sum(gaps))
    assert len(counted.counts or BOUNDS) == len(BOUNDS) + bool(gaps)
