"""What a handle is worth after the engine that issued it, or the one that reads it, was started again."""

from __future__ import annotations

from functools import partial

import pytest

from tests.contract.conftest import Pair
from tests.contract.legs import Legs, continued, fresh_salt, holds_nothing, leave, prefill_leg, story, tokenize
from tests.harness.engines import wait_until

pytestmark = pytest.mark.long


def test_prefill_that_restarted_reads_a_handle_from_before(pair: Pair, legs: Legs) -> None:
    messages, salt = story("prefill restarts"), fresh_salt()
    first = legs.cold(pair.other_prefill, pair.decode, messages, cache_salt=salt)
    history = continued(messages, first)
    handle = pair.reusable(first, tokenize(pair.decode, history))
    left = legs.cold(pair.prefill, pair.decode, story("a client left"), cache_salt=salt)
    lost = continued(story("a client left"), left)
    of_lost = pair.reusable(left, tokenize(pair.decode, lost))

    pair.other_prefill.restart()
    with pair.decode.frozen():
        # This one waits for the two engines to shake hands, which they do for the first time.
        leave(
            pair.other_prefill,
            prefill_leg(lost, of_lost.params, salt),
            once=lambda seen: seen.waiting_for_transfer == 1,
        )
        assert wait_until(lambda: pair.other_prefill.metrics().waiting == 0)
    assert wait_until(partial(holds_nothing, pair.other_prefill))
    before = pair.other_prefill.metrics()
    second = legs.turn(pair.other_prefill, pair.decode, history, handle.params, cache_salt=salt)

    assert (pair.other_prefill.metrics() - before).external_hits == handle.tokens
    assert second.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids


def test_handle_of_a_decode_engine_that_restarted_is_not_read(pair: Pair, legs: Legs) -> None:
    messages, salt = story("decode restarts"), fresh_salt()
    first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
    history = continued(messages, first)
    handle = pair.reusable(first, tokenize(pair.decode, history))

    pair.decode.restart()
    # Nobody holds what it speaks of, and no engine but the one that is gone could say so.
    declined = legs.prefill(pair.other_prefill, history, handle.params, cache_salt=salt)
    retried = legs.cold(pair.other_prefill, pair.decode, history)

    assert declined.status == 500
    assert retried.handle.engine_id != first.handle.engine_id
    assert retried.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids
