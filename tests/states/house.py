"""A router with its engines and clients, all in one loop, and what has to be true of them whenever nothing runs."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

import aiohttp
import yaml

from kvloop_connector.settings import Role
from kvloop_router import serving as router_serving
from kvloop_router.config import parse
from kvloop_router.pairs import Templates
from kvloop_router.serving import Router, serving
from tests.integration.router_process import configuration, write_engines
from tests.states.engines import THRESHOLD, TTL_SECONDS, Kind, LocalEngine, Network

API_KEYS: Final = ("key-of-one-tenant", "key-of-another-tenant")
ROUTER_TTL_SECONDS: Final = 30
_PATIENCE_SECONDS: Final = 900.0
"""Of virtual time: whatever takes longer is stuck."""

_IDLE_SECONDS: Final = 120.0
"""Until when all that was asked for has ended in any case."""

_SETTLING_SECONDS: Final = 8.0
"""What releases may take: a second's wait for a leg to ride on, and a second attempt."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client read.

    status: 0 where it left, -1 where the answer broke off or ended by an error. texts: by index of the choice.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    raw: str = ""

    @property
    def reused(self) -> int:
        return int(self.headers.get("X-Kvloop-Reused-Tokens", "0"))


class House:
    """engines: two prefill, then the decode engines."""

    def __init__(self, router: Router, engines: tuple[LocalEngine, ...], network: Network, directory: Path) -> None:
        self.router = router
        self.engines = engines
        self.network = network
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=False, limit=0))
        self._directory = directory
        self._entries = {engine.name: engine.entry() for engine in engines}

    @property
    def decode(self) -> tuple[LocalEngine, ...]:
        return tuple(engine for engine in self.engines if engine.role is Role.DECODE)

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], leaves: float | None) -> Reply:
        """Send a request. ``leaves``: seconds after which the client goes away."""
        url = "http://{}:{}{}".format(*self.router.address, path)
        left = leaves is not None
        try:
            async with asyncio.timeout(leaves if leaves is not None else _PATIENCE_SECONDS):
                async with self._session.post(url, data=json.dumps(body).encode(), headers=headers) as response:
                    raw = await response.text()
                    if raw.startswith("data:") and '"error"' in raw:
                        return Reply(-1, raw=raw)
                    return Reply(response.status, response.headers, _texts(raw, response.status), raw)
        except TimeoutError:
            if not left:
                raise AssertionError(f"stuck: no answer after {_PATIENCE_SECONDS:.0f} s to {body}") from None
            return Reply(0)
        except aiohttp.ClientError:
            return Reply(-1)

    async def delete(self, conversation: str, headers: Mapping[str, str]) -> None:
        """End a conversation."""
        url = "http://{}:{}/kvloop/v1/conversations/{}".format(*self.router.address, conversation)
        async with self._session.delete(url, headers=headers) as response:
            assert response.status == 200, await response.text()

    async def restart(self, engine: LocalEngine, *, told: bool) -> None:
        """Another process takes an engine's place. ``told``: whether the router is, by another pod UID."""
        gone = engine.engine_id
        await engine.stop()
        await engine.start()
        if told:
            self._entries[engine.name] = engine.entry()
            self._list()
            await asyncio.sleep(1)
            self.network.known_to_be_gone.add(gone)
        # One that was found gone serves again after the next good check.
        await asyncio.sleep(8)

    async def drain(self, engine: LocalEngine, *, draining: bool) -> None:
        """Mark an engine, or take the mark off."""
        self._entries[engine.name] = {**self._entries[engine.name], "draining": draining}
        self._list()
        await asyncio.sleep(1)

    async def quiet(self) -> None:
        """Wait until nothing runs, the legs of clients that left included."""
        patience = self.network.now() + _IDLE_SECONDS
        while running := [*self._running()]:
            assert self.network.now() < patience, f"stuck: {running}"
            await asyncio.sleep(0.05)

    async def settle(self) -> None:
        """Wait until nothing runs, and what is to be released is."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await self.quiet()
            while len(self.router.releases):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
            await asyncio.sleep(_SETTLING_SECONDS)

    def faults(self) -> Iterator[str]:
        """What is wrong, while nothing runs."""
        yield from self.network.violations
        for engine in self.engines:
            if engine.engine.dead:
                yield f"{engine.name} is dead: {engine.engine.dead}"
            counters = engine.engine.counters
            if counters.reads_not_granted or counters.released_while_read or engine.engine.leaked_blocks:
                yield f"{engine.name}: {counters}, leaked {engine.engine.leaked_blocks}"

    async def unknown_retained(self) -> AsyncIterator[str]:
        """What a decode engine retains, and the router does not know, while nobody has taken anything."""
        known = {kept.ident for kept in await self.router.store.due(inf)}
        # The router lets go of a handle sooner than its engine does.
        over = self.network.now() + TTL_SECONDS - ROUTER_TTL_SECONDS
        for engine in self.decode:
            for request_id, record in engine.engine.retained.items():
                if record.lease is None:
                    yield f"{engine.name} retains {request_id} for ever"
                elif record.lease.deadline > over and f"{engine.engine_id}/{request_id}" not in known:
                    yield f"{engine.name} retains {request_id}, which the router does not know"

    def _running(self) -> Iterator[str]:
        if self.router.state.turns or self.router.background.working:
            yield f"{self.router.state.turns} turns and {self.router.background.working} legs have not ended"
        for known in self.router.engines:
            if known.load or known.needed:
                yield f"{known.spec.name} is counted as needed: load {known.load}, needed {known.needed}"
        for engine in self.engines:
            if not engine.idle:
                yield f"{engine.name} has requests that have not ended"

    def _list(self) -> None:
        write_engines(self._directory / "engines.json", list(self._entries.values()))


@asynccontextmanager
async def house(kind: Kind, directory: Path, seed: int, decodes: int, templates: Templates) -> AsyncIterator[House]:
    """A house that serves. ``templates``: what its router knows of the engines' tokenizers already."""
    loop = asyncio.get_running_loop()
    network = Network(loop.time)
    engines = tuple(
        LocalEngine(
            f"{role.value}-{index}",
            role,
            kind,
            network,
            number=1000 + 10 * index + (role is Role.DECODE),
            # One whose own cache never makes a pull unnecessary.
            prefix_caching=(role, index) != (Role.PREFILL, 1),
        )
        for role, count in ((Role.PREFILL, 2), (Role.DECODE, decodes))
        for index in range(count)
    )
    keys = directory / "api-keys"
    keys.write_text("\n".join(API_KEYS))
    document = configuration(
        directory,
        handleTtlSeconds=ROUTER_TTL_SECONDS,
        kvTransfer={
            "connector": "KvloopConnector" if kind.verifying else "NixlConnector",
            "kvRecomputeThreshold": THRESHOLD,
            "decoderKvBlocksTtlSeconds": TTL_SECONDS,
        },
        pathChoice={"mode": kind.path},
        truthSampling={"everyNthWarmTurn": 50},
        apiKeysFile=str(keys),
    )
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        write_engines(directory / "engines.json", [engine.entry() for engine in engines])
        stack.enter_context(patch.object(router_serving, "Templates", lambda: templates))
        router = await stack.enter_async_context(
            serving(parse(yaml.safe_dump(document), {}), clock=loop.time, random=Random(seed))
        )
        placed = House(router, engines, network, directory)
        stack.push_async_callback(placed.close)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while sum(engine.healthy for engine in router.engines) < len(engines):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield placed
        await placed.settle()


