"""Plain HTTP in front of a real API server, for a test to break: what passes through is the API server's own.

::

    async with fronting(kubeconfig) as front:
        front.cut()                  # every open connection ends
        front.away = True            # nobody is answered any more
        front.stall()                # open connections stay, and say nothing
        front.forgotten = PATH       # watches are of that path, from a version before the API server knew it
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.cluster.credentials import write_kubeconfig


class ApiFront:
    """What a test sees and does. ``asked``: ``list`` or ``watch`` for each request that came, in order."""

    def __init__(self, server: str, session: aiohttp.ClientSession) -> None:
        self.asked: list[str] = []
        self.away = False
        self.forgotten: str | None = None
        self._server = server
        self._session = session
        self._flows = _flowing()
        self._open: set[asyncio.Transport] = set()

    def cut(self) -> None:
        """End every open connection."""
        for transport in self._open:
            transport.abort()

    def stall(self) -> None:
        """Let nothing more through to connections that are open now; others are served."""
        self._flows.clear()
        self._flows = _flowing()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Pass one request on."""
        transport, flows = request.transport, self._flows
        assert transport is not None
        query = dict(request.query)
        self.asked.append("watch" if "watch" in query else "list")
        if self.away:
            transport.abort()
            return web.Response()
        path = request.path
        if self.forgotten is not None and "watch" in query:
            path, query = self.forgotten, {**query, "resourceVersion": "1", "labelSelector": ""}
        self._open.add(transport)
        try:
            return await self._copy(request, path, query, flows)
        finally:
            self._open.discard(transport)

    async def _copy(
        self, request: web.Request, path: str, query: dict[str, str], flows: asyncio.Event
    ) -> web.StreamResponse:
        sent = {name: request.headers[name] for name in ("Accept", "Authorization")}
        async with self._session.get(self._server + path, params=query, headers=sent) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            try:
                while data := await answer.content.readany():
                    await flows.wait()
                    await response.write(data)
                await response.write_eof()
            finally:
                # At once, and not after a polite end to TLS, which outlives the test.
                if answer.connection is not None and answer.connection.transport is not None:
                    answer.connection.transport.abort()
            return response


@asynccontextmanager
async def fronting(kubeconfig: Path) -> AsyncIterator[tuple[ApiFront, Path]]:
    """A front for the API server of a kubeconfig, and a kubeconfig of the same identity that leads through it."""
    document = _read(kubeconfig)
    cluster = document["clusters"][0]["cluster"]
    trust = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
    unbounded = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust, limit=0), timeout=unbounded) as session:
        front = ApiFront(cluster["server"], session)
        app = web.Application()
        app.router.add_get("/{path:.*}", front.answer)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        through = write_kubeconfig(
            kubeconfig.with_name(f"{kubeconfig.name}.front-{port}"),
            cluster={"server": f"http://{host}:{port}"},
            user=document["users"][0]["user"],
        )
        try:
            yield front, through
        finally:
            await runner.cleanup()


def _read(kubeconfig: Path) -> Any:
    return json.loads(kubeconfig.read_text())


def _flowing() -> asyncio.Event:
    flows = asyncio.Event()
    flows.set()
    return flows
