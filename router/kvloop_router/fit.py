"""A linear model that is fitted while it is used: recursive least squares with forgetting. Pure: state in, state out.

Made for durations, which come with three troubles. What was measured long ago may hold no more: each observation takes
a little from the weight of those before it. A few are far off, by something that the model does not know of: what lies
far outside of the usual error counts for less. And what was not seen for a while cannot be told from what was seen: a
prior stays in for ever, so that nothing is ever undetermined. Of the prior only the proportions count; how large it is
as a whole follows the observations.

It is kept in the information form (sums of products, and a solution of them), which cannot lose its symmetry or wind
up, as a recursion on the covariance does. Errors are relative, since long durations vary by more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from math import exp, isfinite, log
from operator import mul

_MEMORY = 100.0
"""An observation counts for 1/e of itself after so many more."""
_KEPT = exp(-1.0 / _MEMORY)
TRUST = 0.02
"""What a prior's coefficient counts for, in observations to which nothing else contributes, if nothing else is said."""
_FLOOR = 0.002
"""Seconds, added to what an error is relative to: nobody minds a millisecond."""
_LEARNING = 8
"""So many observations are all taken for what they are."""
_USUAL = 2.0
"""An error of more than so many times the usual one counts for less."""
_SPREAD_MEMORY = 10.0
_LEAST_SPREAD = 0.02
_SIZE_MEMORY = 32
_SIZE_LIMIT = log(1e4)
"""The prior may be off by a factor of ten thousand in either direction: an accelerator, a laptop."""
_LONGEST = 3600.0
_LARGEST_FEATURE = 1e6
_SOLVE_EVERY = 8


_CEILING = 100.0
LARGEST = _CEILING * 1e4
"""No coefficient is ever more than so many times the prior's."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The state. ``coefficients`` are never negative, and never larger than ``LARGEST`` times the prior's.

    prior: coefficients that are expected, all above 0. trust: what each of them counts for, in observations; where two
        could explain what was seen, the one that is trusted less gives way.
    size: logarithm of what the prior is multiplied with.
    products, moments: weighted sums of features times features (rows of the upper triangle) and times the outcome.
    spread: the usual relative error. count: observations so far.
    """

    prior: tuple[float, ...]
    trust: tuple[float, ...]
    coefficients: tuple[float, ...]
    products: tuple[float, ...]
    moments: tuple[float, ...]
    size: float = 0.0
    spread: float = 1.0
    count: int = 0


