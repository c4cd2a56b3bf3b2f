"""What runs beside the requests: work ends by itself, services do not end."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from kvloop_router import background
from kvloop_router.background import Background


async def test_a_service_that_fails_is_logged_and_runs_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_AGAIN_SECONDS", 0)
    runs, third = [0], asyncio.Event()

    async def service() -> None:
        runs[0] += 1
        if runs[0] == 3:
            third.set()
            await asyncio.Event().wait()
        raise RuntimeError("a defect")

    owner = Background()
    with caplog.at_level(logging.ERROR):
        owner.serve(service, "health checks")
        await third.wait()
    await owner.close()
    assert runs == [3]
    assert caplog.messages == ["health checks ended by an error"] * 2


async def test_work_that_nobody_waits_for_is_owned_until_its_end_and_its_failure_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        raise RuntimeError("a defect")

    owner = Background()
    with caplog.at_level(logging.ERROR):
        owner.start(work(), "truth sampling")
        assert owner.working == 1
        await owner.idle()
    assert caplog.messages == ["truth sampling ended by an error"]


async def test_work_goes_on_when_whoever_waits_for_it_leaves() -> None:
    owner, begun, end = Background(), asyncio.Event(), asyncio.Event()
    ended = []

    async def work() -> None:
        begun.set()
        await end.wait()
        ended.append("work")

    async with asyncio.TaskGroup() as group:
        client = group.create_task(owner.finish(work()))
        await begun.wait()
        client.cancel()
    assert owner.working == 1
    end.set()
    await owner.idle()
    assert ended == ["work"]


async def test_others_go_on_between_the_parts_of_long_work() -> None:
    done: list[str] = []

    def part() -> bool:
        done.append("part")
        return done.count("part") < 3

    async def other() -> None:
        for _ in range(3):
            done.append("other")
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(background.in_parts(part))
        group.create_task(other())
    assert done == ["other", "part", "other", "part", "other", "part"]


@pytest.mark.parametrize("size", [1, 128 * 1024])
async def test_what_is_done_aside_is_the_same_for_long_and_short_requests(size: int) -> None:
    here = threading.get_ident()

    assert (await background.aside(size, threading.get_ident) == here) is (size == 1)
    with pytest.raises(ValueError, match="a defect"):
        await background.aside(size, lambda: int("a defect"))


@pytest.mark.parametrize(("size", "order"), [(128 * 1024, ["other", "long"]), (128 * 1024 - 1, ["long", "other"])])
async def test_others_go_on_beside_a_long_request_only(size: int, order: list[str]) -> None:
    done: list[str] = []
    asyncio.get_running_loop().call_soon(done.append, "other")
    await background.let_others_go_on(size)
    done.append("long")
    await asyncio.sleep(0)
    assert done == order
