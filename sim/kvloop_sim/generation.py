"""KV values, and text as a function of them.

One value stands for the keys and values of one token in every layer. As on a real model it is a function of the token
and of everything before it, and the next token is a function of all the values that a request attends to, in order,
never of its prompt. A request that reads another text's KV therefore continues that other text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvloop_sim import tokenizer

_MODULUS: Final = 2**61 - 1
_KV_FACTOR: Final = 1_000_003_000_133
_ATTENTION_FACTOR: Final = 1_442_695_040_889
_MASK: Final = 2**64 - 1

_CONSONANTS: Final = b"bcdfghjklmnprstvz"
_VOWELS: Final = b"aeiou"

REASONING_LIMIT: Final = 1_000_000
LIKELY: Final = 32
"""How many tokens have a probability."""

_RANK_FACTOR: Final = 0xD1342543DE82EF95
_STEEPNESS: Final = 0.25


def kv_value(previous: int, token: int) -> int:
    """The KV of ``token`` computed upon a context whose last value is ``previous``; below 2**61."""
    return (previous * _KV_FACTOR + token + 1) % _MODULUS


def kv_seed(model: str) -> int:
    """What the KV of a sequence's first token is computed upon: the model's weights."""
    return int.from_bytes(model.encode("utf-8"), "big") % _MODULUS


def attend(attention: int, values: Iterable[int]) -> int:
    """The attention state after ``values``, in order; 0 before any."""
    for value in values:
        attention = (attention * _ATTENTION_FACTOR + value + 1) % _MODULUS
    return attention


@dataclass(frozen=True, slots=True)
class Style:
    """How the simulated model writes.

    eos_every: mean length of an answer in tokens; 0 never ends by itself.
    reasoning_tokens: words inside ``<think>…</think>`` at the start of a chat answer; 0 for none.
    """

    eos_every: int = 64
    reasoning_tokens: int = 0


def next_token(attention: int, *, position: int, after: int, may_end: bool, style: Style, child: int = 0) -> int:
    """The next token of an answer.

    position: tokens of this answer so far. after: the token before it; a word gets no space after a message boundary
    or a newline, so that the text tokenizes back to the very ids. child: which of ``n`` samples of one request.
    """
    noise = _mix(attention + child * 0x9E3779B97F4A7C15)
    fresh = after >= tokenizer.END_OF_TEXT or after in _LINE_ENDS
    if style.reasoning_tokens and after in _LINE_ENDS and position == 0:
        return tokenizer.THINK_START
    thinking = style.reasoning_tokens and position <= style.reasoning_tokens
    if style.reasoning_tokens and position == style.reasoning_tokens + 1:
        return tokenizer.THINK_END
    if may_end and style.eos_every and position and not thinking and not fresh and (noise >> 40) % style.eos_every == 0:
        return tokenizer.MESSAGE_END
    word = _word(noise)
    return tokenizer.pack(word if fresh else b" " + word)


def likely_tokens(attention: int, token: int, errors: Iterable[float]) -> list[tuple[int, float]]:
    """Log-probabilities of ``token``, which was chosen, and of others that might have been, the likeliest first.

    As the tokens themselves they follow from what was attended to. errors: what each is off by, one for each of
    ``LIKELY`` tokens.
    """
    logits = {token: 0.0}
    for rank in range(1, LIKELY):
        noise = _mix(attention + rank * _RANK_FACTOR)
        logits.setdefault(tokenizer.pack(b" " + _word(noise)), -rank * _STEEPNESS - (noise >> 40) % 1000 / 4000)
    found = {word: logit + error for (word, logit), error in zip(logits.items(), errors, strict=False)}
    total = math.log(sum(map(math.exp, found.values())))
    return sorted(((word, logit - total) for word, logit in found.items()), key=lambda each: -each[1])


def values_of(tokens: Sequence[int], seed: int) -> list[int]:
    """The KV of a whole sequence computed from nothing."""
    values: list[int] = []
    previous = seed
    for token in tokens:
        previous = kv_value(previous, token)
        values.append(previous)
    return values


_LINE_ENDS: Final = frozenset({tokenizer.pack(b"\n")})


def _word(noise: int) -> bytes:
    first, vowel, last = noise & 0xFF, noise >> 8 & 0xFF, noise >> 16 & 0xFF
    return bytes(
        (
            _CONSONANTS[first % len(_CONSONANTS)],
            _VOWELS[vowel % len(_VOWELS)],
            _CONSONANTS[last % len(_CONSONANTS)],
        )
    )


def _mix(state: int) -> int:
    # The finalizer of splitmix64: neighbouring states give unrelated words.
    state = state * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state ^ state >> 31
