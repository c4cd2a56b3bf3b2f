"""The tokenizer is reversible, and histories that only grow have tokens that only grow."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvloop_sim import generation, tokenizer
from kvloop_sim.generation import Style

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(texts)
def test_text_comes_back(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(texts)
def test_ids_fit_in_32_bits_and_are_in_the_vocabulary(text: str) -> None:
    for token in tokenizer.encode(text):
        assert 0 <= token < 2**32
        assert tokenizer.is_token(token)


@given(texts, texts, st.sampled_from([*tokenizer.SPECIAL_TEXTS, "\n"]))
def test_what_follows_a_boundary_does_not_change_the_tokens_before_it(before: str, after: str, boundary: str) -> None:
    assert tokenizer.encode(before) + tokenizer.encode(boundary) == tokenizer.encode(before + boundary)
    assert tokenizer.encode(before + boundary + after)[: len(tokenizer.encode(before)) + 1] == tokenizer.encode(
        before + boundary
    )


@given(
    start=st.sampled_from([tokenizer.MESSAGE_START, tokenizer.encode("\n")[0], tokenizer.encode("word")[0]]),
    state=st.integers(0, 2**61 - 2),
    reasoning=st.integers(0, 5),
)
def test_generated_tokens_are_what_their_text_tokenizes_to(start: int, state: int, reasoning: int) -> None:
    tokens: list[int] = []
    style = Style(eos_every=16, reasoning_tokens=reasoning)
    while len(tokens) < 40 and tokens[-1:] != [tokenizer.MESSAGE_END]:
        after = tokens[-1] if tokens else start
        tokens.append(generation.next_token(state, position=len(tokens), after=after, may_end=True, style=style))
        state = generation.attend(state, [tokens[-1]])

    assert tokenizer.encode(tokenizer.decode([start, *tokens])) == [start, *tokens]


@pytest.mark.parametrize("token", [-1, 2**32, 0xFF0000FF, 0xC3FFFFFF, 0xFFFFFFFF])
def test_id_outside_the_vocabulary_is_refused(token: int) -> None:
    assert not tokenizer.is_token(token)
    with pytest.raises(ValueError, match="out of vocabulary"):
        tokenizer.decode([token])


def test_special_tokens_bound_messages_and_can_be_left_out_of_text() -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|><think>")

    assert tokenizer.decode(ids, skip_control=True) == "hi<think>"
    assert len(ids) == 4


def test_a_lone_surrogate_is_replaced() -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
