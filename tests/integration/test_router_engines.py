"""Engines that restart, join, or are of another KV revision, and turns meanwhile."""

from __future__ import annotations

from pathlib import Path

from kvloop_connector.settings import Role
from tests.integration.router_process import RouterUnderTest, routing, scripted, until
from tests.integration.scripted_engine import ANSWER, ScriptedEngine, running
from tests.integration.test_router_turns import LONG


async def test_an_engine_that_restarts_loses_its_handles(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    await router.chat(LONG)
    decode.restart()
    router.list_engines([prefill.entry(), decode.entry()])
    assert router.router is not None
    store, engines = router.router.store, router.router.engines
    await until(lambda: len(store) == 0 and engines.present(decode.pod_uid))

    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, second.reason) == ("cold", "engine_gone")
    assert "remote_engine_id" not in prefill.carried[1]


async def test_a_changed_engine_id_is_noticed_without_discovery(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    await router.chat(LONG)
    decode.engine_id = "another process"
    await router.chat("another conversation, long enough for a handle")

    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, second.reason) == ("cold", "engine_gone")


async def test_engines_of_different_revisions_are_never_paired(tmp_path: Path) -> None:
    old = [ScriptedEngine("prefill-0", Role.PREFILL), ScriptedEngine("decode-0", Role.DECODE)]
    new = [
        ScriptedEngine("prefill-1", Role.PREFILL, revision="b"),
        ScriptedEngine("decode-1", Role.DECODE, revision="b"),
    ]
    async with scripted(tmp_path, *old, *new) as router:
        turns = [await router.chat(f"{LONG} {index}") for index in range(12)]

    pairs = {(turn.headers["X-Kvloop-Prefill"], turn.headers["X-Kvloop-Decode"]) for turn in turns}
    assert pairs == {("prefill-0", "decode-0"), ("prefill-1", "decode-1")}


async def test_a_suspended_router_is_ready_and_tells_clients_to_come_back(tmp_path: Path) -> None:
    async with routing(tmp_path, [], suspended=True) as router:
        ready = await router.get("/readyz")
        turn = await router.chat(LONG)

    assert ready.status == 200
    assert (turn.status, turn.error["code"], turn.headers["Retry-After"]) == (503, "no_prefill", "1")


async def test_engines_that_join_later_serve(tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
    async with routing(tmp_path, []) as router, running(prefill), running(decode):
        none = await router.chat(LONG)
        ready = await router.get("/readyz")
        router.list_engines([prefill.entry(), decode.entry()])
        assert router.router is not None
        engines = router.router.engines
        await until(lambda: engines.present(prefill.pod_uid) and engines.present(decode.pod_uid))
        served = await router.chat(LONG)
        ready_now = await router.get("/readyz")

    assert (none.status, none.error["code"], none.headers["Retry-After"]) == (503, "no_prefill", "1")
    assert (ready.status, ready.text.split(":")[0]) == (503, "no_prefill")
    assert (served.status, ready_now.status) == (200, 200)
