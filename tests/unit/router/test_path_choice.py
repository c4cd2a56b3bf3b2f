"""Which path a turn goes, by the published speeds: tables of what is chosen, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvloop_router import fit
from kvloop_router.cost_model import (
    COMPUTE_PRIOR,
    FIRST_STEP,
    PULL_PRIOR,
    DecodeSpeed,
    PrefillSpeed,
    Work,
)
from kvloop_router.fit import Fit
from kvloop_router.path_choice import Mode, Path, Place, Sizes, Terms, compare, forecasts, pick

TERMS = Terms(threshold=64, retains=True)
TURN = Sizes(prompt=12_150, held=12_000, answer=300)


def known(*coefficients: float) -> Fit:
    """A fit that holds."""
    return fit.begin(coefficients)


def place(*, slow_network: float = 1.0, decode_computes: float | None = 1.0, **now: Any) -> Place:
    pull = tuple(slow_network * value for value in PULL_PRIOR)
    computes = None if decode_computes is None else known(*(decode_computes * value for value in COMPUTE_PRIOR))
    return Place(
        prefill="p",
        decode="d",
        prefill_speed=PrefillSpeed(known(*COMPUTE_PRIOR, *pull)),
        decode_speed=DecodeSpeed(known(FIRST_STEP + pull[0], pull[1]), computes),
        **{"can_serve_alone": True, "seen": 1000, **now},
    )


def chosen(sizes: Sizes, where: Place, terms: Terms = TERMS) -> Path:
    return pick(compare(sizes, [where], terms), terms).path


@pytest.mark.parametrize(
    ("sizes", "where", "path"),
    [
        pytest.param(TURN, place(running=8), Path.WARM, id="the rule: answers run at decode"),
        pytest.param(TURN, place(running=0), Path.LOCAL, id="nobody is disturbed at decode"),
        pytest.param(TURN, place(running=0, can_serve_alone=False), Path.WARM, id="decode keeps no prefixes"),
        pytest.param(TURN, place(running=0, holds=False), Path.WARM, id="decode is another than the one that holds it"),
        pytest.param(TURN, place(running=1, prefill_wait=2.0), Path.LOCAL, id="prefill is busy"),
        pytest.param(TURN, place(running=64, prefill_wait=2.0), Path.WARM, id="both are busy"),
        pytest.param(TURN, place(running=0, decode_wait=1.0), Path.WARM, id="decode computes already"),
        pytest.param(
            TURN, place(running=0, decode_computes=None), Path.WARM, id="decode was never seen to compute alone"
        ),
        pytest.param(TURN, place(running=8, slow_network=40.0), Path.COLD, id="reading takes longer than computing"),
        pytest.param(
            Sizes(24_150, 24_000, 300),
            place(running=0, slow_network=40.0),
            Path.LOCAL,
            id="a slow network, idle decode",
        ),
        pytest.param(Sizes(12_150, 0), place(), Path.COLD, id="nothing is held"),
        pytest.param(Sizes(12_150, 32), place(running=8), Path.COLD, id="less than the threshold is held"),
        pytest.param(Sizes(24_000, 4_000, 300), place(running=4), Path.WARM, id="a long suffix"),
    ],
)
def test_the_path_that_is_chosen(sizes: Sizes, where: Place, path: Path) -> None:
    assert chosen(sizes, where) is path


@pytest.mark.parametrize(("retains", "path"), [(True, Path.LOCAL), (False, Path.WARM)])
def test_a_local_turn_that_leaves_no_handle_makes_the_next_one_dearer(retains: bool, path: Path) -> None:
    assert chosen(TURN, place(running=0), replace(TERMS, retains=retains)) is path


def test_running_answers_count_for_as_much_as_was_said() -> None:
    busy = place(running=8)

    assert chosen(TURN, busy, replace(TERMS, decode_delay_weight=0.0)) is Path.LOCAL
    assert chosen(TURN, busy, replace(TERMS, decode_delay_weight=0.01)) is Path.LOCAL
    assert chosen(TURN, busy) is Path.WARM


@pytest.mark.parametrize(
    ("mode", "where", "path"),
    [
        (Mode.COLD, place(), Path.COLD),
        (Mode.WARM, place(slow_network=1000.0), Path.WARM),
        (Mode.LOCAL, place(running=1000), Path.LOCAL),
        (Mode.LOCAL, place(can_serve_alone=False), Path.WARM),
    ],
)
def test_a_mode_overrides_the_model(mode: Mode, where: Place, path: Path) -> None:
    assert chosen(TURN, where, replace(TERMS, mode=mode)) is path


def test_a_mode_whose_path_is_not_possible_gives_way() -> None:
    assert chosen(Sizes(12_150, 0), place(), replace(TERMS, mode=Mode.LOCAL)) is Path.COLD


def test_until_an_engine_was_seen_at_work_warm_is_the_rule() -> None:
    unknown = replace(place(running=0, prefill_wait=5.0), seen=31)

    assert chosen(TURN, unknown) is Path.WARM
    assert chosen(TURN, unknown, replace(TERMS, evidence=0)) is Path.LOCAL


def test_a_small_gain_is_none() -> None:
    idle = place(running=0)
    costs = {forecast.path: forecast.cost for forecast in forecasts(TURN, idle, TERMS)}
    gain = costs[Path.WARM] - costs[Path.LOCAL]

    assert gain > 0
    assert chosen(TURN, idle, replace(TERMS, gain=0, least_gain=gain + 1e-6)) is Path.WARM
    assert chosen(TURN, idle, replace(TERMS, gain=0, least_gain=gain - 1e-6)) is Path.LOCAL


def test_of_two_places_the_better_one_is_taken() -> None:
    busy, idle = replace(place(running=8, prefill_wait=1.0), prefill="busy"), replace(place(running=8), prefill="idle")

    assert pick(compare(TURN, [busy, idle], TERMS), TERMS).place.prefill == "idle"


def test_without_a_place_there_is_no_choice() -> None:
    with pytest.raises(ValueError, match="no place"):
        pick(compare(TURN, [], TERMS), TERMS)


def test_a_wait_hides_what_is_read_meanwhile() -> None:
    (_, warm, _) = forecasts(TURN, place(), TERMS)
    (_, waiting, _) = forecasts(TURN, place(prefill_wait=0.03), TERMS)
    (_, longer, _) = forecasts(TURN, place(prefill_wait=1.0), TERMS)

    assert waiting.first_token == warm.first_token
    assert longer.first_token == pytest.approx(warm.first_token + 1.0 - 0.065)


def test_the_longer_the_context_the_dearer_the_suffix() -> None:
    speed = PrefillSpeed(known(*COMPUTE_PRIOR, *PULL_PRIOR))
    times = [speed.compute_seconds(Work(500, context=context)) for context in (0, 8_000, 32_000)]

    assert times[0] < times[1] < times[2]
