"""Release and renewal of what is retained, as kvloop's plug-in brings them into a vLLM engine.

There are the same switches (``VLLM_PLUGINS``, ``KVLOOP_LEASES``, ``--worker-extension-cls``), and what is asked and
answered is the plug-in's own code; here is only the engine behind it. As there, a release lets the deadline be over:
the blocks are free at once and counted as expired, *whoever is reading them*, and whoever comes with the handle later
is not refused.
A router may release only what nobody was given; where one does otherwise, ``released_while_read`` counts it.

One thing is not as there: the plug-in starts only on versions that it was tried with, this on all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from kvloop_connector.errors import UnsupportedEngine
from kvloop_connector.lease_ranks import RankAnswer, RankLeases, renewable_seconds
from kvloop_connector.lease_requests import ALLOW_VARIABLE, PLUGIN, RELEASE_PATH, RENEW_PATH, WORKER_EXTENSION
from kvloop_connector.lease_service import Answer, LeaseService, refusal
from kvloop_connector.lifecycle import State
from kvloop_sim.driver import EngineDriver
from kvloop_sim.transfer import EngineFatal

_PLUGINS: Final = "VLLM_PLUGINS"


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """How the plug-in was started. renewable: seconds that all renewals together may add to a deadline.

    fault: why it can do nothing; empty where it can.
    """

    renewable: float = 0.0
    fault: str = ""


def lease_settings(
    environment: Mapping[str, str], *, worker_extension: str, connector: Mapping[str, Any] | None
) -> LeaseSettings | None:
    """What the plug-in starts with; None where vLLM would not load it.

    connector: ``kv_connector_extra_config``; None without a connector.
    """
    named = environment.get(_PLUGINS, PLUGIN if environment.get(ALLOW_VARIABLE) == "1" else "")
    if PLUGIN not in named.split(","):
        return None
    if connector is None:
        return LeaseSettings(fault="the engine has no KV connector")
    if worker_extension != WORKER_EXTENSION:
        return LeaseSettings(fault=f"start the engine with --worker-extension-cls {WORKER_EXTENSION}")
    try:
        return LeaseSettings(renewable_seconds(connector))
    except UnsupportedEngine as error:
        return LeaseSettings(fault=str(error))


class LeaseEndpoint:
    """The plug-in's paths on a simulated engine, which has one rank. ``service`` answers them."""

    def __init__(self, settings: LeaseSettings, driver: EngineDriver) -> None:
        self._fault = settings.fault
        self._driver = driver
        self._rank = RankLeases(settings.renewable)
        # Handles of the simulator have no proof, so that nothing depends on the time of day.
        self.service = LeaseService(call=self._call, key=None, clock=driver.clock, wall=driver.clock)

    def attach(self, router: web.UrlDispatcher) -> None:
        """Add the paths."""
        router.add_post(RELEASE_PATH, self._release)
        router.add_post(RENEW_PATH, self._renew)

    async def _release(self, request: web.Request) -> web.Response:
        body = await request.read()
        return _response(self._refusal() or await self.service.release(body))

    async def _renew(self, request: web.Request) -> web.Response:
        body = await request.read()
        return _response(self._refusal() or await self.service.renew(body))

    def _refusal(self) -> Answer | None:
        if self._driver.engine.dead is not None:
            raise EngineFatal(self._driver.engine.dead)
        return refusal(UnsupportedEngine(self._fault)) if self._fault else None

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Sequence[Any]:
        engine, now = self._driver.engine, self._driver.clock()
        engine.expire(now)
        retained = engine.retained
        deadlines = {name: record.lease.deadline for name, record in retained.items() if record.lease is not None}
        answer = self._answer(method, arguments, deadlines, now)
        for name, deadline in deadlines.items():
            lease = retained[name].lease
            if lease is not None and lease.deadline != deadline:
                engine.counters.released_while_read += deadline <= now and lease.state is State.TAKEN
                retained[name].lease = lease._replace(deadline=deadline)
        self._driver.deadlines_moved()
        return [answer]

    def _answer(self, method: str, arguments: tuple[Any, ...], deadlines: dict[str, float], now: float) -> RankAnswer:
        connector = self._driver.engine.settings.connector
        engine_id = connector.engine_id if connector is not None else ""
        match method, arguments:
            case "kvloop_release", (request_ids,):
                return self._rank.release(deadlines, request_ids, now)
            case "kvloop_renew", (request_ids, seconds):
                return self._rank.renew(deadlines, request_ids, seconds, now=now, engine_id=engine_id)
            case _:
                return {"fault": f"a simulated engine has no {method}"}


def _response(answer: Answer) -> web.Response:
    return web.json_response(answer.body, status=answer.status)
