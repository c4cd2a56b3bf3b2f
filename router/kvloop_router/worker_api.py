"""What a worker tells its parent, on a socket of their own: the admin API, whether it is ready, and its findings."""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from aiohttp import web

from kvloop_router.admin import AdminApi
from kvloop_router.exchange import Exchange
from kvloop_router.findings import Findings
from kvloop_router.readiness import unready
from kvloop_router.socket_client import Silent, SocketClient

FINDINGS = "/worker/v1/findings"


@dataclass(frozen=True, slots=True)
class WorkerApi:
    """Handlers of that socket."""

    admin: AdminApi
    exchange: Exchange

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = self.admin.application()
        app.router.add_get("/readyz", self._readyz)
        app.router.add_post(FINDINGS, self._findings)
        return app

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        why = unready(self.admin.config, self.admin.state, self.admin.engines)
        return web.Response(text="ok\n") if why is None else web.Response(status=503, text=why + "\n")

    async def _findings(self, request: web.Request) -> web.StreamResponse:
        """Of many pairs there is much to say, and seldom anything new: either says it only if it is."""
        exchange = self.exchange
        # From its parent it takes any length.
        said = orjson.loads(await request.content.read())
        exchange.plays = said["plays"]
        if said["findings"] is not None:
            await exchange.hear(Findings.heard(said["findings"]))
        known = exchange.state_of_knowledge
        findings = None if said["known"] == known else exchange.tell().told()
        return web.Response(body=orjson.dumps({"known": known, "findings": findings}), content_type="application/json")


class Parent:
    """The process that answers for all workers."""

    def __init__(self, client: SocketClient, counting: SocketClient) -> None:
        """counting: for what takes long and anybody may ask for, so that no probe waits behind it."""
        self._client = client
        self._counting = counting

    async def answer(self, path: str) -> web.StreamResponse:
        """Its answer to a GET of ``path``, as if this process had given it."""
        try:
            told = await (self._counting if path == "/metrics" else self._client).get(path)
        except Silent as error:
            return web.Response(status=503, text=f"the workers' parent does not answer: {error}\n")
        return web.Response(status=told.status, body=told.body, headers={"Content-Type": told.content_type})
