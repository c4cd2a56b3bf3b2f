"""Faults happen as often as they were ordered."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_sim.faults import FaultPlan, Faults


def plan(**wanted: Any) -> FaultPlan:
    made = FaultPlan(Faults())
    made.order(wanted)
    return made


def test_requests_fail_as_often_as_ordered() -> None:
    faults = plan(fail_requests=2)

    assert [faults.fails() for _ in range(3)] == [True, True, False]


def test_streams_break_as_often_as_ordered() -> None:
    faults = plan(reset_after_chunks=3, streams=1)
    first = faults.on_stream()

    assert first is not None
    assert (first.chunks, first.reset) == (3, True)
    assert faults.on_stream() is None


def test_stall_is_not_a_reset() -> None:
    stalled = plan(stall_after_chunks=0).on_stream()

    assert stalled is not None
    assert not stalled.reset


def test_order_replaces_what_was_ordered_before() -> None:
    faults = plan(fail_requests=2, lose_notifications=1)
    faults.order({"lose_notifications": 1})

    assert not faults.fails()
    assert [faults.loses_notification() for _ in range(2)] == [True, False]


@pytest.mark.parametrize("wanted", [{"melt": 1}, {"fail_requests": -1}, {"fail_requests": "2"}, {"streams": True}])
def test_unknown_fault_is_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fault|number"):
        FaultPlan(Faults()).order(wanted)


def test_reads_are_corrupt_as_often_as_ordered() -> None:
    faults = plan(corrupt_reads=1)

    assert [faults.corrupts_read() for _ in range(2)] == [True, False]
