"""Puts the parts together: the one place where clocks, chance, sockets and files are chosen."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import web

from kvloop_router import legs
from kvloop_router.admin import AdminApi
from kvloop_router.api import PublicApi
from kvloop_router.background import Background
from kvloop_router.canary import Canary
from kvloop_router.config import Config, read_api_keys, read_digest_key, read_token
from kvloop_router.discovery import watch
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.engines import Engines, open_session
from kvloop_router.errors import EngineError, EngineUnreachable, Unavailable
from kvloop_router.headers import upstream
from kvloop_router.metrics import Metrics
from kvloop_router.pairs import Pairs, Templates
from kvloop_router.policy import choose_releaser
from kvloop_router.release import Pending, Releases
from kvloop_router.request import Api
from kvloop_router.state import State
from kvloop_router.store import MemoryStore
from kvloop_router.truth_sampling import TruthSampling
from kvloop_router.turn import Turns
from kvloop_router.turn_log import TurnLog

_log = logging.getLogger(__name__)
_DISCOVERY_SECONDS = 0.5
_HEALTH_SECONDS = 2.0
_FILLER_SECONDS = 30.0
_RELEASE_ALL_SECONDS = 5.0
_RELEASES_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A router that serves. ``address``, ``admin_address``: where it listens."""

    address: tuple[str, int]
    admin_address: tuple[str, int]
    config: Config
    state: State
    engines: Engines
    pairs: Pairs
    store: MemoryStore
    releases: Releases
    background: Background
    truth_sampling: TruthSampling
    release: Callable[[Pending], Awaitable[None]]

    async def drained(self) -> None:
        """Take no new turns, and wait until the running ones and the legs of clients that left have ended."""
        self.state.draining = True
        self.truth_sampling.stop()
        await self.state.drained()
        await self.background.idle()

    async def release_all(self) -> None:
        """Have every kept handle released: they are in this process's memory, and nobody can use them after it.

        What does not get its turn within a few seconds stays retained until its time is over.
        """
        for kept in await self.store.empty():
            self.releases.add(kept)
        waiting = self.releases.take_all()
        places = asyncio.Semaphore(_RELEASES_AT_ONCE)

        async def one(item: Pending) -> None:
            async with places:
                await self.release(item)

        try:
            async with asyncio.timeout(_RELEASE_ALL_SECONDS), asyncio.TaskGroup() as group:
                for item in waiting:
                    group.create_task(one(item))
        except TimeoutError:
            _log.warning("some handles were not released", extra={"handles": len(waiting)})