class Hosted:
    """A house that lives in a task of its own, for whoever is no coroutine."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, kind: Kind, seed: int, decodes: int, templates: Templates
    ) -> None:
        self._loop = loop
        self._end = asyncio.Event()
        self._open: asyncio.Future[House] = loop.create_future()
        self._task = loop.create_task(self._live(kind, seed, decodes, templates))
        self.house = loop.run_until_complete(self._opened())

    async def _opened(self) -> House:
        waits: list[asyncio.Future[Any]] = [self._task, self._open]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        return self._open.result()

    def close(self) -> None:
        """End all of it."""
        self._end.set()
        self._loop.run_until_complete(self._task)

    async def _live(self, kind: Kind, seed: int, decodes: int, templates: Templates) -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with house(kind, Path(folder), seed, decodes, templates) as placed:
                self._open.set_result(placed)
                await self._end.wait()


@contextmanager
def nothing_left(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Fails where tasks or file descriptors are left of what was done within."""
    before = _descriptors()
    yield
    loop.run_until_complete(asyncio.sleep(1))
    left = asyncio.all_tasks(loop)
    assert not left, f"tasks are left: {left}"
    assert len(_descriptors()) <= len(before), f"descriptors are left: {_descriptors() - before}"


def _descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def _texts(raw: str, status: int) -> tuple[str, ...]:
    if status != 200:
        return ()
    if not raw.startswith("data:"):
        choices = json.loads(raw)["choices"]
        return tuple(_said(choice.get("message", choice)) for choice in choices)
    texts: dict[int, str] = {}
    for line in raw.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line[6:])
            for choice in chunk.get("choices", ()):
                index = choice["index"]
                texts[index] = texts.get(index, "") + _said(choice.get("delta", choice))
    return tuple(texts[index] for index in sorted(texts))


def _said(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or message.get("text") or "")
