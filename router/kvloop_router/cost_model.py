"""How long engines take: the time of a leg as a linear function of its tokens. Pure.

Computing: ``fixed + a·uncached + b·uncached·context + c·context``, where uncached tokens are computed upon a context
whose KV is there. The third term is attention's; the fourth stands for what an engine does once for the whole context,
such as reading its KV. Reading KV from another engine: ``fixed + d·tokens``.

The coefficients are fitted to the legs that the router itself sees (``fit``), for each engine by itself. The priors
follow the published curves for Qwen3-32B on two p5en.48xlarge over EFA; of them, the proportions count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvloop_router import fit
from kvloop_router.fit import Fit

_THOUSAND = 1e3
_MILLION = 1e6

COMPUTE_PRIOR = (0.051, 0.0163, 0.0002, 0.008)
"""Seconds: of a step, and for a thousand uncached tokens, a thousand times a thousand context tokens, a thousand
context tokens."""
PULL_PRIOR = (0.005, 0.005)
"""Seconds: of a read, and for a thousand tokens."""
_COMPUTE_TRUST = (fit.TRUST, fit.TRUST, fit.TRUST, 0.5)
_PULL_TRUST = (0.002, 0.002)
"""A warm leg's context is what it reads: how long it takes by the token can be either's doing. Networks differ by more
than engines do."""
FIRST_STEP = 0.011
"""Seconds of the decode step that follows a decode leg's read."""


class Work(NamedTuple):
    """Tokens that a leg computes, those before them whose KV is there or is read first, and those that are read."""

    uncached: int
    context: int = 0
    pulled: int = 0


def compute_features(work: Work) -> tuple[float, float, float, float]:
    """What computing depends on."""
    if work.uncached <= 0:
        return (0.0, 0.0, 0.0, 0.0)
    # Token i of those that are computed attends to context + i tokens.
    attended = work.context + work.uncached / 2
    return (1.0, work.uncached / _THOUSAND, work.uncached * attended / _MILLION, work.context / _THOUSAND)


def pull_features(work: Work) -> tuple[float, float]:
    """What reading from another engine depends on."""
    return (1.0, work.pulled / _THOUSAND) if work.pulled > 0 else (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """How fast a prefill engine is. A leg that reads shows both together, so that both are one model."""

    fit: Fit

    def compute_seconds(self, work: Work) -> float:
        """To compute it, once what it reads is there."""
        return fit.predict(self.fit, (*compute_features(work), 0.0, 0.0))

    def pull_seconds(self, work: Work) -> float:
        """To read what it reads."""
        return fit.predict(self.fit, (0.0, 0.0, 0.0, 0.0, *pull_features(work)))

    def after(self, work: Work, seconds: float) -> PrefillSpeed:
        """After a leg that had the engine for itself for ``seconds``."""
        return PrefillSpeed(fit.observe(self.fit, (*compute_features(work), *pull_features(work)), seconds))


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """How fast a decode engine comes to an answer's first token.

    pull: of legs that read from prefill, their first step with it. compute: of legs that it computes alone; None as
    long as there was none.
    """

    pull: Fit
    compute: Fit | None = None

    def pull_seconds(self, work: Work) -> float:
        """To read what it reads, and make the first token."""
        return fit.predict(self.pull, pull_features(work))

    def compute_seconds(self, work: Work, like: PrefillSpeed, caution: float) -> float:
        """To compute it alone. Where that was never seen: as long as the prefill engine ``like`` takes, times
        ``caution``."""
        if self.compute is None:
            return caution * like.compute_seconds(work)
        return fit.predict(self.compute, compute_features(work))

    def after_pull(self, work: Work, seconds: float) -> DecodeSpeed:
        """After a leg that read from prefill and had its first token after ``seconds``."""
        return DecodeSpeed(fit.observe(self.pull, pull_features(work), seconds), self.compute)

    def after_compute(self, work: Work, seconds: float, like: PrefillSpeed) -> DecodeSpeed:
        """After a leg that it computed alone, and that had its first token after ``seconds``."""
        own = self.compute or fit.begin(_positive(like.fit.coefficients[:4], COMPUTE_PRIOR), _COMPUTE_TRUST)
        return DecodeSpeed(self.pull, fit.observe(own, compute_features(work), seconds))


def prefill_speed(like: PrefillSpeed | None = None) -> PrefillSpeed:
    """Of a prefill engine that nothing is known of, but that it is of one kind with ``like``."""
    prior = (*COMPUTE_PRIOR, *PULL_PRIOR)
    trust = (*_COMPUTE_TRUST, *_PULL_TRUST)
    return PrefillSpeed(fit.begin(_positive(like.fit.coefficients, prior) if like else prior, trust))


def decode_speed(like: DecodeSpeed | None = None) -> DecodeSpeed:
    """Of a decode engine that nothing is known of, but that it is of one kind with ``like``."""
    prior = (FIRST_STEP + PULL_PRIOR[0], PULL_PRIOR[1])
    if like is None:
        return DecodeSpeed(fit.begin(prior))
    computes = None
    if like.compute is not None:
        computes = fit.begin(_positive(like.compute.coefficients, COMPUTE_PRIOR), _COMPUTE_TRUST)
    return DecodeSpeed(fit.begin(_positive(like.pull.coefficients, prior)), computes)


def _positive(learned: tuple[float, ...], prior: tuple[float, ...]) -> tuple[float, ...]:
    """Coefficients that were learned, as a prior: of one that was fitted to nothing, a small part of the usual one,
    measured by what the others are of theirs."""
    size = sum(learned) / sum(prior)
    return tuple([max(value, usual * size / 100) or usual for value, usual in zip(learned, prior, strict=True)])
