"""Lines in the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO

import pytest

from kvloop_router.logs import Fields, JsonFormatter
from kvloop_router.turn_log import TurnLog


class Output:
    """A handler's output, and the handler."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._stream = StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(formatter)

    @property
    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()


@pytest.fixture
def output() -> Iterator[Output]:
    output, root = Output(JsonFormatter()), logging.getLogger()
    before = root.level
    root.addHandler(output.handler)
    root.setLevel(logging.INFO)
    yield output
    root.removeHandler(output.handler)
    root.setLevel(before)


def a_turn() -> None:
    turns = TurnLog(clock=lambda: 1.0, wall_clock=lambda: 1796054718.1234)
    report = turns.begin("a", "/v1/completions", {})
    report.model = "tiny \ud800"
    turns.record(report)


def test_a_turn_is_one_line_with_its_fields(output: Output) -> None:
    a_turn()

    (line,) = output.lines
    told = json.loads(line)
    assert [*told][:4] == ["time", "level", "logger", "message"]
    assert (told["time"], told["level"]) == ("2026-11-30T16:05:18.123+00:00", "info")
    assert (told["logger"], told["message"]) == ("kvloop_router.turn_log", "turn")
    assert (told["request_id"], told["model"], told["at"]) == ("a", "tiny \ud800", 1796054718.123)


def test_a_line_made_by_hand_is_the_line_that_the_library_makes(output: Output) -> None:
    fields = {"request_id": "a", "attempts": ["decode d: reset"], "seconds": None}
    logging.getLogger("some.logger").info("turn", extra=fields)
    logging.getLogger("some.logger").handle(Fields("some.logger", "turn", 0.0, fields))

    library, own = map(json.loads, output.lines)
    assert [*own] == [*library]
    assert {**own, "time": ""} == {**library, "time": ""}


def test_the_logs_configuration_holds_for_turns_too(output: Output) -> None:
    turns = logging.getLogger("kvloop_router.turn_log")
    turns.setLevel(logging.WARNING)
    a_turn()
    turns.setLevel(logging.NOTSET)
    output.handler.setLevel(logging.WARNING)
    a_turn()
    output.handler.setLevel(logging.NOTSET)
    output.handler.addFilter(lambda record: record.getMessage() != "turn")
    a_turn()

    assert output.lines == []


def test_any_formatter_can_write_a_turn() -> None:
    form = "%(asctime)s %(levelname)s %(levelno)s %(name)s %(filename)s:%(lineno)d %(process)d %(thread)d %(message)s"
    line = logging.Formatter(form).format(Fields("some.logger", "turn", 0.0, {}))

    assert line.endswith(" INFO 20 some.logger :0 0 0 turn")
