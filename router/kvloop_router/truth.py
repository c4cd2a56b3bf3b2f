"""Whether what was reused gives the first token that computing anew gives: which turns are looked at, and the verdict.

A prefill leg answers with the log-probabilities of the likeliest first tokens. After a pull they follow from KV that
came from elsewhere; under a salt that nobody else has, the same prompt is computed anew. The two are never equal to the
last bit: sums are taken in another order where a prompt is computed in other pieces or in another batch, and bfloat16
keeps eight bits of them. How far two answers to one prompt are apart with nothing reused is measured beside, and only
what is far beyond it counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

TOP_TOKENS = 20
"""How many of the likeliest tokens are compared; the most that vLLM tells unless ``--max-logprobs`` says otherwise.

Many, since the first may be settled whatever was said before: ``<think>``, or a tool's name."""

FLOOR = 0.5
"""Nats a token. What is less is no mismatch: logits of bfloat16 between 32 and 64 are a quarter of one apart."""

FACTOR = 4.0
"""How many times further apart than what was computed anew twice is still no mismatch."""

MOST = 2.0
"""Nats a token. Where more than this would have to be let pass, nothing can be told."""

FIRST_TURNS = 32
"""A pair is first looked at after so many warm turns, or sooner where every turn in fewer is looked at."""

_CLIPPED = 5.0
_REMEMBERED = 64

FirstToken = Mapping[str, float]
"""Log-probabilities of the likeliest first tokens, by token."""


class Outcome(StrEnum):
    """What came of a sample."""

    AGREES = "agrees"
    MISMATCH = "mismatch"
    """Further apart than computing anew ever brings about: what was reused is not this prompt's."""
    NOISY = "noisy"
    """The engine differs so much from itself that nothing can be told."""
    CALIBRATED = "calibrated"
    """Nothing was compared: how far the engine differs from itself was measured for the first time."""
    BUSY = "busy"
    """Put off: the prefill engine has other work."""
    FAILED = "failed"
    """The engine did not answer, or its answer had no log-probabilities."""
    REFUSED = "refused"
    """The engine gives no log-probabilities, or fewer: no turn that it prefills is looked at."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """distance: between the warm turn and what was computed anew. noise: between what was computed anew twice.

    tolerance: the largest distance that is let pass. All in nats a token.
    """

    outcome: Outcome
    distance: float
    noise: float
    tolerance: float


@dataclass(slots=True)
class Noise:
    """How far apart an engine's own answers to one prompt were, of late. ``floor``: what is less is no mismatch."""

    floor: float = FLOOR
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def add(self, distance: float) -> None:
        """Remember one more, and forget the oldest."""
        self._seen.append(distance)

    @property
    def tolerance(self) -> float:
        """The largest distance that is let pass."""
        return max(self.floor, FACTOR * max(self._seen, default=0.0))


def first_token(answer: Mapping[str, Any]) -> FirstToken | None:
    """The log-probabilities in the answer to a leg that asked for them; None where it has none."""
    try:
        told = answer["choices"][0]["logprobs"]
        if "content" in told:
            found = {each["token"]: each["logprob"] for each in told["content"][0]["top_logprobs"]}
        else:
            found = dict(told["top_logprobs"][0])
    except (KeyError, IndexError, TypeError):
        return None
    return found if found and all(map(_is_finite, found.values())) else None


def distance(one: FirstToken, other: FirstToken) -> float:
    """How far apart two answers are: the mean difference of a token's log-probabilities over all tokens of either.

    By how much all of them differ alike is left out: where one token has nearly all of the probability, its rounding
    moves all others. What is not among the likeliest is no likelier than the last of them; it differs by at least that.
    """
    alike = median([one[token] - other[token] for token in one.keys() & other.keys()] or [0.0])
    least, others_least = min(one.values()) - alike, min(other.values())
    total = 0.0
    tokens = one.keys() | other.keys()
    for token in tokens:
        if token not in other:
            difference = max(0.0, one[token] - alike - others_least)
        elif token not in one:
            difference = max(0.0, other[token] - least)
        else:
            difference = abs(one[token] - alike - other[token])
        # A few tokens that a grammar forbids, at -9999, do not speak for all.
        total += min(difference, _CLIPPED)
    return total / len(tokens)


def judge(warm: FirstToken, anew: FirstToken, again: FirstToken, noise: Noise) -> Judgement:
    """The verdict on a warm turn whose prompt was computed anew twice. What is learnt of the noise is remembered."""
    between = distance(anew, again)
    noise.add(between)
    apart, tolerance = min(distance(warm, anew), distance(warm, again)), noise.tolerance
    outcome = Outcome.AGREES if apart <= tolerance else Outcome.MISMATCH
    return Judgement(outcome if tolerance <= MOST else Outcome.NOISY, apart, between, tolerance)


class Schedule:
    """Which warm turns of a pair are looked at: one in ``every``, counted; 0 for none."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._turns = 0
        self._due_at = min(every, FIRST_TURNS)

    def count(self) -> None:
        """One more warm turn."""
        self._turns += 1

    @property
    def next_is_due(self) -> bool:
        """Whether the next warm turn is to be looked at."""
        return self._every > 0 and self._turns + 1 >= self._due_at

    @property
    def due(self) -> bool:
        """Whether the latest one is."""
        return self._every > 0 and self._turns >= self._due_at

    def start_over(self) -> None:
        """One was looked at."""
        self._turns, self._due_at = 0, self._every


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
