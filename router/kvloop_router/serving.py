"""Puts the parts together: the one place where clocks, chance, sockets and files are chosen."""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from kvloop_router import api_keys, listening, tls
from kvloop_router.admin import AdminApi
from kvloop_router.admission import Admission
from kvloop_router.api import PublicApi
from kvloop_router.api_keys import ApiKeys
from kvloop_router.background import Background
from kvloop_router.canary import Canary
from kvloop_router.choosing import paths
from kvloop_router.config import Config
from kvloop_router.discovery import watch
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.engines import Engines, open_client
from kvloop_router.errors import InvalidConfig
from kvloop_router.exchange import Exchange
from kvloop_router.health import Rules
from kvloop_router.kept import HandleStore, Why
from kvloop_router.lease_calls import LeaseCalls
from kvloop_router.leases import Terms
from kvloop_router.metrics import Metrics
from kvloop_router.pairs import Pairs, Templates
from kvloop_router.place import Place
from kvloop_router.probing import Prober
from kvloop_router.readiness import unready
from kvloop_router.release import Releases
from kvloop_router.releasing import Releaser
from kvloop_router.reloading import Reloading
from kvloop_router.renewing import Renewer
from kvloop_router.secret_files import read_digest_key, read_token
from kvloop_router.state import State
from kvloop_router.stores import open_store
from kvloop_router.template_probe import TemplateProbe
from kvloop_router.truth_sampling import TruthSampling
from kvloop_router.turn import Turns
from kvloop_router.turn_log import Tracing, TurnLog
from kvloop_router.worker_api import WorkerApi

_log = logging.getLogger(__name__)
_DISCOVERY_SECONDS = 0.5
_RELOADING_SECONDS = 2.0
_RENEWAL_LEAD = 4
"""Handles are renewed in this part of their time, the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A router that serves, or a worker of one. ``address``, ``admin_address``: where it listens, a worker for its
    parent's questions at a path."""

    address: tuple[str, int]
    admin_address: tuple[str, int] | str
    config: Config
    state: State
    engines: Engines
    pairs: Pairs
    store: HandleStore
    releases: Releases
    background: Background
    releaser: Releaser
    truth_sampling: TruthSampling
    reloading: Reloading
    metrics: Metrics
    probe: TemplateProbe
    admission: Admission

    async def drained(self) -> None:
        """Take no new turns, and wait until the running ones and the legs of clients that left have ended."""
        self.state.draining = True
        self.truth_sampling.stop()
        await self.state.drained()
        await self.background.idle()

    async def release_all(self) -> None:
        """Have every handle released that is in this process's memory: nobody can use them after it."""
        for kept in await self.store.empty():
            self.releases.add(kept, Why.SHUTDOWN)
        await self.releaser.all()


