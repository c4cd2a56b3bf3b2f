"""Opens the place for handles that the configuration names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from kvloop_router.background import Background
from kvloop_router.config import Config
from kvloop_router.kept import HandleStore
from kvloop_router.metrics import Metrics
from kvloop_router.shared_store import SCRIPT, SharedStore
from kvloop_router.store import MemoryStore
from kvloop_router.store_link import StoreLink


@asynccontextmanager
async def open_store(
    config: Config, *, background: Background, metrics: Metrics, clock: Callable[[], float], random: Random
) -> AsyncIterator[HandleStore]:
    """A place for handles; one that routers share is connected if its server answers, and anew whenever it does not.

    ``background`` has to be closed before the context is left.
    """
    chosen = config.handle_store
    if chosen.url is None:
        memory = MemoryStore(
            max_handles=chosen.max_handles, max_bytes=chosen.max_bytes, clock=clock, ended=metrics.handle_ended
        )
        metrics.handle_store_bytes.set_function(lambda: memory.size)
        yield memory
        return
    link = StoreLink(
        chosen.url,
        script=SCRIPT,
        seconds=chosen.timeout_seconds,
        random=random,
        password_file=_path(chosen.password_file),
        ca_file=_path(chosen.ca_file),
        count=lambda operation, outcome: metrics.handle_store_calls.labels(operation, outcome).inc(),
    )
    store = SharedStore(
        link,
        name=chosen.name,
        max_handles=chosen.max_handles,
        max_bytes=chosen.max_bytes,
        # Past the longest life of any handle nothing of it has to be known.
        keep_seconds=config.handle_ttl_seconds + config.kv_transfer.longest_lease_seconds,
        background=background,
        clock=clock,
        ended=metrics.handle_ended,
    )
    metrics.handle_store_up.set_function(lambda: store.up)
    try:
        await store.connect()
        background.serve(store.watch, "handle store")
        background.serve(store.refresh, "contents of the handle store")
        yield store
    finally:
        await link.close()


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
