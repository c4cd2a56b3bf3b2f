"""Every contract test runs against simulated and against real engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.contract.legs import Legs
from tests.harness.engines import Engine, Engines, Kind
from tests.harness.fixtures import REAL_ENGINES

KINDS = [pytest.param(Kind.SIM, id="sim"), pytest.param(Kind.VLLM, id="vllm", marks=REAL_ENGINES)]


@dataclass(frozen=True, slots=True)
class Pair:
    """The engines of the shared set, by what tests use them for."""

    prefill: Engine
    other_prefill: Engine
    decode: Engine
    forgetful_decode: Engine


@pytest.fixture(scope="session", params=KINDS)
def engines(request: pytest.FixtureRequest) -> Engines:
    """The shared engines of one kind."""
    found = request.getfixturevalue(f"{request.param}_engines")
    assert isinstance(found, Engines)
    return found


@pytest.fixture
def pair(engines: Engines) -> Pair:
    """The shared engines; fails where one of them has ended."""
    for engine in engines.all:
        engine.check_alive()
    return Pair(engines.prefill[0], engines.prefill[1], engines.decode[0], engines.decode[1])


@pytest.fixture
def legs() -> Iterator[Legs]:
    """Sends legs; in the end every handle is released and decode holds nothing."""
    made = Legs()
    yield made
    made.settle()
