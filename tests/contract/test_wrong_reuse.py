"""Stock engines compare no tokens: what a handle does to a history that differs, and what trimming repairs.

Each test shows both, the wrong text with the untrimmed handle and the right one with the trimmed handle, on the same
engines. The salts are fresh, so that what is poisoned here poisons nobody else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract.conftest import Pair, failure_of_stock
from tests.contract.legs import (
    BLOCK,
    Answer,
    Legs,
    Messages,
    common_prefix,
    continued,
    fresh_salt,
    story,
    tokenize,
    trimmed_to,
)

pytestmark = failure_of_stock

History = Callable[[Messages, Answer], Messages]


def edited(messages: Messages, answer: Answer) -> Messages:
    """The user swapped two words in the middle of what was said first, so that as many tokens are left."""
    system, user = messages
    middle = len(user["content"]) // 2
    text = user["content"]
    changed = {**user, "content": text[:middle] + text[middle:].replace("old town", "town old", 1)}
    return continued([system, changed], answer)


def shortened(messages: Messages, answer: Answer) -> Messages:
    """The client compacted the first message, and dropped its beginning."""
    system, user = messages
    return continued([system, {**user, "content": user["content"][200:]}], answer)


def regenerated(messages: Messages, answer: Answer) -> Messages:
    """The client dropped the answer and the end of its message, and asks again."""
    system, user = messages
    return [system, {**user, "content": user["content"][:-300]}]


class TestHistoryThatDiffers:
    @pytest.mark.parametrize("change", [edited, shortened, regenerated])
    def test_untrimmed_handle_gives_a_wrong_text_and_the_trimmed_one_the_right_text(
        self, pair: Pair, legs: Legs, change: History
    ) -> None:
        messages = story(f"a history that is {change.__name__}")
        first = legs.cold(pair.prefill, pair.decode, messages)
        again = legs.cold(pair.prefill, pair.decode, messages)
        history = change(messages, first)
        prompt = tokenize(pair.decode, history)
        assert common_prefix(prompt, first.retained_ids) < min(len(prompt), first.handle.num_tokens + 1)
        right = legs.cold(pair.prefill, pair.decode, history).answer_ids

        wrong = legs.turn(pair.other_prefill, pair.decode, history, first.handle.params, cache_salt=fresh_salt())
        repaired = trimmed_to(again.handle, again.retained_ids, prompt)
        mended = legs.turn(pair.other_prefill, pair.decode, history, repaired.params, cache_salt=fresh_salt())

        assert wrong.answer_ids != right
        assert mended.answer_ids == right

    def test_edited_history_is_answered_as_if_it_were_the_old_one(self, pair: Pair, legs: Legs) -> None:
        messages = story("an edit of the same length")
        first = legs.cold(pair.prefill, pair.decode, messages)
        old, new = continued(messages, first), edited(messages, first)
        assert len(tokenize(pair.decode, old)) == len(tokenize(pair.decode, new))
        answer_to_old = legs.cold(pair.prefill, pair.decode, old).answer_ids
        answer_to_new = legs.cold(pair.prefill, pair.decode, new).answer_ids

        answered = legs.turn(pair.other_prefill, pair.decode, new, first.handle.params, cache_salt=fresh_salt())

        assert answered.answer_ids == answer_to_old != answer_to_new

    def test_wrong_blocks_stay_in_the_prefix_caches(self, pair: Pair, legs: Legs) -> None:
        messages = story("a poisoned cache")
        first = legs.cold(pair.prefill, pair.decode, messages)
        history, salt = edited(messages, first), fresh_salt()
        right = legs.cold(pair.prefill, pair.decode, history).answer_ids
        wrong = legs.turn(pair.other_prefill, pair.decode, history, first.handle.params, cache_salt=salt)

        # No handle any more, only the salt under which both engines keep the blocks.
        later = legs.cold(pair.other_prefill, pair.decode, history, cache_salt=salt)

        assert later.answer_ids == wrong.answer_ids != right

    def test_trimming_reads_no_more_than_the_common_prefix(self, pair: Pair, legs: Legs) -> None:
        messages = story("only what is common")
        first = legs.cold(pair.prefill, pair.decode, messages)
        history = edited(messages, first)
        prompt = tokenize(pair.decode, history)
        handle = trimmed_to(first.handle, first.retained_ids, prompt)
        before = pair.other_prefill.metrics()

        legs.turn(pair.other_prefill, pair.decode, history, handle.params, cache_salt=fresh_salt())

        counted = pair.other_prefill.metrics() - before
        assert counted.external_hits == common_prefix(prompt, first.retained_ids) // BLOCK * BLOCK > 0
