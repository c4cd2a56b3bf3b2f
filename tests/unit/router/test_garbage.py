"""When Python looks for garbage."""

from __future__ import annotations

import gc

from kvloop_router import garbage


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
