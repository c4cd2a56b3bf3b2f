"""The truth test on real engines, in short; ``make bench-truth`` is the long one.

What is right is told by an engine of the other set, which exchanges KV with none of those under test, asked plainly and
under a salt of its own.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.contract.legs import holds_nothing
from tests.harness.engines import Engines, wait_until
from tests.harness.fixtures import REAL_ENGINES
from tests.truth.judge import Tally, faults
from tests.truth.play import Arm, kvloops_router, naive_router, play
from tests.truth.stage import SPECIAL, Stage

pytestmark = [*REAL_ENGINES, pytest.mark.stock, pytest.mark.long]

SEEDS = (1, 2)
TURNS = 40


async def played(place: Stage, arm: Arm, turns: int) -> Tally:
    return await play(place, arm, SEEDS, turns)


async def test_same_turns_are_right_with_kvloops_connector_and_wrong_without(
    vllm_kvloop_engines: Engines, vllm_engines: Engines, tmp_path: Path
) -> None:
    verified = Stage(engines=vllm_kvloop_engines, reference=vllm_engines.prefill[0], router_ttl=450, special=SPECIAL)
    stock = Stage(engines=vllm_engines, reference=vllm_kvloop_engines.prefill[0], router_ttl=450, special=SPECIAL)

    async with kvloops_router(tmp_path, verified) as router:
        right = await played(verified, router, TURNS)
    async with naive_router(tmp_path, stock) as router:
        wrong = await played(stock, router, TURNS // 2)

    assert right.wrongs == ()
    assert faults(right, wrong) == []
    assert right.verdicts["spent"] > 0
    assert right.verdicts["read"] > 0
    for decode in (*vllm_kvloop_engines.decode, *vllm_engines.decode):
        assert await asyncio.to_thread(wait_until, partial(holds_nothing, decode)), decode.name
