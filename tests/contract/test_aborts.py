"""A client that leaves, in each phase of a turn: the engines live on, nothing stays running or retained, and the turns
that follow are right.

No phase is waited for by time. A leg waits in the queue because what others hold leaves no memory for it; a read lasts
because the engine that is read from stands still; a prompt is computed for long because it is, in many pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from kvloop_connector.handle import COLD_PREFILL_PARAMS, RETAIN_PARAMS
from tests.contract.conftest import Pair, failure_of_stock, with_kvloops_connector
from tests.contract.legs import (
    BLOCK,
    CHAT,
    COMPLETIONS,
    Answer,
    Legs,
    Messages,
    chat,
    continued,
    fresh_salt,
    holds_nothing,
    ids_of,
    ids_request,
    leave,
    prefill_leg,
    story,
    streamed,
    tokenize,
)
from tests.harness.engines import Engine, wait_until
from tests.harness.metrics import EngineMetrics

HALF = 120 * BLOCK
"""Tokens of a prompt two of which leave an engine no memory for a third request, and fit into its context."""

soon = partial(wait_until, seconds=15)
"""Half the time for which a prefill engine keeps what no decode leg comes for: what is free by then did not wait."""

streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

Body = Mapping[str, Any]


class TestPrefillLeg:
    @with_kvloops_connector
    def test_cancelled_in_the_queue_has_its_handle_released(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("cancelled before it was scheduled"), fresh_salt()
        first = legs.cold(pair.other_prefill, pair.decode, messages, cache_salt=salt)

        cancelled_in_the_queue(pair, legs, continued(messages, first), first, salt)

        assert wait_until(partial(holds_nothing, pair.decode))
        goes_on(pair, legs, messages, first, salt)

    @failure_of_stock
    def test_cancelled_in_the_queue_leaves_its_handle_retained(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("cancelled before it was scheduled"), fresh_salt()
        first = legs.cold(pair.other_prefill, pair.decode, messages, cache_salt=salt)

        cancelled_in_the_queue(pair, legs, continued(messages, first), first, salt)

        assert not holds_nothing(pair.decode)
        goes_on(pair, legs, messages, first, salt, params=first.handle.params)

    def test_cancelled_while_it_reads(self, pair: Pair, legs: Legs) -> None:
        have_met(pair, legs)
        messages, salt = story("cancelled while it read"), fresh_salt()
        first = legs.cold(pair.other_prefill, pair.decode, messages, cache_salt=salt)
        history = continued(messages, first)
        handle = pair.reusable(first, tokenize(pair.decode, history))
        before = pair.prefill.metrics()

        with pair.decode.frozen():
            leave(
                pair.prefill,
                prefill_leg(history, handle.params, salt),
                once=lambda seen: seen.waiting_for_transfer == 1,
            )
            assert wait_until(lambda: pair.prefill.metrics().waiting == 0)
            assert pair.prefill.metrics().kv_usage > before.kv_usage, "the read still writes into its blocks"
        legs.issued.pop(first.handle.request_id)

        assert soon(lambda: has_freed(pair.prefill, before) and holds_nothing(pair.decode))
        assert (pair.prefill.metrics() - before).reads == 1
        goes_on(pair, legs, messages, first, salt)

    def test_cancelled_while_it_computes(self, pair: Pair, legs: Legs) -> None:
        salt = fresh_salt()
        told = ids_of(pair.decode, "cancelled while it computed", HALF)
        first = legs.complete(pair.prefill, pair.decode, told[: 8 * BLOCK], salt=salt)
        prompt = [*first.retained_ids, *told][:HALF]
        handle = pair.reusable(first, prompt)
        before = pair.other_prefill.metrics()

        leave(
            pair.other_prefill,
            ids_request(prompt, salt, max_tokens=1, kv_transfer_params=handle.params),
            once=lambda seen: seen.running == 1,
            path=COMPLETIONS,
        )
        legs.issued.pop(first.handle.request_id)

        assert wait_until(partial(holds_nothing, pair.decode))
        assert soon(lambda: has_freed(pair.other_prefill, before)), "it came to its end"
        assert (pair.other_prefill.metrics() - before).reads == 1
        again = legs.complete(pair.other_prefill, pair.decode, prompt, salt=salt)
        assert again.answer_ids == legs.complete(pair.prefill, pair.decode, prompt, salt=fresh_salt()).answer_ids


class TestDecodeLeg:
    @streamed_or_not
    def test_cancelled_in_the_queue(self, pair: Pair, legs: Legs, stream: bool) -> None:
        messages, salt = story("left before it was decoded"), fresh_salt()

        with full_of_retained(pair, legs):
            before = pair.prefill.metrics()
            body = decode_leg(pair, legs, messages, salt, stream=stream)
            leave(pair.decode, body, once=lambda seen: seen.waiting_for_memory == 1)

            assert wait_until(lambda: pair.decode.metrics().waiting == 0)
            assert soon(lambda: has_freed(pair.prefill, before)), "prefill was not told"

        assert wait_until(partial(holds_nothing, pair.decode))
        starts(pair, legs, messages, salt)

    @streamed_or_not
    def test_cancelled_while_it_reads(self, pair: Pair, legs: Legs, stream: bool) -> None:
        messages, salt = story("left while decode read"), fresh_salt()
        have_met(pair, legs)
        before, of_prefill = pair.decode.metrics(), pair.prefill.metrics()
        body = decode_leg(pair, legs, messages, salt, stream=stream)

        with pair.prefill.frozen():
            leave(pair.decode, body, once=lambda seen: seen.waiting_for_transfer == 1)
            assert wait_until(lambda: pair.decode.metrics().waiting == 0)
            assert not holds_nothing(pair.decode), "the read still writes into its blocks"

        assert soon(lambda: has_freed(pair.prefill, of_prefill) and holds_nothing(pair.decode))
        assert (pair.decode.metrics() - before).reads == 1
        starts(pair, legs, messages, salt)

    @streamed_or_not
    def test_cancelled_while_it_decodes(self, pair: Pair, legs: Legs, stream: bool) -> None:
        messages, salt = story("left while it was told"), fresh_salt()
        body = {**decode_leg(pair, legs, messages, salt, stream=stream), "max_tokens": 2000}

        if stream:
            with streamed(pair.decode, CHAT, body) as chunks:
                next(chunks)
                next(chunks)
                assert pair.decode.metrics().running == 1
        else:
            leave(pair.decode, body, once=lambda seen: seen.running == 1)

        assert wait_until(partial(holds_nothing, pair.decode))
        starts(pair, legs, messages, salt)

    @with_kvloops_connector
    def test_cancelled_while_decode_serves_alone(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("left while decode served alone"), fresh_salt()
        alone = chat(messages, cache_salt=salt, max_tokens=2000, kv_transfer_params=RETAIN_PARAMS)

        leave(pair.decode, alone, once=lambda seen: seen.running == 1)

        assert wait_until(partial(holds_nothing, pair.decode))
        starts(pair, legs, messages, salt)


def cancelled_in_the_queue(pair: Pair, legs: Legs, history: Messages, first: Answer, salt: str) -> None:
    """A prefill leg with the handle of ``first`` waits for memory, and its client leaves."""
    with full_of_unread_legs(pair, legs):
        leave(
            pair.prefill,
            prefill_leg(history, first.handle.params, salt),
            once=lambda seen: seen.waiting_for_memory == 1,
        )
        assert wait_until(lambda: pair.prefill.metrics().waiting == 0)
    legs.issued.pop(first.handle.request_id)


def goes_on(
    pair: Pair, legs: Legs, messages: Messages, first: Answer, salt: str, *, params: Body = COLD_PREFILL_PARAMS
) -> None:
    """The turn that was cancelled is played again on the same engines, in the same salt."""
    history = continued(messages, first)
    again = legs.turn(pair.prefill, pair.decode, history, params, cache_salt=salt)
    assert again.answer_ids == legs.cold(pair.other_prefill, pair.decode, history).answer_ids
    legs.settle()


def starts(pair: Pair, legs: Legs, messages: Messages, salt: str) -> None:
    """The first turn, which was cancelled, is played again, and another follows it."""
    first = legs.turn(pair.prefill, pair.decode, messages, COLD_PREFILL_PARAMS, cache_salt=salt)
    assert first.answer_ids == legs.cold(pair.other_prefill, pair.decode, messages).answer_ids
    history = continued(messages, first)
    handle = pair.reusable(first, tokenize(pair.decode, history))
    goes_on(pair, legs, messages, first, salt, params=handle.params)


def has_freed(prefill: Engine, before: EngineMetrics) -> bool:
    """Whether no request runs there and no more is held than before: legs of releases, which none will read."""
    seen = prefill.metrics()
    return seen.running == seen.waiting == 0 and seen.kv_usage <= before.kv_usage


def decode_leg(pair: Pair, legs: Legs, messages: Messages, salt: str, *, stream: bool) -> Body:
    """A decode leg, after its prefill leg."""
    reply = legs.prefill(pair.prefill, messages, cache_salt=salt)
    assert reply.status == 200, reply.text
    return chat(messages, cache_salt=salt, stream=stream, kv_transfer_params=reply.json["kv_transfer_params"])


def have_met(pair: Pair, legs: Legs) -> None:
    """Let the prefill and the decode engine shake hands in both directions, so that only a read is left to do."""
    legs.release(pair.prefill, legs.cold(pair.prefill, pair.decode, story("shaking hands", words=20)).handle)
    assert wait_until(partial(holds_nothing, pair.decode))


@contextmanager
def full_of_unread_legs(pair: Pair, legs: Legs) -> Iterator[None]:
    """Within this context the prefill engine waits for two decode legs, and has memory for little else."""
    prompts = [ids_of(pair.decode, f"what fills prefill {number}", HALF) for number in range(2)]
    salt = fresh_salt()
    waiting = [legs.prefill_ids(pair.prefill, prompt, salt=salt) for prompt in prompts]
    yield
    for prompt, params in zip(prompts, waiting, strict=True):
        read = legs.decode_ids(pair.prefill, pair.decode, prompt, params, salt=salt)
        legs.release(pair.prefill, read.handle)


@contextmanager
def full_of_retained(pair: Pair, legs: Legs) -> Iterator[None]:
    """Within this context the decode engine retains two long conversations, and has memory for little else."""
    for number in range(2):
        prompt = ids_of(pair.decode, f"what fills decode {number}", HALF)
        legs.complete(pair.prefill, pair.decode, prompt, salt=fresh_salt())
    yield
    legs.settle()
