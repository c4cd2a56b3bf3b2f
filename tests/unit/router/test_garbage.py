"""When Python looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvloop_connector.handle import KVHandle, to_ranges
from kvloop_router import cost_model, fit, garbage, headers, records
from kvloop_router.kept import packed
from tests.unit.router.kept_handles import kept

HANDLE = KVHandle({**kept("name").params, "remote_block_ids": [[1, 5, 6, 9], [3, 7]]})
RECORD = records.encode(kept("name", blocks=(to_ranges((1, 5, 9, 20, 40)), to_ranges((7,)))))
LEARNED = fit.observe(fit.begin((1.0, 2.0, 3.0)), (1.0, 1.0, 0.0), 9.0)
MANY = 200


def test_what_is_there_by_now_is_left_out_and_the_rest_is_still_looked_at() -> None:
    before = gc.get_threshold()
    try:
        garbage.look_seldom()

        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > before[0]
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@pytest.mark.parametrize(
    "work",
    [
        lambda: records.decode(RECORD),
        lambda: HANDLE.block_ids,
        lambda: packed(HANDLE),
        lambda: fit.observe(LEARNED, (1.0, 1.0, 0.0), 9.0),
        lambda: cost_model.decode_speed(cost_model.decode_speed()),
        lambda: headers.api_keys({"Authorization": "Bearer key"}),
    ],
    ids=["records", "block ids", "packed handles", "fits", "speeds", "keys"],
)
def test_what_is_done_for_each_turn_leaves_nothing_behind(work: Callable[[], object]) -> None:
    """Python keeps freed tuples for the next of their length, 2,000 of each. One that is made of an iterator is made
    longer and then cut, so that it is never one of those, and joins them when it is freed: they would grow for hours.
    """
    with collecting_nothing():
        # Of lists and dictionaries it keeps 80 each, which are there now.
        repeat(work)
        before = gc.get_count()[0]
        repeat(work)
        left = gc.get_count()[0] - before

    assert left < MANY / 2


def repeat(work: Callable[[], object]) -> None:
    for _ in range(MANY):
        work()


@contextmanager
def collecting_nothing() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
