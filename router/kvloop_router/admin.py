"""The operator's API, on a port of its own and behind a bearer token: what of each engine is in use and verified."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson
from aiohttp import web

from kvloop_router import explanation, headers
from kvloop_router.config import Config
from kvloop_router.engine import Engine
from kvloop_router.engines import Engines
from kvloop_router.kept import HandleStore, Retention
from kvloop_router.metrics import CONTENT_TYPE, Metrics
from kvloop_router.pairs import PairReport, Pairs
from kvloop_router.state import State
from kvloop_router.template_probe import TemplateProbe
from kvloop_router.turn_log import TurnLog, TurnReport

LISTED = 100
"""Turns in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminApi:
    """Handlers of the admin listener."""

    config: Config
    token: str
    engines: Engines
    pairs: Pairs
    store: HandleStore
    state: State
    log: TurnLog
    metrics: Metrics
    probe: TemplateProbe
    clock: Callable[[], float]

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[guarded(self.token)])
        app.router.add_get("/admin/v1/engines", self._engines)
        app.router.add_get("/admin/v1/pairs", self._pairs)
        app.router.add_get("/admin/v1/turns", self._turns)
        app.router.add_get("/admin/v1/turns/{request_id}", self._turn)
        app.router.add_get("/admin/v1/turns/{request_id}/explanation", self._explanation)
        app.router.add_get("/admin/v1/templates", self._templates)
        app.router.add_get("/metrics", self._expose)
        app.router.add_get("/healthz", self._healthz)
        return app

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _engines(self, request: web.Request) -> web.StreamResponse:
        retained = await self.store.retained()
        now = self.clock()
        share = self.config.kv_transfer.retained_share
        engines = [
            {
                **_engine(engine, retained.get(engine.spec.process), now),
                "retainedBlocks": self.store.retained_blocks(engine.spec.process),
                "retainedBlocksLimit": None if engine.kv_blocks is None else int(engine.kv_blocks * share),
            }
            for engine in self.engines
        ]
        return _json({"engines": engines, "draining": self.state.draining, "runningTurns": self.state.turns})

    async def _pairs(self, request: web.Request) -> web.StreamResponse:
        return _json({"pairs": [_pair(report) for report in self.pairs.reports()]})

    async def _turn(self, request: web.Request) -> web.StreamResponse:
        return _json(self._found(request).told())

    async def _turns(self, request: web.Request) -> web.StreamResponse:
        return _json({"turns": [explanation.listed(report) for report in islice(self.log, LISTED)]})

    async def _explanation(self, request: web.Request) -> web.StreamResponse:
        report = self._found(request)
        block_size = max((engine.block_size for engine in self.engines if engine.block_size), default=None)
        told = explanation.explain(report, self.log, block_size=block_size)
        templates = [found.told() for found in self.probe.reports() if found.model == report.model]
        return _json({**told, "template": templates[0] if templates else None})

    async def _templates(self, request: web.Request) -> web.StreamResponse:
        return _json({"templates": [report.told() for report in self.probe.reports()]})

    async def _expose(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.metrics.expose(), headers={"Content-Type": CONTENT_TYPE})

    def _found(self, request: web.Request) -> TurnReport:
        """The turn that is asked for. Raises HTTPNotFound."""
        report = self.log.get(request.match_info["request_id"])
        if report is None:
            raise web.HTTPNotFound(text="no such turn among the recent ones\n")
        return report


def guarded(token: str) -> Any:
    """The middleware that lets nobody in without the token."""

    @web.middleware
    async def authorised(request: web.Request, handler: Any) -> web.StreamResponse:
        given = headers.bearer(request.headers.get("Authorization")) or ""
        if request.path != "/healthz" and not secrets.compare_digest(headers.raw(given), token.encode()):
            return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"}, text="a bearer token is needed\n")
        response: web.StreamResponse = await handler(request)
        return response

    return authorised


def _engine(engine: Engine, retained: Retention | None, now: float) -> dict[str, Any]:
    spec = engine.spec
    last = now if retained is None else retained.last_deadline
    return {
        "name": spec.name,
        "role": spec.role.value,
        "url": spec.url,
        "podUID": spec.pod_uid,
        "kvRevision": spec.kv_revision,
        "zone": spec.zone,
        "model": engine.spec.model,
        "healthy": engine.healthy,
        "suspect": engine.health.suspect(now),
        "ready": spec.ready,
        "draining": spec.draining,
        "version": engine.version,
        "blockSize": engine.block_size,
        "ranks": engine.ranks,
        "loadTokens": engine.tokens,
        "maxModelLen": engine.max_model_len,
        "leases": engine.leases,
        "load": engine.load,
        "runningTurns": engine.turns,
        "liveHandles": 0 if retained is None else retained.handles,
        "lastDeadlineSeconds": round(max(0.0, last - now), 3),
    }


def _pair(report: PairReport) -> dict[str, Any]:
    return {
        "prefill": report.prefill.name,
        "prefillPodUID": report.prefill.pod_uid,
        "decode": report.decode.name,
        "decodePodUID": report.decode.pod_uid,
        "kvRevision": report.decode.kv_revision,
        "verdict": report.verdict.value,
        "toDecodeBytes": report.to_decode_bytes,
        "toPrefillBytes": report.to_prefill_bytes,
        "toDecodeSeconds": report.to_decode_seconds,
        "toPrefillSeconds": report.to_prefill_seconds,
        "streams": report.streams,
        "attempts": report.attempts,
        "detail": report.detail,
    }


def _json(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
