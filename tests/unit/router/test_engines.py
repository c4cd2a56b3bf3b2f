"""What discovery says of engines, and what the router then knows of them. Nothing is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvloop_connector.settings import Role
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.engines import Engines, open_session

NAMED = EngineSpec(
    name="decode-0", role=Role.DECODE, url="http://127.0.0.1:1", pod_uid="u", process="u/1", kv_revision="a"
)
CHECKED = replace(NAMED, checked=True)


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    async with open_session() as session:
        yield Engines(session, connect_seconds=1.0)


def serving(engines: Engines) -> list[bool]:
    return [candidate.serving for candidate in engines.snapshot()]


async def test_an_engine_gets_no_turns_before_somebody_has_checked_its_health(engines: Engines) -> None:
    engines.update((NAMED,))
    assert serving(engines) == [False]
    engines.update((CHECKED,))
    assert serving(engines) == [True]


async def test_a_check_that_is_told_again_is_no_news(engines: Engines) -> None:
    engines.update((CHECKED,))
    engine = engines.get("decode-0")
    assert engine is not None
    engine.health.refused()
    engines.update((replace(CHECKED, draining=True),))
    engines.update((CHECKED,))
    assert serving(engines) == [False]

    engines.update((replace(NAMED, ready=False),))
    engines.update((CHECKED,))
    assert serving(engines) == [True]


async def test_another_process_is_checked_anew(engines: Engines) -> None:
    engines.update((CHECKED,))
    assert engines.update((replace(NAMED, process="u/2"),)) == ("u/1",)
    assert serving(engines) == [False]
