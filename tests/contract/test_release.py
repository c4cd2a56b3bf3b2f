"""How retained blocks end: released, spent, expired. And what becomes of a handle that is sent all the same."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_connector.handle import COLD_PREFILL_PARAMS
from tests.contract.conftest import Pair, failure_of_stock
from tests.contract.legs import (
    BLOCK,
    CHAT,
    Legs,
    chat,
    continued,
    fresh_salt,
    holds_nothing,
    story,
    tokenize,
)
from tests.harness import client
from tests.harness.engines import wait_until


class TestRelease:
    def test_no_tokens_asked_for_frees_the_blocks(self, pair: Pair, legs: Legs) -> None:
        answer = legs.cold(pair.prefill, pair.decode, story("to be released"))
        assert not holds_nothing(pair.decode)
        before = pair.other_prefill.metrics()

        reply = legs.release(pair.other_prefill, answer.handle)

        assert reply.status == 200
        assert wait_until(lambda: holds_nothing(pair.decode))
        counted = pair.other_prefill.metrics() - before
        assert counted.external_hits == 0
        assert counted.reads == 0

    def test_release_rides_on_an_unrelated_turn_that_stays_right(self, pair: Pair, legs: Legs) -> None:
        gone = legs.cold(pair.prefill, pair.decode, story("a conversation that ended"))
        unrelated = story("another conversation")
        usage = pair.decode.metrics().kv_usage

        answer = legs.turn(pair.prefill, pair.decode, unrelated, gone.handle.released().params, cache_salt=fresh_salt())

        assert answer.answer_ids == legs.cold(pair.other_prefill, pair.decode, unrelated).answer_ids
        legs.settle()
        assert usage > 0
        assert holds_nothing(pair.decode)

    @pytest.mark.parametrize("absent", ["remote_num_tokens", "remote_block_ids"])
    def test_handle_without_what_a_read_needs_reads_nothing(self, pair: Pair, legs: Legs, absent: str) -> None:
        messages = story("an incomplete handle")
        answer = legs.cold(pair.prefill, pair.decode, messages)
        params = {name: value for name, value in answer.handle.params.items() if name != absent}
        history = continued(messages, answer)
        before = pair.other_prefill.metrics()

        second = legs.turn(pair.other_prefill, pair.decode, history, params, cache_salt=fresh_salt())

        assert (pair.other_prefill.metrics() - before).external_hits == 0
        assert second.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids
        if absent == "remote_block_ids" or pair.kind.verifies:
            # Nobody told decode.
            legs.account(answer, pair.prefill, pair.decode)


class TestSingleUse:
    def test_another_engine_does_not_refuse_a_spent_handle(self, pair: Pair, legs: Legs) -> None:
        """The hazard for which a router takes a handle once: no engine knows what another one did."""
        messages, salt = story("spent twice"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        history = continued(messages, first)
        handle = pair.reusable(first, tokenize(pair.decode, history))
        legs.turn(pair.prefill, pair.decode, history, handle.params, cache_salt=salt)
        before = pair.other_prefill.metrics()

        again = legs.prefill(pair.other_prefill, history, handle.params, cache_salt=salt)

        assert again.status == 200
        counted = pair.other_prefill.metrics() - before
        assert counted.reads == 1
        assert counted.external_hits == handle.tokens
        legs.decode(pair.other_prefill, pair.decode, history, again.json["kv_transfer_params"])

    def test_spent_handle_reads_other_text_once_the_blocks_are_used_again(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("spent and overwritten"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        history = continued(messages, first)
        right = legs.cold(pair.prefill, pair.decode, history).answer_ids
        handle = pair.reusable(first, tokenize(pair.decode, history))
        legs.release(pair.prefill, first.handle)
        overwrite_decode(pair, legs)
        before = pair.decode.metrics()

        wrong = legs.turn(pair.other_prefill, pair.decode, history, handle.params, cache_salt=salt)

        assert wrong.answer_ids[:4] != right[:4]
        assert wait_until(lambda: (pair.decode.metrics() - before).notifications_after_expiry >= 1)


class TestExpiry:
    @failure_of_stock
    def test_expired_handle_is_declined_and_the_cold_retry_is_right(self, pair: Pair, legs: Legs) -> None:
        messages = story("too late")
        before = pair.forgetful_decode.metrics()
        first = legs.cold(pair.prefill, pair.forgetful_decode, messages)
        history = continued(messages, first)
        handle = pair.reusable(first, tokenize(pair.prefill, history))
        assert wait_until(lambda: (pair.forgetful_decode.metrics() - before).expired >= 1, seconds=60)
        assert wait_until(lambda: holds_nothing(pair.forgetful_decode))

        declined = legs.prefill(pair.other_prefill, history, handle.params, cache_salt=fresh_salt())
        retried = legs.cold(pair.other_prefill, pair.decode, history)

        assert declined.status == 500
        assert declined.json["error"]["code"] == 500
        assert declined.json["error"]["type"] == "InternalServerError"
        assert retried.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids

    def test_handle_says_when_it_expires_on_a_clock_of_decodes_own(self, pair: Pair, legs: Legs) -> None:
        long = legs.cold(pair.prefill, pair.decode, story("kept long", words=40)).handle
        brief = legs.cold(pair.prefill, pair.forgetful_decode, story("kept briefly", words=40)).handle

        # Both engines run on this machine, so that their monotonic clocks agree.
        kept_longer = long.params["remote_blocks_expiry_time"] - brief.params["remote_blocks_expiry_time"]
        assert kept_longer > 60


class TestUnreachableIssuer:
    @failure_of_stock
    @pytest.mark.parametrize(
        "changed", [{"remote_engine_id": "somebody-else"}, {"remote_port": 5999}], ids=["engine id", "port"]
    )
    def test_read_that_cannot_be_made_fails_and_the_handle_stays_good(
        self, pair: Pair, legs: Legs, changed: dict[str, Any]
    ) -> None:
        messages = story("an issuer that is not there")
        first = legs.cold(pair.prefill, pair.decode, messages)
        history = continued(messages, first)
        handle = pair.reusable(first, tokenize(pair.decode, history))

        # An engine id that was never seen makes prefill shake hands anew.
        failed = client.post(
            pair.other_prefill.url + CHAT,
            chat(
                history,
                max_tokens=1,
                cache_salt=fresh_salt(),
                kv_transfer_params={**handle.params, "remote_engine_id": f"unknown-{fresh_salt()}", **changed},
            ),
        )
        second = legs.turn(pair.other_prefill, pair.decode, history, handle.params, cache_salt=fresh_salt())

        assert failed.status == 500
        assert second.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids


class TestRejected:
    @pytest.mark.parametrize(
        ("fields", "status"),
        [({"model": "another"}, 404), ({"min_tokens": 5}, 400), ({"stream_options": {"include_usage": True}}, 400)],
        ids=["unknown model", "min_tokens", "stream_options"],
    )
    def test_request_refused_before_it_is_scheduled_leaves_the_handle_usable(
        self, pair: Pair, legs: Legs, fields: dict[str, Any], status: int
    ) -> None:
        messages, salt = story("refused at the door"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        history = continued(messages, first)
        handle = pair.reusable(first, tokenize(pair.decode, history))

        refused = legs.prefill(pair.other_prefill, history, handle.params, **fields)

        assert refused.status == status
        before = pair.other_prefill.metrics()
        second = legs.turn(pair.other_prefill, pair.decode, history, handle.params, cache_salt=salt)
        assert (pair.other_prefill.metrics() - before).external_hits == handle.tokens
        assert second.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids

    @pytest.mark.long
    def test_turn_that_ends_between_its_legs_leaves_prefills_blocks_to_their_lease(
        self, pair: Pair, legs: Legs
    ) -> None:
        messages, salt = story("decode refuses"), fresh_salt()
        first = legs.cold(pair.other_prefill, pair.decode, messages, cache_salt=salt)
        history = continued(messages, first)
        handle = pair.reusable(first, tokenize(pair.decode, history))
        reply = legs.prefill(pair.prefill, history, handle.params, cache_salt=salt)
        body = chat(history, model="another", kv_transfer_params=reply.json["kv_transfer_params"])

        refused = client.post(pair.decode.url + CHAT, body)

        assert refused.status == 404
        assert wait_until(lambda: holds_nothing(pair.decode))
        assert not holds_nothing(pair.prefill)
        # Half a minute. A decode engine that has other work may tell prefill sooner.
        assert wait_until(lambda: holds_nothing(pair.prefill), seconds=90)
        again = legs.turn(pair.prefill, pair.decode, history, COLD_PREFILL_PARAMS, cache_salt=salt)
        assert again.answer_ids == legs.cold(pair.other_prefill, pair.decode, history).answer_ids


def overwrite_decode(pair: Pair, legs: Legs) -> None:
    """Run so many other tokens through the decode engine that every free block holds something else."""
    written = 0
    while written < pair.decode.spec.kv_blocks:
        answer = legs.cold(pair.prefill, pair.decode, story(f"filler {written}", words=600))
        written += len(answer.retained_ids) // BLOCK
        legs.settle()