@asynccontextmanager
async def serving(
    config: Config,
    *,
    clock: Callable[[], float] = time.monotonic,
    random: Random | None = None,
    place: Place | None = None,
) -> AsyncIterator[Router]:
    """A router that serves until the context is left, which cuts off what still runs. Raises InvalidConfig.

    place: among the workers of a router; None: this process is the whole router.
    """
    secret = read_digest_key(Path(config.digest_key_file))
    token = read_token(Path(config.admin.token_file)) if place is None else place.token
    random = random or Random()  # noqa: S311  it spreads load
    metrics, pairs, background = Metrics(), Pairs(), Background()
    reloading = Reloading(lambda name, outcome: metrics.reloads.labels(name, outcome).inc())
    keys = _api_keys(config, secret, reloading)
    served, calling = _tls(config, reloading)
    state = State(time.time(), random)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            open_store(config, background=background, metrics=metrics, clock=clock, random=random)
        )
        log = TurnLog(clock=clock, wall_clock=time.time, tracing=_tracing(config, metrics, random, stack))
        engines = Engines(
            await stack.enter_async_context(open_client(calling.trust if calling is not None else None)),
            connect_seconds=config.timeouts.connect_seconds,
            rules=_rules(config),
            default_model=config.model.served_name,
            most_turns=config.limits.turns_per_engine,
            clock=clock,
        )
        probe = TemplateProbe(engines, config.model.served_name)
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
            retained_share=config.kv_transfer.retained_share,
            template=probe.by_case,
        )

        async def forget(process: str) -> None:
            for kept in await store.give_up(process):
                releases.add(kept, Why.WRONG)

        async def found_wrong(process: str) -> None:
            # What was computed from it lies in prefix caches under the old salts, is retained by this process, or will
            # be at the end of the turns that run now.
            state.begin_epoch()
            await forget(process)

        exchange = (
            None
            if place is None
            else Exchange(state=state, pairs=pairs, forget=forget, heard=place.heard, plays=place.plays)
        )

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
            paths=paths(config, clock),
            background=background,
            clock=clock,
            random=random,
            epoch=lambda: state.salt_epoch,
        )
        admission = Admission(
            running=config.limits.turns_per_engine,
            waiting=config.limits.waiting_turns_per_engine,
            engines=engines.decodes,
            clock=clock,
            refused=lambda model: metrics.refused_turns.labels(model).inc(),
        )
        public = PublicApi(
            config=config,
            admission=admission,
            secret=secret,
            api_keys=keys,
            engines=engines,
            turns=turns,
            state=state,
            log=log,
            metrics=metrics,
            clock=clock,
            pod=None if place is None else await listening.parent(stack, place.pod_socket),
        )
        admin = AdminApi(
            config=config,
            token=token,
            engines=engines,
            pairs=pairs,
            store=store,
            state=state,
            log=log,
            metrics=metrics,
            probe=probe,
            clock=clock,
        )

        async def discovered(specs: tuple[EngineSpec, ...]) -> None:
            for process in engines.update(specs):
                releases.orphan(process)
                await store.orphan(process)
            for spec in specs:
                for kept in await store.give_up(spec.process) if spec.ending else ():
                    releases.add(kept, Why.ENGINE_ENDING)
            pairs.update(specs)
            if exchange is not None:
                await exchange.apply()

        background.serve(await _discovery(config, discovered, metrics, random), "discovery")
        background.serve(lambda: reloading.run(interval=_RELOADING_SECONDS), "changed files")
        prober = Prober(
            engines,
            config.health_checks,
            leasing=config.kv_transfer.bidirectional_kv_xfer,
            clock=clock,
            random=random,
        )
        background.serve(prober.run, "health checks")

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
        if config.template_probe.enabled:
            background.serve(probe.run, "template probe")
        if config.canary.enabled:
            canary = Canary(
                config=config,
                engines=engines,
                pairs=pairs,
                releases=releases,
                clock=clock,
                random=random,
                plays=lambda: exchange is None or exchange.plays,
            )
            background.serve(canary.run, "canary")
        if place is not None and exchange is not None:
            await listening.to_parent(stack, WorkerApi(admin, exchange).application(), place.socket)
            if place.holds_off:
                await listening.once(lambda: unready(config, state, engines) is None)
        address = await listening.listen(
            stack,
            public.application(),
            config.listen.host,
            config.listen.port,
            context=served.context if served else None,
            among_others=place is not None,
        )
        router = Router(
            address=address,
            admin_address=(
                await listening.listen(stack, admin.application(), config.admin.host, config.admin.port)
                if place is None
                else place.socket
            ),
            config=config,
            state=state,
            engines=engines,
            pairs=pairs,
            store=store,
            releases=releases,
            background=background,
            releaser=releaser,
            truth_sampling=truth_sampling,
            reloading=reloading,
            metrics=metrics,
            probe=probe,
            admission=admission,
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


def _api_keys(config: Config, secret: bytes, reloading: Reloading) -> ApiKeys:
    """The keys, which change with their file. Raises InvalidConfig."""
    if config.api_keys_file is None:
        return ApiKeys(secret)
    path = Path(config.api_keys_file)
    keys = ApiKeys(secret, api_keys.read(path))
    reloading.watch("apiKeysFile", (path,), lambda: keys.replace(api_keys.read(path)))
    return keys


def _tls(config: Config, reloading: Reloading) -> tuple[tls.Serving | None, tls.Calling | None]:
    """To clients and to engines, with files that are watched. Raises InvalidConfig."""
    serves = tls.Serving(config.listen.tls) if config.listen.tls is not None else None
    calls = tls.Calling(config.engine_tls) if config.engine_tls is not None else None
    for name, part in (("listen.tls", serves), ("engineTls", calls)):
        if part is not None:
            reloading.watch(name, part.paths, part.load)
    return serves, calls


def _tracing(config: Config, metrics: Metrics, random: Random, stack: AsyncExitStack) -> Tracing | None:
    """What makes spans, where spans are wanted. Raises InvalidConfig."""
    if config.tracing is None:
        return None
    try:
        from kvloop_router import tracing
    except ImportError as error:
        raise InvalidConfig(f"tracing: {error.name} is not installed; it comes with kvloop[tracing]") from error
    tracer = tracing.Tracer(
        config.tracing,
        random=random,
        attributes={"service.name": "kvloop-router", "service.instance.id": platform.node()},
        count=lambda outcome, spans: metrics.spans.labels(outcome).inc(spans),
    )
    stack.push_async_callback(asyncio.to_thread, tracer.close)
    return tracer


def _rules(config: Config) -> Rules:
    checks = config.health_checks
    return Rules(
        check_failures=checks.failures,
        check_successes=checks.successes,
        leg_failures=checks.leg_failures,
        suspect_seconds=checks.suspect_seconds,
    )


def _terms(config: Config) -> Terms:
    ttl = float(config.handle_ttl_seconds)
    return Terms(
        ttl=ttl,
        margin=config.kv_transfer.decoder_kv_blocks_ttl_seconds - ttl,
        lead=ttl / _RENEWAL_LEAD,
        expected_gap=config.leases.expected_gap_seconds,
        patience=config.leases.patience,
    )
