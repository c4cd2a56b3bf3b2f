"""Turns that begin, wait or are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from kvloop_router.admission import Admission, retry_after
from kvloop_router.errors import RequestError
from tests.unit.router.kept_handles import Clock

MODEL = "tiny"


class Turns:
    """Turns that are begun in order and end when they are told to."""

    def __init__(
        self, *, running: int | None = 2, waiting: int = 2, engines: Callable[[str], int] = lambda _: 1
    ) -> None:
        self.clock = Clock()
        self.refused: list[str] = []
        self.admission = Admission(
            running=running, waiting=waiting, engines=engines, clock=self.clock, refused=self.refused.append
        )
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, tenant: str = "a", model: str = MODEL) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.get_running_loop().create_task(self._turn(name, tenant.encode(), model))
            await self._settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            await self._tasks[name]
        await self._settle()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await self._tasks[name]
        await self._settle()

    async def _turn(self, name: str, tenant: bytes, model: str) -> None:
        async with self.admission.admitted(model, tenant):
            self.begun.append(name)
            await self._ends[name].wait()

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_so_many_run_at_once_and_the_rest_follow_in_order() -> None:
    turns = Turns()
    await turns.come("1", "2", "3", "4")
    assert turns.begun == ["1", "2"]
    assert turns.admission.waiting == 2

    await turns.end("1")
    assert turns.begun == ["1", "2", "3"]
    await turns.end("2", "3", "4")
    assert turns.admission.waiting == 0


async def test_one_that_comes_while_too_many_wait_is_refused_and_told_when_to_come_back() -> None:
    turns = Turns()
    await turns.come("1", "2")
    turns.clock.now += 30
    await turns.end("1", "2")
    await turns.come("3", "4", "5", "6")

    with pytest.raises(RequestError) as refused:
        async with turns.admission.admitted(MODEL, b"b"):
            pytest.fail("it was admitted")

    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (429, "engines_busy", 45)
    assert turns.refused == [MODEL]
    await turns.end("3", "4", "5", "6")


async def test_tenants_get_their_turns_by_turns() -> None:
    turns = Turns(running=1, waiting=9)
    await turns.come("a1", "a2", "a3", "a4", tenant="a")
    await turns.come("b1", "b2", tenant="b")

    await turns.end("a1", "a2", "b1", "a3", "b2", "a4")

    assert turns.begun == ["a1", "a2", "b1", "a3", "b2", "a4"]


async def test_a_client_that_leaves_the_line_leaves_no_gap() -> None:
    turns = Turns(running=1, waiting=9)
    await turns.come("1", "2", "3")
    await turns.leave("2")
    await turns.end("1")
    assert turns.begun == ["1", "3"]

    await turns.leave("3")
    await turns.come("4")
    assert turns.begun == ["1", "3", "4"]
    await turns.end("4")


async def test_a_place_that_its_client_cannot_take_any_more_goes_to_the_next() -> None:
    turns = Turns(running=1, waiting=9)
    await turns.come("1", "2", "3")
    # In one step of the loop the place becomes free and who it is for is gone.
    turns._ends["1"].set()
    await asyncio.sleep(0)
    turns._tasks["2"].cancel()
    await turns.end("1")

    assert turns.begun == ["1", "3"]
    await turns.end("3")
    await turns.come("4")
    assert turns.begun[-1] == "4"
    await turns.end("4")


async def test_models_wait_apart() -> None:
    turns = Turns(running=1)
    await turns.come("1", "2")
    await turns.come("other", model="another")

    assert turns.begun == ["1", "other"]
    await turns.end("1", "2", "other")


async def test_where_no_engine_serves_nobody_waits() -> None:
    engines = [1]
    turns = Turns(running=1, engines=lambda _: engines[0])
    await turns.come("1", "2", "3")
    engines[0] = 0
    await turns.come("4")
    await turns.end("1")

    assert turns.begun == ["1", "4", "2", "3"]
    await turns.end("2", "3", "4")


async def test_without_a_limit_any_number_runs() -> None:
    turns = Turns(running=None)
    await turns.come(*map(str, range(50)))

    assert len(turns.begun) == 50
    await turns.end(*map(str, range(50)))


@pytest.mark.parametrize(
    ("ahead", "at_once", "seconds", "expected"),
    [(0, 4, None, 1), (0, 4, 2.0, 1), (9, 4, 2.0, 5), (999, 1, 60.0, 120)],
)
def test_when_to_come_back_follows_from_how_long_turns_take(
    ahead: int, at_once: int, seconds: float | None, expected: int
) -> None:
    assert retry_after(ahead, at_once, seconds) == expected
