"""A client that leaves, in each phase of its turn: what still runs then, and that nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.router_process import RouterUnderTest, chat_body, scripted, until
from tests.integration.scripted_engine import ANSWER, ScriptedEngine, starts_then_waits, waits
from tests.integration.settled import settled

LONG = "a question that is long enough to be worth a pull"
MORE = (LONG, ANSWER, "and more")


@pytest.fixture
async def router(tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine) -> AsyncIterator[RouterUnderTest]:
    """One conversation behind it; one turn at once."""
    async with scripted(tmp_path, prefill, decode, limits={"turnsPerEngine": 1}) as under_test:
        assert (await under_test.chat(LONG)).status == 200
        yield under_test


class Leaving:
    """A turn whose client leaves when it is told to."""

    def __init__(self, router: RouterUnderTest, *contents: str, **fields: Any) -> None:
        self._url = router.url + "/v1/chat/completions"
        self._body = chat_body(*(contents or MORE), **fields)
        self._turn = asyncio.get_running_loop().create_task(self._play(), name="a client that leaves")

    async def leave(self) -> None:
        self._turn.cancel()
        with suppress(asyncio.CancelledError):
            await self._turn

    async def _play(self) -> None:
        async with aiohttp.ClientSession() as session, session.post(self._url, json=self._body) as response:
            await response.read()


def held_up(part: object, name: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Have a method of one of the router's parts wait: when it was called, and until when."""
    called, go_on = asyncio.Event(), asyncio.Event()
    method: Callable[..., Awaitable[Any]] = getattr(part, name)

    async def waiting(*arguments: Any, **fields: Any) -> Any:
        called.set()
        await go_on.wait()
        return await method(*arguments, **fields)

    setattr(part, name, waiting)
    return called, go_on


async def left(router: RouterUnderTest, phase: str) -> None:
    """Wait until the router has noticed."""
    async with asyncio.timeout(20):
        while not await router.metric(f'kvloop_router_client_disconnects_total{{phase="{phase}"}}'):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_while_it_waits_for_its_turn(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    go_on = asyncio.Event()
    decode.script = [waits(go_on)]
    before = Leaving(router, "another conversation that is long enough")
    await decode.arrived.wait()
    client = Leaving(router)
    await until(lambda: router.router is not None and router.router.state.turns == 2)
    legs = len(prefill.legs)

    await client.leave()
    await left(router, "queue")
    go_on.set()
    await until(lambda: router.router is not None and router.router.state.turns == 0)

    assert len(prefill.legs) == legs, "no leg was sent for it"
    await before.leave()
    assert (await router.chat(*MORE)).path == "warm"
    await settled(router, [prefill, decode])


async def test_while_its_handle_is_looked_for(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    assert router.router is not None
    find = router.router.store.find
    called, go_on = held_up(router.router.store, "find")
    client = Leaving(router)
    await called.wait()
    await client.leave()
    await left(router, "queue")
    go_on.set()

    router.router.store.find = find  # type: ignore[method-assign]
    assert len(prefill.legs) == 1
    assert (await router.chat(*MORE)).path == "warm"
    await settled(router, [prefill, decode])


async def test_while_its_prompt_is_tokenized(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    decode.tokenize_waits = asyncio.Event()
    client = Leaving(router)
    await decode.arrived.wait()
    await client.leave()
    await left(router, "queue")
    decode.tokenize_waits.set()

    assert len(prefill.legs) == 1
    assert (await router.chat(*MORE)).path == "warm"
    await settled(router, [prefill, decode])


async def test_while_its_prefill_leg_runs(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    go_on = asyncio.Event()
    prefill.script = [waits(go_on)]
    client = Leaving(router)
    await prefill.arrived.wait()
    await client.leave()
    await left(router, "prefill")
    assert not prefill.left.is_set(), "the leg runs to its end: the witness too would see that it did not"
    go_on.set()
    await prefill.finished.wait()

    again = await router.chat(*MORE)

    assert (again.path, again.reason) == ("cold", "taken"), "what the leg read is spent"
    assert len(decode.legs) == 2, "no decode leg followed"
    await settled(router, [prefill, decode])


async def test_between_its_legs(router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
    assert router.router is not None
    spend = router.router.store.spend
    called, go_on = held_up(router.router.store, "spend")
    client = Leaving(router)
    await called.wait()
    assert len(prefill.legs) == 2
    assert prefill.running == 0
    await client.leave()
    await left(router, "prefill")
    go_on.set()
    await until(lambda: router.router is not None and not router.router.background.working)

    router.router.store.spend = spend  # type: ignore[method-assign]
    assert len(decode.legs) == 1, "no decode leg followed"
    assert (await router.chat(*MORE)).path == "cold"
    await settled(router, [prefill, decode])


@pytest.mark.parametrize("streamed", [False, True])
async def test_before_its_answers_first_byte(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, streamed: bool
) -> None:
    decode.script = [waits(asyncio.Event())]
    client = Leaving(router, stream=streamed)
    await decode.arrived.wait()
    await client.leave()

    await decode.left.wait()
    await left(router, "decode")
    assert (await router.chat(*MORE)).path == "cold"
    await settled(router, [prefill, decode])


async def test_after_its_answers_first_byte(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    decode.script = [starts_then_waits(asyncio.Event())]
    client = Leaving(router, stream=True)
    await decode.arrived.wait()
    await until(lambda: router.router is not None and router.router.state.turns == 1)
    await client.leave()

    await decode.left.wait()
    assert (await router.chat(*MORE)).path == "cold"
    # The engine, which was cancelled, retains nothing; the script has made up a handle all the same.
    await settled(router, [prefill, decode], lost=1)
