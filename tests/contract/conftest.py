"""Every contract test runs against simulated engines, real ones with vLLM's own connector, and real ones with
KvloopConnector; but for what vLLM's is known to do wrong, which has tests of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.contract.legs import Answer, Legs, Reusable, trimmed_to
from tests.harness.engines import Engine, Engines, Kind
from tests.harness.fixtures import REAL_ENGINES

SIM = pytest.param(Kind.SIM, id="sim")
VLLM = pytest.param(Kind.VLLM, id="vllm", marks=(*REAL_ENGINES, pytest.mark.stock))
VLLM_KVLOOP = pytest.param(Kind.VLLM_KVLOOP, id="vllm-kvloop", marks=REAL_ENGINES)

failure_of_stock = pytest.mark.parametrize("engines", [SIM, VLLM], indirect=True)
"""Marks a test that shows what vLLM's own connector does wrong, and the simulator like it."""

with_kvloops_connector = pytest.mark.parametrize("engines", [VLLM_KVLOOP], indirect=True)
"""Marks a test of what only KvloopConnector does."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The engines of the shared set, by what tests use them for."""

    kind: Kind
    prefill: Engine
    other_prefill: Engine
    decode: Engine
    forgetful_decode: Engine

    def reusable(self, answer: Answer, prompt: Sequence[int]) -> Reusable:
        """What is proven of the handle in ``answer`` for a request with this prompt, as a router sends it to these
        engines: cut to it, or, where the engine cuts it itself, untouched."""
        trimmed = trimmed_to(answer.handle, answer.retained_ids, prompt)
        if self.kind.verifies:
            return Reusable(answer.handle.params, trimmed.num_tokens)
        return Reusable((trimmed if trimmed.num_tokens else answer.handle.released()).params, trimmed.num_tokens)


@pytest.fixture(scope="session", params=[SIM, VLLM, VLLM_KVLOOP])
def engines(request: pytest.FixtureRequest) -> Engines:
    """The shared engines of one kind."""
    found = request.getfixturevalue(f"{request.param.replace('-', '_')}_engines")
    assert isinstance(found, Engines)
    return found


@pytest.fixture
def pair(engines: Engines) -> Pair:
    """The shared engines; fails where one of them has ended."""
    for engine in engines.all:
        engine.check_alive()
    return Pair(engines.kind, engines.prefill[0], engines.prefill[1], engines.decode[0], engines.decode[1])


@pytest.fixture
def legs() -> Iterator[Legs]:
    """Sends legs; in the end every handle is released and decode holds nothing."""
    made = Legs()
    yield made
    made.settle()
