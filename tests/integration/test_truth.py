"""The truth test on simulated engines: kvloop's router is right, one that compares nothing is not, and faults show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloop_connector import digest
from kvloop_router import proof
from tests.harness.engines import Kind, start
from tests.truth import stage
from tests.truth.arms import kvloops_router, naive_router
from tests.truth.judge import Tally, faults
from tests.truth.play import play
from tests.truth.stage import Stage

TURNS = 60
SEEDS = (1, 2)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Stage]:
    """Engines of the test's own: what a wrong router leaves in prefix caches is wrong for whoever comes after it."""
    with start(Kind.SIM, tmp_path / "engines", stage.specs(Kind.SIM)) as engines:
        yield stage.on(engines)


async def through_kvloops(directory: Path, place: Stage, *, seeds: tuple[int, ...] = SEEDS, restarts: int = 0) -> Tally:
    async with kvloops_router(directory, place) as router:
        return await play(place, router, seeds, TURNS, restarts=restarts, past_router=False)


async def test_same_turns_are_right_with_a_proof_and_wrong_without(place: Stage, tmp_path: Path) -> None:
    proven = await through_kvloops(tmp_path, place, restarts=1)
    async with naive_router(tmp_path, place) as router:
        unproven = await play(place, router, SEEDS, TURNS)

    assert faults(proven, unproven, least_share=0.8) == []
    assert proven.warm > TURNS // 4
    assert unproven.kinds["edit"].wrong


async def test_router_that_proves_nothing_is_found_out(
    place: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "reusable_tokens", lambda *args, remote_num_tokens, **more: remote_num_tokens // 32 * 32)

    assert (await through_kvloops(tmp_path, place)).wrong


async def test_router_that_reuses_little_is_found_out(
    place: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proven = digest.reusable_tokens
    monkeypatch.setattr(proof, "reusable_tokens", lambda *args, **more: min(64, proven(*args, **more)))

    tally = await through_kvloops(tmp_path, place)

    assert not tally.wrong
    assert tally.reused_share < 0.5