def begin(prior: Sequence[float], trust: Sequence[float] | None = None) -> Fit:
    """Nothing was observed yet. Raises ValueError for a prior, or a trust, that is not positive and finite."""
    size = len(prior)
    own, trusted = tuple(prior), tuple(trust or (TRUST,) * size)
    if len(trusted) != size or not all(isfinite(value) and value > 0 for value in (*own, *trusted)):
        raise ValueError("a prior's coefficients are positive, and each is trusted")
    return Fit(own, trusted, own, (0.0,) * (size * (size + 1) // 2), (0.0,) * size)


def predict(fit: Fit, features: Sequence[float]) -> float:
    """What the model expects for ``features``."""
    expected: float = sum(map(mul, fit.coefficients, features))
    return expected


def observe(fit: Fit, features: Sequence[float], outcome: float) -> Fit:
    """The state after one more observation; one that cannot be (not finite, negative, nothing) changes nothing."""
    if not 0 < outcome <= _LONGEST or len(features) != len(fit.prior):
        return fit
    for value in features:
        if not 0 <= value <= _LARGEST_FEATURE:
            return fit
    expected: float = sum(map(mul, fit.prior, features))
    if expected <= 0:
        return fit
    if not fit.count:
        # Nothing was learned that could be told from the prior: take its size from this.
        fit = _resized(fit, log(outcome / expected))
    predicted = predict(fit, features)
    error = abs(outcome - predicted) / (_FLOOR + predicted)
    weight = 1.0
    if fit.count >= _LEARNING and error > _USUAL * fit.spread:
        weight = _USUAL * fit.spread / error
    weight /= (_FLOOR + max(predicted, _FLOOR)) ** 2
    return _learned(fit, features, outcome, weight, error, log(outcome / expected))


def _learned(fit: Fit, features: Sequence[float], outcome: float, weight: float, error: float, size: float) -> Fit:
    products = tuple(
        [
            product * _KEPT + weight * left * right
            for product, (left, right) in zip(fit.products, combinations_with_replacement(features, 2), strict=True)
        ]
    )
    moments = tuple(
        [moment * _KEPT + weight * feature * outcome for moment, feature in zip(fit.moments, features, strict=True)]
    )
    count = fit.count + 1
    # Clipped, so that one that is far off moves the usual error by little, and many of them move it all the same.
    seen = min(error, 3.0 * fit.spread)
    spread = max(_LEAST_SPREAD, fit.spread + (seen - fit.spread) / min(count, _SPREAD_MEMORY))
    moved = fit.size + (_clipped(size, fit.size, spread) - fit.size) / min(count, _SIZE_MEMORY)
    moved = max(-_SIZE_LIMIT, min(_SIZE_LIMIT, moved))
    learned = Fit(fit.prior, fit.trust, fit.coefficients, products, moments, moved, spread, count)
    due = count <= _SIZE_MEMORY or count % _SOLVE_EVERY == 0
    return replace(learned, coefficients=_solved(learned)) if due else learned


def _clipped(value: float, around: float, spread: float) -> float:
    most = _USUAL * max(spread, _LEAST_SPREAD)
    return max(around - most, min(around + most, value))


def _resized(fit: Fit, size: float) -> Fit:
    size = max(-_SIZE_LIMIT, min(_SIZE_LIMIT, size))
    factor = exp(size)
    return replace(fit, size=size, coefficients=tuple([value * factor for value in fit.prior]))


def _solved(fit: Fit) -> tuple[float, ...]:
    """The coefficients that fit best within their bounds."""
    size = len(fit.prior)
    means = [value * exp(fit.size) for value in fit.prior]
    matrix = [[0.0] * size for _ in range(size)]
    index = 0
    for row in range(size):
        for column in range(row, size):
            matrix[row][column] = matrix[column][row] = fit.products[index]
            index += 1
    target = list(fit.moments)
    least = [trust / (mean * mean) for trust, mean in zip(fit.trust, means, strict=True)]
    for row, strength in enumerate(least):
        matrix[row][row] += strength
        target[row] += strength * means[row]
    bound: dict[int, float] = {}
    while True:
        free = [row for row in range(size) if row not in bound]
        found = _solution(matrix, target, least, free, bound)
        outside = {
            row: limit
            for row, value in zip(free, found, strict=True)
            if (limit := max(0.0, min(_CEILING * means[row], value))) != value
        }
        if not outside:
            values = {**dict(zip(free, found, strict=True)), **bound}
            return tuple([values[row] for row in range(size)])
        bound.update(outside)


def _solution(
    matrix: Sequence[Sequence[float]],
    target: Sequence[float],
    least: Sequence[float],
    free: Sequence[int],
    bound: Mapping[int, float],
) -> list[float]:
    """The free unknowns of a positive definite system, the bound ones having their values: Gauss's elimination.

    least: no pivot is smaller than what the prior adds to it, but for rounding.
    """
    rows = [
        [*(matrix[row][column] for column in free), target[row] - sum(matrix[row][at] * bound[at] for at in bound)]
        for row in free
    ]
    count = len(rows)
    for pivot in range(count):
        head = rows[pivot]
        head[pivot] = max(head[pivot], least[free[pivot]])
        for below in rows[pivot + 1 :]:
            factor = below[pivot] / head[pivot]
            if factor:
                for column in range(pivot, count + 1):
                    below[column] -= factor * head[column]
    found = [0.0] * count
    for row in range(count - 1, -1, -1):
        known = sum(rows[row][column] * found[column] for column in range(row + 1, count))
        found[row] = (rows[row][count] - known) / rows[row][row]
    return found
