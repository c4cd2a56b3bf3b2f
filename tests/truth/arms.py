"""The routers that the truth test is played through: kvloop's own, and one that compares nothing."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp

from kvloop_connector.settings import Connector
from tests.harness.engines import Engine, Engines
from tests.integration.router_process import TOKEN, RouterUnderTest, routing, until
from tests.integration.worker_processes import eventually
from tests.truth import legs
from tests.truth.stage import Stage
from tests.truth.turns import Ask

API_KEYS: Final = ("key-of-one-tenant", "key-of-another-tenant")
ROUTER_SECONDS: Final = 60.0
"""How long a router may take to see an engine that was started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """An answer that came through a router, as `Answered` and the oracle want to know it. reused, had: tokens; see
    `Answered`."""

    status: int
    text: str
    path: str = ""
    reason: str = ""
    reused: int = 0
    had: int = 0
    prefill: str = ""
    decode: str = ""


class Arm(Protocol):
    """A router under test."""

    async def chat(self, ask: Ask, body: Mapping[str, Any]) -> Got:
        """The answer to a turn."""
        ...

    def clock(self) -> float:
        """The router's clock, in seconds."""
        ...

    def move_on(self, seconds: float) -> None:
        """Put that clock forward."""
        ...

    async def restarted(self, engine: Engine, *, told: bool) -> None:
        """An engine is there again; ``told``: whether the router learns that it is another process."""
        ...


@asynccontextmanager
async def kvloops_router(directory: Path, stage: Stage) -> AsyncIterator[Arm]:
    """kvloop's own router: with KvloopConnector prefill proves what is reused, else the router does."""
    keys = directory / "api-keys"
    keys.write_text("\n".join(API_KEYS))
    settings = stage.engines.decode[0].spec.settings
    connector = Connector.KVLOOP if stage.engines.kind.verifies else Connector.NIXL
    async with routing(
        directory,
        stage.engines.as_discovery_file(),
        handleTtlSeconds=stage.router_ttl,
        kvTransfer={
            "connector": connector.value,
            "kvRecomputeThreshold": settings.kv_recompute_threshold,
            "decoderKvBlocksTtlSeconds": settings.decoder_kv_blocks_ttl,
        },
        apiKeysFile=str(keys),
    ) as router:
        yield _KvloopsRouter(router, stage.engines)


class _KvloopsRouter:
    def __init__(self, router: RouterUnderTest, engines: Engines) -> None:
        self._router = router
        self._engines = engines
        self._entries = {entry["name"]: entry for entry in engines.as_discovery_file()}

    async def chat(self, ask: Ask, body: Mapping[str, Any]) -> Got:
        told = {"conversation_id": ask.conversation} if ask.told else {}
        sent = {**body, "stream": ask.stream, **told}
        headers = {"Authorization": f"Bearer {API_KEYS[ask.talk.tenant]}"}
        got = await legs.post(self._router.session, self._router.url, sent, headers)
        reason = got.headers.get("X-Kvloop-Reason", "")
        return Got(
            status=got.status,
            text=got.text,
            path=got.headers.get("X-Kvloop-Path", ""),
            reason=reason,
            reused=int(got.headers.get("X-Kvloop-Reused-Tokens", "0")),
            had=await self._had(got.headers["X-Request-Id"]) if reason == "below_threshold" else 0,
            prefill=got.headers.get("X-Kvloop-Prefill", ""),
            decode=got.headers.get("X-Kvloop-Decode", ""),
        )

    async def _had(self, request_id: str) -> int:
        """What was proven to be enough for a read, which the prefill engine did not do."""
        url = f"{self._router.admin_url}/admin/v1/turns/{request_id}"
        proven = 0

        async def told() -> bool:
            # A turn is known there once it has ended, which may be after its client has read all of it.
            nonlocal proven
            async with self._router.session.get(url, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
                if response.status == 200:
                    proven = (await response.json())["proven_tokens"]
                return response.status == 200

        await eventually(told)
        settings = self._engines.decode[0].spec.settings
        return proven if proven >= settings.kv_recompute_threshold else 0

    def clock(self) -> float:
        return self._router.clock()

    def move_on(self, seconds: float) -> None:
        self._router.clock.ahead += seconds

    async def restarted(self, engine: Engine, *, told: bool) -> None:
        if told:
            self._entries[engine.name] = {**self._entries[engine.name], "podUID": engine.pod_uid}
            self._router.list_engines(list(self._entries.values()))
        assert self._router.router is not None
        known = self._router.router.engines

        def there() -> bool:
            found = {each.spec.name: each for each in known if each.healthy}
            current = self._entries[engine.name]["podUID"]
            return len(found) == len(self._entries) and found[engine.name].spec.pod_uid == current

        await until(there, seconds=ROUTER_SECONDS)


@asynccontextmanager
async def naive_router(directory: Path, stage: Stage) -> AsyncIterator[Arm]:
    """A router that compares nothing."""
    async with session_of_requests() as session:
        router = legs.NaiveRouter(session, stage.engines.prefill, stage.engines.decode)
        yield _Naive(router, salt=uuid.uuid4().hex)
        await router.close()


class _Naive:
    """salt: for every turn, so that what it spoils is spoilt for its own turns only."""

    def __init__(self, router: legs.NaiveRouter, salt: str) -> None:
        self._router = router
        self._salt = salt

    async def chat(self, ask: Ask, body: Mapping[str, Any]) -> Got:
        turned, prefill, decode = await self._router.chat(ask, {**body, "cache_salt": self._salt})
        return Got(status=turned.status, text=turned.text, prefill=prefill.name, decode=decode.name)

    def clock(self) -> float:
        return time.monotonic()

    def move_on(self, seconds: float) -> None:
        pass

    async def restarted(self, engine: Engine, *, told: bool) -> None:
        pass


def session_of_requests() -> aiohttp.ClientSession:
    """Makes HTTP requests, for tests that start engines again."""
    # Engines end and start again on the same address: no connection outlives its request.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=180)
    )
