"""Puts the parts together and runs them: the one place where clocks, chance and sockets are chosen."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import kopf
from aiohttp import web

from kvloop_operator import watches
from kvloop_operator.cluster.api import Api, Connection, connected
from kvloop_operator.cluster.errors import ApiError, Forbidden, NotFound
from kvloop_operator.cluster.kinds import CHILDREN, POD, RESOURCE, Kind
from kvloop_operator.cluster.lag import WatchLag
from kvloop_operator.cluster.store import Key, Store
from kvloop_operator.facts import OPTIONAL_APIS, OperatorSettings
from kvloop_operator.live import Object
from kvloop_operator.metrics import Metrics
from kvloop_operator.reconcile import Reconciler
from kvloop_operator.routers import Routers
from kvloop_operator.settings import RunSettings
from kvloop_operator.work_queue import WorkQueue

_log = logging.getLogger(__name__)

_STUCK_SECONDS: Final = 120.0
_START_RETRY_SECONDS: Final = (1.0, 2.0, 4.0, 8.0, 15.0)


@dataclass(slots=True)
class Operator:
    """The operator's tasks and what they share."""

    settings: RunSettings
    api: Api
    store: Store
    reconciler: Reconciler
    queue: WorkQueue[Key] = field(default_factory=lambda: WorkQueue(time.monotonic, random.Random()))  # noqa: S311
    lag: WatchLag = field(default_factory=WatchLag)
    started: bool = False
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(
            resources=lambda: len(self.store.resources()),
            waiting=lambda: len(self.queue),
            lag=self.queue.lag,
            requests=lambda: self.api.requests,
            writes=lambda: self.api.writes,
        )

    def seen(self, found: Object, deleted: bool) -> None:
        """An event of a watch."""
        self.lag.delivered(found, deleted=deleted)
        key = self.store.remove(found) if deleted else self.store.put(found)
        if key is not None and self.started:
            self.queue.add(key)

    async def work(self) -> None:
        """One worker: passes over resources, without an end."""
        while True:
            key = await self.queue.take()
            started = time.monotonic()
            result = "ok"
            try:
                again_after = await self.reconciler.reconcile(key)
            except ApiError as error:
                result = type(error).__name__
                wait = self.queue.failed(key, retry_after=error.retry_after)
                _log.warning("tried again later", extra={"resource": str(key), "seconds": wait, "error": str(error)})
            except Exception:  # noqa: BLE001  whatever it is
                # A defect in the pass over one resource must not stop those over the others.
                result = "defect"
                wait = self.queue.failed(key)
                _log.exception("a pass failed", extra={"resource": str(key), "seconds": wait})
            else:
                if self.store.resource(key) is None:
                    self.queue.forget(key)
                else:
                    self.queue.done(key, again_after=again_after)
            self.metrics.reconciles.labels(result).inc()
            self.metrics.seconds.observe(time.monotonic() - started)

    async def read_everything(self) -> None:
        """Read every object anew, and have a pass over every resource. Raises ApiError."""
        await self._find_optional_apis()
        kinds = [kind for kind in (*CHILDREN, POD, RESOURCE) if self._is_there(kind)]
        for namespace in self.settings.namespaces or (None,):
            for kind in kinds:
                found, version = await self.api.list(kind, namespace, labels=watches.labels_of(kind))
                self.store.replace(kind, namespace, found, version)
                if kind.watched and self.started:
                    self.lag.listed(kind.kind, found, time.monotonic())
        self.reconciler.read_secrets_anew()
        for key in self.store.resources():
            self.queue.add(key)

    async def start(self) -> None:
        """Read everything for the first time, however long it takes. Raises Forbidden and NotFound at once."""
        for tries in range(1_000_000):
            try:
                await self.read_everything()
            except (Forbidden, NotFound):
                raise
            except ApiError as error:
                wait = error.retry_after or _START_RETRY_SECONDS[min(tries, len(_START_RETRY_SECONDS) - 1)]
                _log.warning("the cluster cannot be read yet", extra={"seconds": wait, "error": str(error)})
                await asyncio.sleep(wait)
            else:
                self.started = True
                return

    async def resync(self) -> None:
        """Read everything anew from time to time: a watch may have missed something."""
        while True:
            await asyncio.sleep(self.settings.resync_seconds)
            try:
                await self.read_everything()
            except ApiError as error:
                self.metrics.resyncs.labels(type(error).__name__).inc()
                _log.warning("not everything could be read anew", extra={"error": str(error)})
            else:
                self.metrics.resyncs.labels("ok").inc()

    def faults(self) -> list[str]:
        """Why this process should be started anew; nothing while all is well."""
        found = [f"the watch of {kind} is dead" for kind in self.lag.dead(time.monotonic())]
        if self.queue.lag() > _STUCK_SECONDS:
            found.append("resources wait for a pass and no worker takes them")
        return found

    async def _find_optional_apis(self) -> None:
        apis = frozenset([api for api in sorted(OPTIONAL_APIS) if await self.api.has(api)])
        self.reconciler.settings = OperatorSettings(
            router_image=self.settings.router_image,
            operator_namespace=self.settings.operator_namespace,
            apis=apis,
        )

    def _is_there(self, kind: Kind) -> bool:
        return kind.optional is None or kind.optional in self.reconciler.settings.apis


async def run(settings: RunSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises ApiError where the cluster cannot be worked with at all."""
    async with (
        connected("kvloop-operator") as connection,
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
    ):
        store = Store()
        reconciler = Reconciler(
            api=connection.api,
            store=store,
            routers=Routers(session, time.time),
            settings=OperatorSettings(router_image=settings.router_image, apis=frozenset()),
            unschedulable_seconds=settings.unschedulable_seconds,
            clock=time.time,
        )
        operator = Operator(settings, connection.api, store, reconciler)
        async with _serving(operator), asyncio.TaskGroup() as group:
            # Before the first watch: without the children a pass would take them for missing.
            await operator.start()
            tasks = [group.create_task(operator.work()) for _ in range(settings.workers)]
            tasks.append(group.create_task(operator.resync()))
            _log.info("watching", extra={"namespaces": settings.namespaces or "all"})
            await _watch(operator, connection)
            for task in tasks:
                task.cancel()


async def _watch(operator: Operator, connection: Connection) -> None:
    """Watch until a signal asks to end."""
    settings = operator.settings
    await kopf.operator(
        registry=watches.registry(operator.seen, connection.login),
        settings=watches.settings(),
        standalone=True,
        # Nobody peers with it. Left alone, kopf asks for the name of a user that containers do not have.
        identity="kvloop-operator",  # type: ignore[arg-type]
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
    )


@asynccontextmanager
async def _serving(operator: Operator) -> AsyncIterator[None]:
    async def healthz(_: web.Request) -> web.Response:
        faults = operator.faults()
        return web.Response(status=503 if faults else 200, text="\n".join(faults or ["ok"]) + "\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(status=200 if operator.started else 503, text=f"started: {operator.started}\n")

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=operator.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    probes, metrics = web.Application(), web.Application()
    probes.router.add_get("/healthz", healthz)
    probes.router.add_get("/readyz", readyz)
    metrics.router.add_get("/metrics", scrape)
    settings = operator.settings
    runners = []
    try:
        for app, port in ((probes, settings.probe_port), (metrics, settings.metrics_port)):
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, settings.probe_host, port).start()
        yield
    finally:
        for runner in runners:
            await runner.cleanup()
