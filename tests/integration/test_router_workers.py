"""A router with several workers: processes that share a port and their handles, and say one thing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloop.watch import snapshot
from kvloop.watch.access import RouterAdmin
from kvloop_connector.settings import Role
from kvloop_operator.reports import parse_report
from tests.harness.engines import Engines, Kind, start
from tests.harness.store_server import StoreServer, store_server
from tests.integration.router_process import TOKEN, Got, until, write_engines
from tests.integration.scripted_engine import ScriptedEngine, running, starts_then_waits
from tests.integration.simulated import spec
from tests.integration.worker_processes import Launched, Pod, connected, document, eventually, launched, several

LONG = "a question that is long enough to be worth a pull"
WORK = "read the ticket, look at the code, run the tests and say what they tell you. " * 12
TURNS = 20
"""So many connections hardly ever come to one of two workers."""
REQUESTS = 'kvloop_router_requests_total{api="/v1/chat/completions"'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    with store_server(tmp_path_factory.mktemp("store")) as started:
        yield started


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with start(Kind.SIM, tmp_path_factory.mktemp("engines"), [spec(Role.PREFILL), spec(Role.DECODE)]) as started:
        yield started


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, server: StoreServer, engines: Engines) -> Iterator[Launched]:
    directory = tmp_path_factory.mktemp("router")
    write_engines(directory / "engines.json", engines.as_discovery_file())
    with launched(directory, document(directory, server, canary={"enabled": True})) as started:
        yield started


@pytest.fixture
async def pod(router: Launched) -> AsyncIterator[Pod]:
    """Over simulated engines, each of its workers has played a turn, and so learnt how they render a chat."""
    async with connected(router) as connection:
        while connection.players() != {0, 1}:
            await say(connection, "short")
        yield connection


async def counts_every_turn(pod: Pod) -> bool:
    """A turn is counted and written when its client has the answer."""
    return await pod.metric(REQUESTS) == len(pod.lines("turn"))


async def say(pod: Pod, *contents: str) -> Got:
    got = await pod.chat(*contents, max_tokens=140, ignore_eos=True, temperature=0)
    assert got.status == 200, got.text
    return got


async def test_a_conversation_goes_on_warm_at_whichever_worker_it_comes_to(pod: Pod, engines: Engines) -> None:
    before, contents = len(pod.lines("turn")), [WORK]
    while len(contents) < 9 or pod.players(before) != {0, 1}:
        turn = await say(pod, *contents)
        assert turn.path == ("warm" if len(contents) > 1 else "cold"), turn.reason
        contents += [turn.content, "and what then? " * 12]

    await eventually(lambda: counts_every_turn(pod))
    played = [line["request_id"] for line in pod.lines("turn")]
    assert await pod.metric("kvloop_router_workers") == 2
    shown = (await pod.admin("/admin/v1/engines"))["engines"]
    (handles,) = [engine["liveHandles"] for engine in shown if engine["name"] == engines.decode[0].name]
    assert handles == await pod.metric("kvloop_router_live_handles") > 0
    assert [turn["request_id"] for turn in (await pod.admin("/admin/v1/turns"))["turns"]] == played[::-1]
    top = await asyncio.to_thread(snapshot.read, [RouterAdmin("router", pod.admin_url, TOKEN)], 0.0)
    assert (top.routers, top.running_turns, len(top.engines), len(top.pairs)) == (1, 0, 2, 1)
    assert top.samples["turns_total", (("path", "warm"), ("reason", ""))] == len(contents) // 2 - 1
    parse_report("router", await pod.admin("/admin/v1/engines"), await pod.admin("/admin/v1/pairs"), 0.0)
    for request_id in played:
        assert (await pod.admin(f"/admin/v1/turns/{request_id}"))["request_id"] == request_id
        assert (await pod.admin(f"/admin/v1/turns/{request_id}/explanation"))["turn"]["request_id"] == request_id


async def test_one_that_is_killed_comes_back_the_others_go_on_and_nothing_counts_backwards(pod: Pod) -> None:
    await eventually(lambda: counts_every_turn(pod))
    counted, before = [await pod.metric(REQUESTS)], pod.pids

    os.kill(before[1], signal.SIGKILL)
    await until(lambda: bool(pod.lines("a worker ended")))
    while pod.pids == before:
        await say(pod, "short")
        assert await pod.status("/readyz") == 200
        counted.append(await pod.metric(REQUESTS))

    since = len(pod.lines("turn"))
    while pod.players(since) != {0, 1}:
        await say(pod, "short")
    await eventually(lambda: counts_every_turn(pod))
    counted.append(await pod.metric(REQUESTS))
    assert counted == sorted(counted)
    assert await pod.metric("kvloop_router_worker_restarts_total") == len(pod.lines("a worker ended"))
    assert pod.pids[0] == before[0]


async def test_an_engine_and_the_router_drain_once_all_workers_know_it_and_no_turn_is_cut(
    tmp_path: Path, server: StoreServer, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    async with (
        running(prefill),
        running(decode),
        several(tmp_path, server, [prefill.entry(), decode.entry()]) as pod,
        asyncio.TaskGroup() as clients,
    ):
        go_on = asyncio.Event()
        decode.script = [starts_then_waits(go_on) for _ in range(TURNS)]
        turns = [clients.create_task(pod.chat(f"{LONG} {number}", stream=True)) for number in range(TURNS)]
        await until(lambda: decode.running == TURNS)

        pod.list_engines([prefill.entry(), {**decode.entry(), "draining": True}])
        await eventually(lambda: drains(pod, decode))
        assert (await shown(pod, decode))["runningTurns"] == await pod.metric("kvloop_router_running_turns") == TURNS
        assert {(await pod.chat(LONG)).status for _ in range(TURNS)} == {503}, "no worker gives it a turn"

        pod.list_engines([prefill.entry(), decode.entry()])
        assert pod.launched is not None
        pod.launched.process.terminate()
        await until(lambda: len(pod.lines("draining")) == 3)
        assert await pod.status("/readyz") == 503
        assert {(await pod.chat(LONG)).status for _ in range(TURNS)} == {503}
        assert (await pod.admin("/admin/v1/engines"))["draining"]

        go_on.set()
        ended = [await turn for turn in turns]
        assert [(turn.status, turn.text.endswith("data: [DONE]\n\n")) for turn in ended] == [(200, True)] * TURNS
        assert await pod.launched.ended() == 0
        assert pod.players() == {0, 1}


async def shown(pod: Pod, engine: ScriptedEngine) -> dict[str, Any]:
    engines = (await pod.admin("/admin/v1/engines"))["engines"]
    (found,) = [each for each in engines if each["name"] == engine.name]
    return dict(found)


async def drains(pod: Pod, engine: ScriptedEngine) -> bool:
    return bool((await shown(pod, engine))["draining"])


async def test_a_canary_is_played_once_and_what_came_of_it_outlives_who_played_it(pod: Pod) -> None:
    await eventually(lambda: verified(pod))
    (played,) = pod.lines("canary")
    before = pod.pids

    os.kill(before[played["worker"]], signal.SIGKILL)
    await until(lambda: pod.pids != before, seconds=60)

    assert await verified(pod)
    assert len(pod.lines("canary")) == 1


async def verified(pod: Pod) -> bool:
    (pair,) = (await pod.admin("/admin/v1/pairs"))["pairs"]
    assert pair["attempts"] <= 1
    return bool(pair["verdict"] == "verified" and pair["toDecodeBytes"] > 0)


async def test_what_is_wrong_with_the_configuration_is_said_once(tmp_path: Path, server: StoreServer) -> None:
    wrong = {**document(tmp_path, server), "digestKeyFile": str(tmp_path / "absent")}
    with launched(tmp_path, wrong) as router:
        assert await router.ended() == 2
    assert router.log == f"kvloop-router: digestKeyFile: {tmp_path}/absent: No such file or directory\n"


async def test_a_port_is_not_shared_with_a_stranger(pod: Pod, tmp_path: Path, server: StoreServer) -> None:
    assert pod.launched is not None
    same = {**document(tmp_path, server), "listen": pod.launched.document["listen"]}
    with launched(tmp_path, same) as second:
        assert await second.ended() == 1
    assert "Address already in use" in second.log


async def test_workers_end_with_their_parent(pod: Pod, router: Launched) -> None:
    """The last one: nobody serves after it."""
    router.process.kill()

    await until(lambda: len(pod.lines("draining")) == 2)
    await eventually(lambda: is_away(pod))


async def is_away(pod: Pod) -> bool:
    return not await pod.status("/healthz")
