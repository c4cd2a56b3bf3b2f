"""The fit of durations: it finds the truth, stays within bounds whatever it is shown, and follows what changes."""

from __future__ import annotations

from math import inf, isfinite, nan
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from kvloop_router import fit
from kvloop_router.cost_model import COMPUTE_PRIOR, PULL_PRIOR, Work, compute_features, pull_features
from kvloop_router.fit import Fit

PRIOR = (*COMPUTE_PRIOR, *PULL_PRIOR)

FACTORS = st.tuples(*(st.floats(0.2, 5.0) for _ in PRIOR))
SCALES = st.sampled_from([0.01, 1.0, 50.0])


def features(work: Work) -> tuple[float, ...]:
    return (*compute_features(work), *pull_features(work))


def work(random: Random) -> Work:
    """A leg as they come: cold, warm, or with something in prefill's own cache."""
    prompt, kind = random.randrange(100, 32_000), random.randrange(3)
    held = 0 if kind == 0 else random.randrange(prompt)
    return Work(prompt - held, context=held, pulled=held if kind == 1 else 0)


def seconds(truth: tuple[float, ...], one: Work) -> float:
    return sum(coefficient * feature for coefficient, feature in zip(truth, features(one), strict=True))


def learned(
    truth: tuple[float, ...], random: Random, legs: int, *, noise: float = 0.0, start: Fit | None = None
) -> Fit:
    state = start or fit.begin(PRIOR)
    for _ in range(legs):
        one = work(random)
        state = fit.observe(state, features(one), seconds(truth, one) * random.uniform(1 - noise, 1 + noise))
    return state


def worst(state: Fit, truth: tuple[float, ...], random: Random) -> float:
    """The largest relative error over legs that were not seen; two milliseconds are none."""
    legs = [work(random) for _ in range(50)]
    return max(
        max(0.0, abs(fit.predict(state, features(one)) - seconds(truth, one)) - 0.002) / seconds(truth, one)
        for one in legs
    )


# The same engines each time: how near it comes depends on which legs it saw, and there is no bound for all.
@settings(max_examples=10, deadline=None, derandomize=True)
@given(FACTORS, SCALES, st.integers(0, 2**32))
def test_it_converges_on_engines_of_all_speeds(factors: tuple[float, ...], scale: float, seed: int) -> None:
    truth = tuple(scale * factor * value for factor, value in zip(factors, PRIOR, strict=True))
    random = Random(seed)

    assert worst(learned(truth, random, 300), truth, random) < 0.15


@settings(max_examples=5, deadline=None, derandomize=True)
@given(SCALES, st.integers(0, 2**32))
def test_it_converges_although_durations_vary(scale: float, seed: int) -> None:
    truth = tuple(scale * value for value in PRIOR)
    random = Random(seed)

    assert worst(learned(truth, random, 300, noise=0.2), truth, random) < 0.2


def test_one_leg_tells_how_fast_the_machine_is() -> None:
    truth = tuple(100 * value for value in PRIOR)
    random = Random(1)

    assert worst(learned(truth, random, 1), truth, random) < 0.1


def test_a_few_that_are_far_off_change_little() -> None:
    random = Random(2)
    state = learned(PRIOR, random, 100, noise=0.05)
    for _ in range(5):
        one = work(random)
        state = fit.observe(state, features(one), 30 + seconds(PRIOR, one))
        state = learned(PRIOR, random, 10, noise=0.05, start=state)

    assert worst(state, PRIOR, random) < 0.15


def test_it_follows_an_engine_that_has_become_slower() -> None:
    random = Random(3)
    slow = tuple(3 * value for value in PRIOR)
    state = learned(slow, random, 400, start=learned(PRIOR, random, 400))

    assert worst(state, slow, random) < 0.15


def test_what_is_not_seen_for_long_stays_near_what_was_known() -> None:
    random = Random(4)
    state = learned(PRIOR, random, 100)
    warm = Work(150, context=8_000, pulled=8_000)
    for _ in range(2_000):
        state = fit.observe(state, features(warm), seconds(PRIOR, warm))

    assert worst(state, PRIOR, random) < 0.6
    assert fit.predict(state, features(warm)) == pytest.approx(seconds(PRIOR, warm), rel=0.02)


NUMBERS = (0.0, -1.0, 1e-300, 1e-9, 1e-3, 1.0, 3_600.0, 1e6, 1e150, 1e300, nan, inf)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**64))
def test_whatever_it_is_shown_it_stays_finite_and_within_bounds(seed: int) -> None:
    random = Random(seed)
    state = fit.begin(PRIOR)
    for _ in range(40):
        shown = tuple(random.choice(NUMBERS[:8]) if random.random() < 0.7 else random.random() for _ in PRIOR)
        shown = (random.choice(NUMBERS), *shown[1:]) if random.random() < 0.2 else shown
        state = fit.observe(state, shown, random.choice(NUMBERS))

    for value, prior in zip(state.coefficients, PRIOR, strict=True):
        assert isfinite(value)
        assert 0 <= value <= prior * fit.LARGEST * 1.000001
    assert isfinite(state.spread)
    assert isfinite(fit.predict(state, features(Work(1_000, 2_000, 2_000))))


@pytest.mark.parametrize("outcome", [nan, inf, -1.0, 0.0, 1e9])
def test_what_cannot_be_a_duration_changes_nothing(outcome: float) -> None:
    state = learned(PRIOR, Random(5), 10)

    assert fit.observe(state, features(Work(100)), outcome) == state


def test_features_of_another_model_change_nothing() -> None:
    state = fit.begin(PRIOR)

    assert fit.observe(state, (1.0, 1.0), 1.0) == state


@pytest.mark.parametrize("prior", [(0.0, 1.0), (-1.0,), (nan,), (inf,)])
def test_a_prior_is_positive(prior: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="positive"):
        fit.begin(prior)
