"""The admin port, the metrics and the readiness of a router with several workers: it asks them all, and says one
thing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from kvloop_router import workers_merge
from kvloop_router.admin import LISTED, guarded
from kvloop_router.metrics import CONTENT_TYPE
from kvloop_router.socket_client import Silent, Told
from kvloop_router.workers import Worker, Workers
from kvloop_router.workers_metrics import Totals

_SECONDS = 3.0
_PROBE_SECONDS = 1.5
"""A probe that waits for three seconds is to have its answer although one of the workers has none."""

_Merge = Callable[[Sequence[Any]], dict[str, Any]]


class WorkersApi:
    """Handlers of the parent's listeners. ``totals``: told of workers that end, too."""

    def __init__(self, workers: Workers, totals: Totals, token: str) -> None:
        self._workers = workers
        self._totals = totals
        self._token = token
        self._counting = asyncio.Lock()
        self._ready = False

    def admin(self) -> web.Application:
        """For the admin port."""
        app = web.Application(middlewares=[guarded(self._token)])
        merges: dict[str, _Merge] = {
            "engines": workers_merge.engines,
            "pairs": workers_merge.pairs,
            "turns": partial(workers_merge.turns, most=LISTED),
            "templates": workers_merge.templates,
        }
        for name, merge in merges.items():
            app.router.add_get(f"/admin/v1/{name}", partial(self._merged, merge))
        app.router.add_get("/admin/v1/turns/{request_id}", self._whoever_knows)
        app.router.add_get("/admin/v1/turns/{request_id}/explanation", self._whoever_knows)
        app.router.add_get("/metrics", self._expose)
        app.router.add_get("/healthz", self._healthz)
        return app

    def pod(self) -> web.Application:
        """For workers, which pass on what is asked on the API's port."""
        app = web.Application()
        app.router.add_get("/metrics", self._expose)
        app.router.add_get("/healthz", self._healthz)
        for path in ("/readyz", "/health"):
            app.router.add_get(path, self._readyz)
        return app

    async def _merged(self, merge: _Merge, request: web.Request) -> web.StreamResponse:
        """Of all workers or of none: what one has not acknowledged, the router has not."""
        told = await self._ask(request.path)
        silent = [worker.number for worker, answer in told if answer is None or answer.status != 200]
        if silent or not told:
            fault = f"no answer of worker {silent[0]}\n" if silent else "no worker serves\n"
            return web.Response(status=503, text=fault)
        answers = [orjson.loads(answer.body) for _, answer in told if answer is not None]
        return web.Response(body=orjson.dumps(merge(answers)), content_type="application/json")

    async def _whoever_knows(self, request: web.Request) -> web.StreamResponse:
        answers = [answer for _, answer in await self._ask(request.rel_url.raw_path) if answer is not None]
        known = next((answer for answer in answers if answer.status == 200), None)
        if known is None:
            raise web.HTTPNotFound(text="no such turn among the recent ones\n")
        return web.Response(body=known.body, content_type="application/json")

    async def _expose(self, request: web.Request) -> web.StreamResponse:
        # One at a time: an older answer after a newer one would take counters back.
        async with self._counting:
            for worker, answer in await self._ask("/metrics"):
                if worker not in self._workers.serving:
                    # It ended meanwhile, and was counted as ended.
                    continue
                if answer is None or answer.status != 200:
                    self._totals.miss(worker.ident)
                else:
                    self._totals.tell(worker.ident, answer.body.decode())
            text = self._totals.expose(workers=len(self._workers.serving), restarts=self._workers.restarts)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        told = await self._ask("/readyz", seconds=_PROBE_SECONDS)
        answers = [
            (503, f"no answer of worker {worker.number}") if answer is None else (answer.status, answer.body.decode())
            for worker, answer in told
        ]
        self._ready, text = workers_merge.ready(answers, before=self._ready)
        return web.Response(status=200 if self._ready else 503, text=text + "\n")

    async def _ask(self, path: str, *, seconds: float = _SECONDS) -> list[tuple[Worker, Told | None]]:
        """What each worker that serves answers; None: nothing."""
        workers = self._workers.serving
        return list(
            zip(workers, await asyncio.gather(*(self._told(worker, path, seconds) for worker in workers)), strict=True)
        )

    async def _told(self, worker: Worker, path: str, seconds: float) -> Told | None:
        try:
            return await worker.client.get(path, seconds=seconds)
        except Silent:
            return None
