"""A router over one scripted prefill and one scripted decode engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvloop_connector.settings import Role
from tests.integration.hazards import Witness, watched
from tests.integration.router_process import RouterUnderTest, scripted
from tests.integration.scripted_engine import ScriptedEngine


@pytest.fixture(autouse=True)
def witness() -> Iterator[Witness]:
    """Fails a test whose router did to a scripted engine what would harm a real one."""
    with watched() as seen:
        yield seen
    assert not seen.hazards


@pytest.fixture
def prefill() -> ScriptedEngine:
    return ScriptedEngine("prefill-0", Role.PREFILL)


@pytest.fixture
def decode() -> ScriptedEngine:
    return ScriptedEngine("decode-0", Role.DECODE)


@pytest.fixture
async def router(tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine) -> AsyncIterator[RouterUnderTest]:
    async with scripted(tmp_path, prefill, decode) as under_test:
        yield under_test
