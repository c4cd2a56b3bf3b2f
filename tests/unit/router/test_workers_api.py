"""What a router with several workers answers, where one of them says something else, or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvloop_router.socket_client import SocketClient
from kvloop_router.workers import Worker, Workers
from kvloop_router.workers_api import WorkersApi
from kvloop_router.workers_metrics import Totals

TOKEN = {"Authorization": "Bearer token"}
COUNTED = "# TYPE kvloop_router_turns_total counter\nkvloop_router_turns_total 4.0\n"


@dataclass(slots=True)
class Scripted:
    """A worker that answers what it is told to. ``listens``: whether it does."""

    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    listens: bool = True

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == TOKEN["Authorization"]
        status, text = self.answers.get(request.path, (404, ""))
        return web.Response(status=status, text=text, content_type="application/json")


@dataclass(slots=True)
class Group:
    """Stands in for the processes, of which only who serves is looked at."""

    serving: tuple[Worker, ...] = ()
    restarts: int = 3


@dataclass(slots=True)
class Router:
    workers: tuple[Scripted, Scripted]
    group: Group
    totals: Totals
    admin: TestClient[Any, Any]
    pod: TestClient[Any, Any]

    def lose(self, number: int) -> None:
        """A worker's process has ended."""
        self.totals.end(number)
        self.group.serving = tuple(worker for worker in self.group.serving if worker.number != number)

    async def total(self) -> float:
        lines = (await (await self.pod.get("/metrics")).text()).splitlines()
        (line,) = [line for line in lines if line.startswith("kvloop_router_turns_total")]
        return float(line.split(" ")[1])


@pytest.fixture
async def router(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Router]:
    """Two workers; of these, as its parameter says, the second is away."""
    scripted = (Scripted(), Scripted(listens=getattr(request, "param", True)))
    async with AsyncExitStack() as stack:
        workers = []
        for number, each in enumerate(scripted):
            path = str(tmp_path / f"{number}.sock")
            app = web.Application()
            app.router.add_get("/{path:.*}", each.answer)
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            if each.listens:
                await web.UnixSite(runner, path).start()
            client = SocketClient(path, "token")
            stack.push_async_callback(client.close)
            workers.append(Worker(number, number, cast("Any", None), client, serves=True))
        group, totals = Group(tuple(workers)), Totals()
        api = WorkersApi(cast("Workers", group), totals, "token")
        admin = await stack.enter_async_context(TestClient(TestServer(api.admin())))
        pod = await stack.enter_async_context(TestClient(TestServer(api.pod())))
        yield Router(scripted, group, totals, admin, pod)


one_is_away = pytest.mark.parametrize("router", [False], indirect=True)


@pytest.mark.parametrize("path", ["engines", "pairs", "turns", "templates"])
@one_is_away
async def test_what_one_worker_does_not_say_the_router_does_not(router: Router, path: str) -> None:
    router.workers[0].answers = {f"/admin/v1/{path}": (200, '{"engines": [], "pairs": []}')}

    answer = await router.admin.get(f"/admin/v1/{path}", headers=TOKEN)

    assert (answer.status, await answer.text()) == (503, "no answer of worker 1\n")


async def test_a_turn_is_found_wherever_it_was_played(router: Router) -> None:
    router.workers[1].answers = {"/admin/v1/turns/a": (200, '{"request_id": "a"}')}

    found = await router.admin.get("/admin/v1/turns/a", headers=TOKEN)
    absent = await router.admin.get("/admin/v1/turns/b", headers=TOKEN)

    assert (found.status, await found.json()) == (200, {"request_id": "a"})
    assert absent.status == 404


@pytest.mark.parametrize("path", ["/admin/v1/engines", "/admin/v1/turns/a", "/metrics"])
async def test_nobody_is_told_anything_without_the_token(router: Router, path: str) -> None:
    assert (await router.admin.get(path)).status == 401
    assert (await router.admin.get(path, headers={"Authorization": "Bearer other"})).status == 401
    assert (await router.admin.get("/healthz")).status == 200


async def test_a_router_is_ready_with_all_and_then_as_long_as_one_is(router: Router) -> None:
    first, second = router.workers
    first.answers["/readyz"] = (200, "ok\n")
    second.answers["/readyz"] = (503, "no_decode: There is no decode engine.\n")
    before = await router.pod.get("/readyz")
    assert (before.status, await before.text()) == (503, "no_decode: There is no decode engine.\n")

    second.answers["/readyz"] = (200, "ok\n")
    assert (await router.pod.get("/health")).status == 200
    first.answers["/readyz"] = (503, "no_decode: There is no decode engine.\n")
    assert (await router.pod.get("/readyz")).status == 200

    second.answers["/readyz"] = (503, "draining\n")
    assert (await router.pod.get("/readyz")).status == 503


async def test_counts_stay_whatever_becomes_of_a_worker(router: Router) -> None:
    first, second = router.workers
    first.answers["/metrics"] = second.answers["/metrics"] = (200, COUNTED)
    assert await router.total() == 8

    second.answers["/metrics"] = (500, "")
    assert await router.total() == 8
    router.lose(1)
    assert await router.total() == 8
    router.lose(0)
    assert await router.total() == 8

    text = await (await router.admin.get("/metrics", headers=TOKEN)).text()
    assert "kvloop_router_workers 0.0" in text
    assert "kvloop_router_worker_restarts_total 3.0" in text


async def test_where_nobody_serves_that_is_said(router: Router) -> None:
    router.lose(0)
    router.lose(1)

    answer = await router.admin.get("/admin/v1/engines", headers=TOKEN)
    ready = await router.pod.get("/readyz")

    assert (answer.status, await answer.text()) == (503, "no worker serves\n")
    assert (ready.status, await ready.text()) == (503, "no worker serves\n")
    assert (await router.pod.get("/healthz")).status == 200
