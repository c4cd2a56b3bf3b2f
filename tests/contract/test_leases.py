"""Release and renewal by kvloop's plug-in: what is retained is freed at once, or kept for longer and read right."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from kvloop_connector.handle import KVHandle
from kvloop_connector.lease_ranks import LONGEST_LEASE_SECONDS
from kvloop_connector.lease_requests import RELEASE_PATH, RENEW_PATH
from tests.contract.conftest import Pair
from tests.contract.legs import Answer, Legs, continued, fresh_salt, holds_nothing, story, tokenize
from tests.harness import client
from tests.harness.client import Reply
from tests.harness.engines import Engine, wait_until
from tests.harness.fixtures import BRIEF_TTL_SECONDS


def ask(engine: Engine, path: str, *answers: Answer, **fields: Any) -> Reply:
    """Name the handles of these answers to the engine that issued them."""
    return client.post(
        engine.url + path, {"remote_request_ids": [each.handle.request_id for each in answers], **fields}
    )


def outcomes(engine: Engine, path: str, *answers: Answer, **fields: Any) -> list[str]:
    reply = ask(engine, path, *answers, **fields)
    assert reply.status == 200, reply.text
    return [entry["outcome"] for entry in reply.json["handles"]]


def renewed(engine: Engine, answer: Answer, *, seconds: float) -> dict[str, Any]:
    """The entry of a renewal that took place."""
    reply = ask(engine, RENEW_PATH, answer, seconds=seconds)
    assert reply.status == 200, reply.text
    (entry,) = reply.json["handles"]
    assert entry["outcome"] == "renewed"
    return dict(entry)


def released(legs: Legs, engine: Engine, *answers: Answer) -> None:
    """Release what a test leaves."""
    assert set(outcomes(engine, RELEASE_PATH, *answers)) == {"released"}
    for answer in answers:
        del legs.issued[answer.handle.request_id]
    assert wait_until(lambda: holds_nothing(engine))


def over(handle: KVHandle) -> bool:
    """Whether a handle's deadline has passed. On one machine all processes share the clock that it is on."""
    return time.perf_counter() >= float(handle.params["remote_blocks_expiry_time"])


def test_a_release_frees_the_blocks_at_once_and_is_counted_as_an_expiry(pair: Pair, legs: Legs) -> None:
    before = pair.decode.metrics()
    answer = legs.cold(pair.prefill, pair.decode, story("to be released by name"))
    assert pair.decode.metrics().kv_usage > 0

    released(legs, pair.decode, answer)

    assert not over(answer.handle), "freed only at its deadline"
    assert (pair.decode.metrics() - before).expired == 1


def test_a_release_frees_no_other_blocks(pair: Pair, legs: Legs) -> None:
    gone = legs.cold(pair.prefill, pair.decode, story("one of two"))
    alone = pair.decode.metrics().kv_usage
    kept = legs.cold(pair.prefill, pair.decode, story("the other of two"))
    both = pair.decode.metrics().kv_usage

    assert outcomes(pair.decode, RELEASE_PATH, gone) == ["released"]

    assert wait_until(lambda: pair.decode.metrics().kv_usage == pytest.approx(both - alone))
    assert outcomes(pair.decode, RENEW_PATH, gone, kept, seconds=600) == ["not_held", "renewed"]
    del legs.issued[gone.handle.request_id]
    released(legs, pair.decode, kept)


def test_a_renewed_handle_outlives_its_first_deadline_and_is_read_right_with_its_new_one(
    pair: Pair, legs: Legs
) -> None:
    decode, salt, before = pair.forgetful_decode, fresh_salt(), pair.forgetful_decode.metrics()
    first = legs.cold(pair.prefill, decode, story("kept for long"), cache_salt=salt)
    moved = first.handle.renewed(renewed(decode, first, seconds=600))
    untold = legs.cold(pair.prefill, decode, story("renewed, but nobody was told"), cache_salt=salt)
    renewed(decode, untold, seconds=600)
    control = legs.cold(pair.prefill, decode, story("kept no longer than usual"))

    assert wait_until(lambda: (decode.metrics() - before).expired == 1, seconds=8 * BRIEF_TTL_SECONDS)
    assert over(first.handle)
    assert over(untold.handle)
    assert outcomes(decode, RENEW_PATH, control, seconds=600) == ["not_held"]
    del legs.issued[control.handle.request_id]
    reads_right(pair, legs, first, moved, salt)
    is_declined(pair, legs, untold, salt)
    released(legs, decode, untold)


