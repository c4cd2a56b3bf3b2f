"""A router for tests, in this process or as one of its own, and a client for it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import yaml

from kvloop_router.config import parse
from kvloop_router.serving import Router, serving
from tests.integration import hazards
from tests.integration.scripted_engine import ScriptedEngine, running

TOKEN = "admin-token"
MODEL = "tiny"


class Clock:
    """The monotonic clock, which a test can move on."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@dataclass(frozen=True, slots=True)
class Got:
    """An answer of the router, read to its end."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def path(self) -> str:
        return self.headers["X-Kvloop-Path"]

    @property
    def reason(self) -> str:
        return self.headers.get("X-Kvloop-Reason", "")

    @property
    def reused(self) -> int:
        return int(self.headers["X-Kvloop-Reused-Tokens"])

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def content(self) -> str:
        """The text of a chat or completions answer, streamed or not."""
        if not self.text.startswith("data:"):
            choice = self.json["choices"][0]
            return str(choice["message"]["content"] if "message" in choice else choice["text"])
        chunks = [json.loads(line[6:]) for line in self.text.splitlines() if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return "".join(
            choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices
        )


@dataclass(slots=True)
class RouterUnderTest:
    """A router that serves, and the files it reads."""

    url: str
    admin_url: str
    engines_file: Path
    session: aiohttp.ClientSession
    clock: Clock
    router: Router | None = None

    def list_engines(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Write the engines file, by a rename as its writer does."""
        write_engines(self.engines_file, entries)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Got:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, data=data, headers=sent) as response:
            return Got(response.status, response.headers, await response.text())

    async def get(self, path: str) -> Got:
        async with self.session.get(self.url + path) as response:
            return Got(response.status, response.headers, await response.text())

    async def admin(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.session.get(self.admin_url + path, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def chat(self, *contents: str, headers: dict[str, str] | None = None, **fields: Any) -> Got:
        """A turn with these messages, of user and assistant by turns."""
        return await self.post("/v1/chat/completions", chat_body(*contents, **fields), headers)

    async def metric(self, line: str) -> float:
        """The value of the series that starts so; 0 where there is none."""
        for found in (await self.get("/metrics")).text.splitlines():
            if found.startswith(line):
                return float(found.rsplit(" ", 1)[1])
        return 0.0


def chat_body(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    return {"model": MODEL, "messages": messages, **fields}


def write_engines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(list(entries)))
    beside.replace(path)


def configuration(directory: Path, **changes: Any) -> dict[str, Any]:
    """A configuration for engines that are tried out by nobody; sections in ``changes`` are merged."""
    (directory / "digest-key").write_text("ab" * 32)
    (directory / "admin-token").write_text(TOKEN)
    document: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"host": "127.0.0.1", "port": 0, "tokenFile": str(directory / "admin-token")},
        "model": {"id": "model", "servedName": MODEL},
        "discovery": {"file": str(directory / "engines.json")},
        "digestKeyFile": str(directory / "digest-key"),
        "kvTransfer": {"kvRecomputeThreshold": 8},
        "engine": {"promptTokenIds": True, "streamHandles": True, "multiGroupReuse": True},
        "canary": {"enabled": False},
        "templateProbe": {"enabled": False},
        # How long things take on a test's machine is no reason to go another way.
        "pathChoice": {"mode": "Warm"},
    }
    for name, value in changes.items():
        document[name] = {**document.get(name, {}), **value} if isinstance(value, dict) else value
    return document


@asynccontextmanager
async def routing(
    directory: Path, entries: Sequence[Mapping[str, Any]], **changes: Any
) -> AsyncIterator[RouterUnderTest]:
    """A router over these engines, ready for turns."""
    document = configuration(directory, **changes)
    engines_file = Path(document["discovery"]["file"])
    write_engines(engines_file, entries)
    clock = Clock()
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            serving(parse(yaml.safe_dump(document), {}), clock=clock, random=Random(7))
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        under_test = RouterUnderTest(
            url="http://{}:{}".format(*router.address),
            admin_url="http://{}:{}".format(*router.admin_address),
            engines_file=engines_file,
            session=session,
            clock=clock,
            router=router,
        )
        healthy = {entry["name"] for entry in entries}

        def all_healthy() -> bool:
            return {engine.spec.name for engine in router.engines if engine.healthy} == healthy

        await until(all_healthy)
        stack.enter_context(hazards.a_router_serves())
        yield under_test


@asynccontextmanager
async def scripted(directory: Path, *engines: ScriptedEngine, **changes: Any) -> AsyncIterator[RouterUnderTest]:
    """A router over scripted engines, which are started too."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(running(engine))
        entries = [engine.entry() for engine in engines]
        yield await stack.enter_async_context(routing(directory, entries, **changes))


async def until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Wait for a state; fails where it does not come."""
    async with asyncio.timeout(seconds):
        # What is waited for is the state of a server, which sets no event for a test.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_metric(router: RouterUnderTest, line: str, value: float, *, seconds: float = 60.0) -> None:
    """Wait until a series, named as it is exposed, has this value; fails where it never has."""
    async with asyncio.timeout(seconds):
        while await router.metric(line) != value:  # noqa: ASYNC110  a counter is read over HTTP
            await asyncio.sleep(0.05)


async def until_only_pair_is(router: RouterUnderTest, wanted: str) -> dict[str, Any]:
    """Wait until the canary's verdict on the only pair is this one; what the admin port says of the pair then."""
    assert router.router is not None
    pairs = router.router.pairs

    def reached() -> bool:
        # What the engines count with a delay is waited for by the router's clock.
        router.clock.ahead += 1
        return [report.verdict.value for report in pairs.reports()] == [wanted]

    await until(reached, seconds=60)
    (pair,) = (await router.admin("/admin/v1/pairs"))["pairs"]
    return dict(pair)
