"""Puts the parts together: the one place where clocks, chance, sockets and files are chosen."""

from __future__ import annotations

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

from kvloop_router.admin import AdminApi
from kvloop_router.api import PublicApi
from kvloop_router.background import Background
from kvloop_router.canary import Canary
from kvloop_router.config import Config, read_api_keys, read_digest_key, read_token
from kvloop_router.discovery import watch
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.engines import Engines, open_client
from kvloop_router.kept import Why
from kvloop_router.lease_calls import LeaseCalls
from kvloop_router.leases import Terms
from kvloop_router.metrics import Metrics
from kvloop_router.pairs import Pairs, Templates
from kvloop_router.release import Releases
from kvloop_router.releasing import Releaser
from kvloop_router.renewing import Renewer
from kvloop_router.state import State
from kvloop_router.store import MemoryStore
from kvloop_router.truth_sampling import TruthSampling
from kvloop_router.turn import Turns
from kvloop_router.turn_log import TurnLog

_log = logging.getLogger(__name__)
_DISCOVERY_SECONDS = 0.5
_HEALTH_SECONDS = 2.0
_RENEWAL_LEAD = 4
"""Handles are renewed in this part of their time, the last."""


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
    releaser: Releaser
    truth_sampling: TruthSampling

    async def drained(self) -> None:
        """Take no new turns, and wait until the running ones and the legs of clients that left have ended."""
        self.state.draining = True
        self.truth_sampling.stop()
        await self.state.drained()
        await self.background.idle()

    async def release_all(self) -> None:
        """Have every kept handle released: they are in this process's memory, and nobody can use them after it."""
        for kept in await self.store.empty():
            self.releases.add(kept, Why.SHUTDOWN)
        await self.releaser.all()


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

    async with AsyncExitStack() as stack:
        engines = Engines(
            await stack.enter_async_context(open_client()),
            connect_seconds=config.timeouts.connect_seconds,
            leasing=config.kv_transfer.bidirectional_kv_xfer,
        )
        calls = LeaseCalls(engines)
        releases = Releases(
            clock,
            lambda outcome: metrics.handles.labels(outcome).inc(),
            given_up=lambda why: metrics.given_up.labels(why.value).inc(),
            direct=calls.offered,
        )
        stack.push_async_callback(background.close)
        metrics.observe(
            engines=lambda: tuple(engines),
            pairs=pairs.reports,
            handles=lambda: len(store),
            turns=lambda: state.turns,
            retained_blocks=store.retained_blocks,
        )

        async def found_wrong(process: str) -> None:
            # What was computed from it lies in prefix caches under the old salts, is retained by this process, or will
            # be at the end of the turns that run now.
            state.salt_epoch = random.randbytes(16)
            for kept in await store.give_up(process):
                releases.add(kept, Why.WRONG)

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
                    releases.add(kept, Why.ENGINE_ENDING)
            pairs.update(specs)

        background.serve(await _discovery(config, discovered, metrics, random), "discovery")
        background.serve(lambda: engines.watch(interval=_HEALTH_SECONDS), "health checks")

        releaser = Releaser(config=config, releases=releases, engines=engines, pairs=pairs, calls=calls, random=random)
        background.serve(releaser.tell, "releases by name")
        background.serve(releaser.fill, "releases")
        if config.kv_transfer.bidirectional_kv_xfer and config.reuse and config.leases.renew:
            renewer = Renewer(
                terms=_terms(config),
                store=store,
                engines=engines,
                calls=calls,
                count=lambda outcome, handles: metrics.renewals.labels(outcome).inc(handles),
                clock=clock,
            )
            background.serve(renewer.run, "renewals")
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
            releaser=releaser,
            truth_sampling=truth_sampling,
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


def _terms(config: Config) -> Terms:
    ttl = float(config.handle_ttl_seconds)
    return Terms(
        ttl=ttl,
        margin=config.kv_transfer.decoder_kv_blocks_ttl_seconds - ttl,
        lead=ttl / _RENEWAL_LEAD,
        expected_gap=config.leases.expected_gap_seconds,
        patience=config.leases.patience,
    )
