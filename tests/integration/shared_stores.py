"""Stores of handles on a real server, and what they tell."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from redis.asyncio import Redis

from kvloop_connector.lifecycle import State
from kvloop_router.background import Background
from kvloop_router.kept import Kept
from kvloop_router.shared_store import SCRIPT, SharedStore
from kvloop_router.store_link import StoreLink
from tests.harness.store_server import PORT, StoreServer
from tests.unit.router.kept_handles import Clock, kept

_numbers = count()


def new_name(what: str) -> str:
    """A name that no other resource on the server has."""
    return f"{what}-{next(_numbers)}"


class Store(SharedStore):
    """One that tells what became of its calls."""

    told: Counter[tuple[str, str]]
    background: Background

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def connected(self) -> bool:
        connection = self._link._connection
        return connection is not None and connection.open


@asynccontextmanager
async def opened(
    server: StoreServer,
    clock: Clock | None,
    *,
    name: str = "",
    most: int = 10,
    seconds: float = 20.0,
    ahead: float = 0.0,
    connects: bool = True,
    scheme: str = "valkey",
    ended: Callable[[State], None] = lambda state: None,
    **security: Path,
) -> AsyncIterator[Store]:
    """A store of its own, or one more of this name; without a clock, on the server's. ahead: of its router's clock."""
    background, told = Background(), Counter[tuple[str, str]]()
    link = StoreLink(
        f"{scheme}://{server.address}:{PORT}",
        script=SCRIPT,
        seconds=seconds,
        random=Random(7),
        count=lambda operation, outcome: told.update([(operation, outcome)]),
        **security,
    )
    loop = asyncio.get_running_loop()
    store = Store(
        link,
        name=name or new_name("test"),
        max_handles=most,
        max_bytes=10**9,
        keep_seconds=900,
        background=background,
        clock=clock or (lambda: loop.time() + ahead),
        shared_clock=clock,
        ended=ended,
    )
    store.told, store.background = told, background
    try:
        assert not connects or await store.connect()
        yield store
    finally:
        await background.close()
        await link.close()


@asynccontextmanager
async def watched(store: Store) -> AsyncIterator[None]:
    """Connected anew after failures."""
    store.background.serve(store.watch, "handle store")
    yield


@asynccontextmanager
async def raw(server: StoreServer) -> AsyncIterator[Redis]:
    """A plain client."""
    client = Redis(host=server.address, port=PORT)
    try:
        yield client
    finally:
        await client.aclose()


def lasting(store: Store, name: str, *contents: str, **facts: Any) -> Kept:
    """A handle that ends 450 seconds from now."""
    now = store.now
    return kept(name, *contents, deadline=now + 450, since=now, ends=now + 3600, **facts)