def reads_right(pair: Pair, legs: Legs, first: Answer, handle: KVHandle, salt: str) -> None:
    history = continued(story("kept for long"), first)
    reusable = pair.reusable(replace(first, params=dict(handle.params)), tokenize(pair.decode, history))
    before = pair.other_prefill.metrics()

    second = legs.turn(pair.other_prefill, pair.decode, history, reusable.params, cache_salt=salt)

    counted = pair.other_prefill.metrics() - before
    assert (counted.reads, counted.external_hits) == (1, reusable.tokens)
    assert second.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids


def is_declined(pair: Pair, legs: Legs, first: Answer, salt: str) -> None:
    """A handle that keeps its first deadline is not read after it, although its blocks are there."""
    history = continued(story("renewed, but nobody was told"), first)
    before = pair.other_prefill.metrics()

    reply = legs.prefill(pair.other_prefill, history, first.handle.params, cache_salt=salt)

    legs.account(first, pair.prefill, pair.forgetful_decode)
    counted = pair.other_prefill.metrics() - before
    assert counted.reads == 0
    if pair.kind.verifies:
        assert reply.json["kv_transfer_params"]["kvloop_reuse"] == {"outcome": "expired", "tokens": 0}
        legs.decode(pair.other_prefill, pair.decode, history, reply.json["kv_transfer_params"], cache_salt=salt)
    else:
        assert (reply.status, counted.expired) == (500, 1)


def test_no_renewal_goes_past_the_longest_lease(pair: Pair, legs: Legs) -> None:
    decode = pair.forgetful_decode
    answer = legs.cold(pair.prefill, decode, story("for ever, if one could"))

    entry = renewed(decode, answer, seconds=1_000_000)

    assert entry["seconds"] == pytest.approx(LONGEST_LEASE_SECONDS - BRIEF_TTL_SECONDS)
    assert renewed(decode, answer, seconds=2_000_000)["seconds"] == pytest.approx(0)
    released(legs, decode, answer)


def test_no_renewal_makes_a_lease_shorter(pair: Pair, legs: Legs) -> None:
    answer = legs.cold(pair.prefill, pair.decode, story("asked for less than there is"))

    assert renewed(pair.decode, answer, seconds=1)["seconds"] == 0
    assert not holds_nothing(pair.decode)
    released(legs, pair.decode, answer)


def test_what_is_gone_or_was_never_there_is_said_to_be(pair: Pair, legs: Legs) -> None:
    answer = legs.cold(pair.prefill, pair.decode, story("soon gone"))
    legs.settle()

    assert outcomes(pair.decode, RENEW_PATH, answer, seconds=600) == ["not_held"]
    assert outcomes(pair.decode, RELEASE_PATH, answer) == ["not_held"]
    legs.issued.clear()


def test_a_request_that_is_none_is_refused_and_the_engine_serves_on(pair: Pair, legs: Legs) -> None:
    answer = legs.cold(pair.prefill, pair.decode, story("asked wrongly"))

    reply = ask(pair.decode, RENEW_PATH, answer, seconds="long")

    assert (reply.status, reply.json["error"]["param"]) == (400, "seconds")
    assert ask(pair.decode, RELEASE_PATH, answer, force=True).json["error"]["param"] == "force"
    assert ask(pair.decode, RELEASE_PATH).status == 400
    released(legs, pair.decode, answer)


def test_an_engine_without_the_plug_in_has_no_such_path(pair: Pair, legs: Legs) -> None:
    for path in (RELEASE_PATH, RENEW_PATH):
        assert ask(pair.prefill, path).status == 404
