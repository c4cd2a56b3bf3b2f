"""A history that differs from what decode retained: the blocks before the difference are read, and no others.

Prompts are token ids, so that the difference is exactly where a test wants it.
"""

from __future__ import annotations

import pytest

from tests.contract.conftest import Pair
from tests.contract.legs import (
    BLOCK,
    Legs,
    fresh_salt,
    ids_of,
    story,
    tokenize,
)
from tests.harness.fixtures import PIECE

THRESHOLD = 64
BLOCKS = 5
POSITIONS = [boundary * BLOCK + offset for boundary in range(1, BLOCKS) for offset in (-1, 0, 1)]


@pytest.mark.parametrize("position", POSITIONS)
def test_exactly_the_whole_blocks_before_the_difference_are_read(pair: Pair, legs: Legs, position: int) -> None:
    salt = fresh_salt()
    told = tokenize(pair.decode, story(f"a difference at {position}", words=400))[: BLOCKS * BLOCK]
    first = legs.complete(pair.prefill, pair.decode, told, salt=salt)
    # One of the same ids, so that it is a text that the model could have met.
    other = next(token for token in told if token != told[position])
    prompt = [*told[:position], other, *told[position + 1 :], *told[:BLOCK]]
    handle = pair.reusable(first, prompt)
    before = pair.other_prefill.metrics()

    second = legs.complete(pair.other_prefill, pair.decode, prompt, handle.params, salt=salt)

    counted = pair.other_prefill.metrics() - before
    whole = position // BLOCK * BLOCK
    assert handle.tokens == whole
    assert counted.external_hits == (whole if whole >= THRESHOLD else 0)
    assert counted.failed_transfers == 0
    assert second.answer_ids == legs.complete(pair.prefill, pair.decode, prompt, salt=fresh_salt()).answer_ids
    if pair.kind.verifies:
        assert second.reuse == {"outcome": "read" if whole else "diverged", "tokens": whole}


@pytest.mark.parametrize("shorter", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_prompt_that_ends_within_what_is_retained(pair: Pair, legs: Legs, shorter: int) -> None:
    salt = fresh_salt()
    told = tokenize(pair.decode, story(f"cut by {shorter}", words=400))[: BLOCKS * BLOCK]
    first = legs.complete(pair.prefill, pair.decode, told, salt=salt)
    prompt = told[: len(told) - shorter]
    handle = pair.reusable(first, prompt)
    before = pair.other_prefill.metrics()

    second = legs.complete(pair.other_prefill, pair.decode, prompt, handle.params, salt=salt)

    assert (pair.other_prefill.metrics() - before).external_hits == handle.tokens == len(prompt) // BLOCK * BLOCK
    assert second.answer_ids == legs.complete(pair.prefill, pair.decode, prompt, salt=fresh_salt()).answer_ids


def test_prompt_over_many_blocks_is_read_whole(pair: Pair, legs: Legs) -> None:
    salt = fresh_salt()
    told = tokenize(pair.decode, story("a long history", words=600))
    told = told[: len(told) // BLOCK * BLOCK]
    first = legs.complete(pair.prefill, pair.decode, told, salt=salt)
    prompt = [*first.retained_ids, *told[: 2 * BLOCK]]
    handle = pair.reusable(first, prompt)
    before = pair.other_prefill.metrics()

    second = legs.complete(pair.other_prefill, pair.decode, prompt, handle.params, salt=salt)

    counted = pair.other_prefill.metrics() - before
    assert counted.external_hits == handle.tokens == len(told) > 20 * BLOCK
    assert second.answer_ids == legs.complete(pair.prefill, pair.decode, prompt, salt=fresh_salt()).answer_ids


@pytest.mark.parametrize("suffix", [1, PIECE - 1, PIECE, PIECE + 1, 7 * PIECE + 1])
def test_what_is_not_read_is_computed_in_pieces_upon_it(pair: Pair, legs: Legs, suffix: int) -> None:
    salt = fresh_salt()
    told = ids_of(pair.decode, f"{suffix} more", BLOCKS * BLOCK + suffix)
    first = legs.complete(pair.prefill, pair.decode, told[: BLOCKS * BLOCK], salt=salt)
    prompt = [*told[: BLOCKS * BLOCK], *reversed(told[-suffix:])]
    handle = pair.reusable(first, prompt)
    before = pair.other_prefill.metrics()

    second = legs.complete(pair.other_prefill, pair.decode, prompt, handle.params, salt=salt)

    counted = pair.other_prefill.metrics() - before
    assert (counted.external_hits, counted.computed) == (BLOCKS * BLOCK, suffix)
    assert second.answer_ids == legs.complete(pair.prefill, pair.decode, prompt, salt=fresh_salt()).answer_ids
