"""What a handle is worth after the engine that issued it, or the one that reads it, was started again."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Pair
from tests.contract.legs import Legs, continued, fresh_salt, story, tokenize

pytestmark = pytest.mark.long


def test_prefill_that_restarted_reads_a_handle_from_before(pair: Pair, legs: Legs) -> None:
    messages, salt = story("prefill restarts"), fresh_salt()
    first = legs.cold(pair.other_prefill, pair.decode, messages, cache_salt=salt)
    history = continued(messages, first)
    handle = pair.reusable(first, tokenize(pair.decode, history))

    pair.other_prefill.restart()
    second = legs.turn(pair.other_prefill, pair.decode, history, handle.params, cache_salt=salt)

    assert pair.other_prefill.metrics().external_hits == handle.tokens
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
