"""The default timing follows the published curve, and is a function of counts only."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvloop_sim.timing import TimingModel

TURN = 450
SUFFIX = 150


@pytest.mark.parametrize(("prefix", "cold", "warm"), [(2_000, 0.153, 0.128), (24_000, 0.744, 0.414)])
def test_defaults_are_near_the_published_prefill_legs(prefix: int, cold: float, warm: float) -> None:
    model = TimingModel()
    contexts = [prefix + turn * TURN for turn in range(10)]
    legs_cold = [model.prefill_seconds(context + SUFFIX, 0) for context in contexts]
    legs_warm = legs_cold[:1] + [
        model.transfer_seconds(context) + model.prefill_seconds(SUFFIX, context) for context in contexts[1:]
    ]

    assert sum(legs_cold) / 10 == pytest.approx(cold, rel=0.15)
    assert sum(legs_warm) / 10 == pytest.approx(warm, rel=0.15)


@pytest.mark.parametrize(("tokens", "seconds"), [(4_200, 0.030), (26_200, 0.130)])
def test_defaults_are_near_the_published_transfers(tokens: int, seconds: float) -> None:
    assert TimingModel().transfer_seconds(tokens) == pytest.approx(seconds, rel=0.2)


@given(st.integers(2, 10_000), st.integers(0, 50_000))
def test_a_suffix_costs_more_the_longer_the_context(tokens: int, context: int) -> None:
    model = TimingModel()

    assert model.prefill_seconds(tokens, context + 1_000) > model.prefill_seconds(tokens, context)
    assert model.prefill_seconds(tokens + 1, context) > model.prefill_seconds(tokens, context)


def test_one_missing_token_is_a_decode_step() -> None:
    model = TimingModel()

    assert model.prefill_seconds(1, 20_000) == model.decode_seconds(1, 20_000) < model.prefill_seconds(2, 20_000)


@given(st.integers(0, 100_000))
def test_scale_stretches_everything(tokens: int) -> None:
    still, double, plain = TimingModel(scale=0), TimingModel(scale=2), TimingModel()

    assert still.prefill_seconds(tokens, 5) == still.decode_seconds(3, tokens) == still.transfer_seconds(tokens) == 0
    assert double.transfer_seconds(tokens) == pytest.approx(2 * plain.transfer_seconds(tokens))
    assert double.prefill_seconds(tokens, 5) == pytest.approx(2 * plain.prefill_seconds(tokens, 5))
