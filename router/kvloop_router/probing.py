"""Checks the engines' health, each at its own time, and learns their facts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from random import Random

import orjson

from kvloop_connector.lease_requests import RELEASE_PATH
from kvloop_connector.settings import Role
from kvloop_router import exposition
from kvloop_router.config import HealthChecks
from kvloop_router.engine import Engine
from kvloop_router.engines import LACKS_LEASES, Engines
from kvloop_router.errors import EngineError, EngineFailed

_log = logging.getLogger(__name__)

_JITTER = 0.2
"""By this share of the interval checks come earlier or later, so that routers do not ask all at once."""


class Prober:
    """Asks engines how they are. ``leasing``: whether decode engines retain anything that could be released or renewed
    by name."""

    def __init__(
        self, engines: Engines, checks: HealthChecks, *, leasing: bool, clock: Callable[[], float], random: Random
    ) -> None:
        self._engines = engines
        self._checks = checks
        self._leasing = leasing
        self._clock = clock
        self._random = random

    async def run(self) -> None:
        """Check each engine at about every interval, and a new one at once, until cancelled."""
        async with asyncio.TaskGroup() as probes:
            while True:
                now = self._clock()
                for engine in self._engines:
                    if engine.next_check > now:
                        continue
                    engine.next_check = now + self._interval()
                    # One that does not answer holds up none of the others.
                    if not engine.probed:
                        engine.probed = True
                        probes.create_task(self.probe(engine))
                due = min((engine.next_check for engine in self._engines), default=now + self._interval())
                await self._engines.changed(max(due - self._clock(), 0.0))

    async def probe(self, engine: Engine) -> None:
        """Check one engine's health, and learn its facts where they are not known yet."""
        before = engine.healthy
        try:
            await self._get(engine, "/health")
            if engine.version is None:
                await self._learn(engine)
            if self._leasing and engine.leases is None and engine.spec.role is Role.DECODE:
                with suppress(EngineError):
                    engine.leases = await self._offers_leases(engine)
        except EngineError as error:
            engine.health.check_failed()
            if before and not engine.healthy:
                _log.warning("engine is unhealthy", extra={"engine": engine.spec.name, "error": str(error)})
        else:
            engine.health.check_succeeded()
            if engine.healthy and not before:
                process = engine.spec.process
                _log.info("engine is healthy", extra={"engine": engine.spec.name, "engine_process": process})
        finally:
            engine.probed = False

    async def _learn(self, engine: Engine) -> None:
        metrics = (await self._get(engine, "/metrics")).decode("utf-8", "replace")
        engine.block_size = exposition.block_size(metrics)
        engine.kv_blocks = exposition.blocks(metrics)
        engine.prefix_caching = exposition.prefix_caching(metrics)
        engine.ranks = exposition.ranks(metrics)
        try:
            models = orjson.loads(await self._get(engine, "/v1/models"))["data"]
            engine.models = tuple(str(model["id"]) for model in models)
            lengths = [int(model["max_model_len"]) for model in models if model.get("max_model_len")]
            engine.max_model_len = max(lengths, default=None)
            engine.version = str(orjson.loads(await self._get(engine, "/version"))["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineFailed(
                engine.spec.name, f"answers that are not an engine's ({type(error).__name__})"
            ) from error

    async def _offers_leases(self, engine: Engine) -> bool | None:
        """Ask for a release of nothing, which is refused in one way by whoever knows what that is, else in another."""
        status = await self._engines.status(engine, RELEASE_PATH, b"{}", seconds=self._checks.timeout_seconds)
        failed = status >= 500 and status not in LACKS_LEASES
        return None if failed else status == 400

    async def _get(self, engine: Engine, path: str) -> bytes:
        return await self._engines.look(engine, path, seconds=self._checks.timeout_seconds)

    def _interval(self) -> float:
        return self._checks.interval_seconds * (1.0 + _JITTER * (2.0 * self._random.random() - 1.0))