@asynccontextmanager
async def serving(
    config: Config, *, clock: Callable[[], float] = time.monotonic, random: Random | None = None
) -> AsyncIterator[Router]:
    """A router that serves until the context is left, which cuts off what still runs. Raises InvalidConfig."""
    secret = read_digest_key(Path(config.digest_key_file))
    token = read_token(Path(config.admin.token_file))
    api_keys = read_api_keys(Path(config.api_keys_file)) if config.api_keys_file else frozenset()
    random = random or Random()  # noqa: S311  it spreads load
    metrics, log, pairs, background = Metrics(), TurnLog(), Pairs(), Background()
    state = State(time.time(), random)
    store = MemoryStore(max_handles=config.handle_store.max_handles, clock=clock, ended=metrics.handle_ended)
    releases = Releases(clock, lambda outcome: metrics.handles.labels(outcome).inc())

    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        engines = Engines(session, connect_seconds=config.timeouts.connect_seconds)
        stack.push_async_callback(background.close)
        metrics.observe(
            engines=lambda: tuple(engines),
            pairs=pairs.reports,
            handles=lambda: len(store),
            turns=lambda: state.turns,
        )

        async def found_wrong(process: str) -> None:
            # What was computed from it lies in prefix caches under the old salts, is retained by this process, or will
            # be at the end of the turns that run now.
            state.salt_epoch = random.randbytes(16)
            for kept in await store.give_up(process):
                releases.add(kept)

        truth_sampling = TruthSampling(
            config=config,
            engines=engines,
            pairs=pairs,
            metrics=metrics,
            background=background,
            random=random,
            found_wrong=found_wrong,
        )
        turns = Turns(
            config=config,
            engines=engines,
            store=store,
            releases=releases,
            pairs=pairs,
            templates=Templates(),
            metrics=metrics,
            truth_sampling=truth_sampling,
            background=background,
            clock=clock,
            random=random,
            epoch=lambda: state.salt_epoch,
        )
        public = PublicApi(
            config=config,
            secret=secret,
            api_keys=api_keys,
            engines=engines,
            turns=turns,
            state=state,
            log=log,
            metrics=metrics,
            clock=clock,
        )
        admin = AdminApi(token=token, engines=engines, pairs=pairs, store=store, state=state, log=log, clock=clock)

        async def discovered(specs: tuple[EngineSpec, ...]) -> None:
            for process in engines.update(specs):
                releases.orphan(process)
                await store.orphan(process)
            for spec in specs:
                for kept in await store.give_up(spec.process) if spec.ending else ():
                    releases.add(kept)
            pairs.update(specs)

        background.serve(await _discovery(config, discovered, metrics, random), "discovery")
        background.serve(lambda: engines.watch(interval=_HEALTH_SECONDS), "health checks")

        async def release(item: Pending) -> None:
            await _fill(item, releases, engines, pairs, config, random)

        background.serve(lambda: _release(releases, release), "releases")
        if config.canary.enabled:
            canary = Canary(config=config, engines=engines, pairs=pairs, releases=releases, clock=clock, random=random)
            background.serve(canary.run, "canary")
        router = Router(
            address=await _listen(stack, public.application(), config.listen.host, config.listen.port),
            admin_address=await _listen(stack, admin.application(), config.admin.host, config.admin.port),
            config=config,
            state=state,
            engines=engines,
            pairs=pairs,
            store=store,
            releases=releases,
            background=background,
            truth_sampling=truth_sampling,
            release=release,
        )
        yield router
        await router.release_all()


async def _discovery(
    config: Config, update: Callable[[tuple[EngineSpec, ...]], Awaitable[None]], metrics: Metrics, random: Random
) -> Callable[[], Coroutine[Any, Any, None]]:
    """What keeps the engines up to date. Raises InvalidConfig."""
    pods = config.discovery.kubernetes
    if pods is None:
        return partial(watch, Path(str(config.discovery.file)), update, interval=_DISCOVERY_SECONDS)
    # The client of the API server takes a second to load, which only a router in a cluster has to spend.
    from kvloop_router import pod_watch

    await pod_watch.check_connection()
    return pod_watch.PodWatch(
        pods.deployment,
        pods.namespace,
        update,
        random=random,
        interrupted=lambda why: metrics.discovery.labels(why).inc(),
    ).run


async def _listen(stack: AsyncExitStack, app: web.Application, host: str, port: int) -> tuple[str, int]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, host, port)
    await site.start()
    bound: tuple[str, int] = runner.addresses[0][:2]
    return bound


async def _release(releases: Releases, release: Callable[[Pending], Awaitable[None]]) -> None:
    """Send a filler request for each handle that found no leg to ride on."""
    while True:
        await releases.wait()
        item = releases.next_due()
        if item is not None:
            await release(item)


async def _fill(
    item: Pending, releases: Releases, engines: Engines, pairs: Pairs, config: Config, random: Random
) -> None:
    try:
        if not engines.present(item.process):
            raise EngineUnreachable(item.decode, "no longer there")
        prefill = choose_releaser(
            engines.snapshot(), random, item.kv_revision, usable=lambda prefill: pairs.usable(prefill, item.decode)
        )
        await engines.complete(
            prefill,
            Api.COMPLETIONS,
            legs.filler(config.model.served_name, item.handle),
            upstream({}, f"release-{item.handle.request_id}"),
            seconds=min(_FILLER_SECONDS, config.timeouts.prefill_seconds),
        )
    except (EngineError, Unavailable) as error:
        _log.info("a handle was not released", extra={"error": str(error)})
        releases.failed(item)
    else:
        releases.sent(item)
