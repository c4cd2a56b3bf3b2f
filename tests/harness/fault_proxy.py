"""A proxy in front of the API server that loses, refuses, delays and cuts off what it is told to.

::

    with FaultProxy(kubeconfig, tmp_path) as proxy:
        proxy.fail(is_write, Refuse(429, retry_after=1), times=3)
        Kube(proxy.kubeconfig)...
        proxy.requests

It speaks plain HTTP to its client and TLS to the API server, and passes the client's token on.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from tests.cluster.credentials import write_kubeconfig

_OF_ONE_CONNECTION: Final = frozenset({"connection", "host", "keep-alive", "transfer-encoding", "content-length"})
_START_SECONDS: Final = 60
_REASONS: Final = {
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A request, in the API's own words; `plural` is empty where it is about no kind of object."""

    method: str
    path: str
    """With the query."""
    verb: str
    group: str = ""
    plural: str = ""
    namespace: str = ""
    name: str = ""
    subresource: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The proxy answers itself, with a Status; the request is not passed on."""

    status: int
    retry_after: int | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """No answer, and the request is not passed on: the client has to give up."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The connection ends without an answer. applied: after the API server has dealt with the request."""

    applied: bool


@dataclass(frozen=True, slots=True)
class Delay:
    """The answer comes later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class CutWatch:
    """A watch's connection breaks after `events` events; with `half`, in the middle of the next."""

    events: int
    half: bool = False


@dataclass(frozen=True, slots=True)
class MuteWatch:
    """A watch stays open after `events` events, and nothing comes any more: no bookmark either."""

    events: int


@dataclass(frozen=True, slots=True)
class ExpireWatch:
    """A watch ends with the event that tells that its version is too old (410) after `events` events."""

    events: int


Fault = Refuse | Hold | Drop | Delay | CutWatch | MuteWatch | ExpireWatch
Predicate = Callable[[Seen], bool]


@dataclass(slots=True)
class Rule:
    """What is done to which requests."""

    wanted: Predicate
    fault: Fault
    skip: int
    times: int | None
    every: int
    matched: int = 0
    used: int = 0
    """How often the fault has happened."""

    def applies(self, request: Seen) -> bool:
        """Whether the fault happens to this request, which is counted."""
        if (self.times is not None and self.used >= self.times) or not self.wanted(request):
            return False
        self.matched += 1
        position = self.matched - self.skip - 1
        if position < 0 or position % self.every:
            return False
        self.used += 1
        return True


def is_write(request: Seen) -> bool:
    return request.verb in ("create", "update", "patch", "delete", "deletecollection")


def is_watch(request: Seen) -> bool:
    return request.verb == "watch"


def parse(method: str, path: str, *, watch: bool) -> Seen:
    """What the API server makes of a request line; `watch` as its query says."""
    steps = path.partition("?")[0].strip("/").split("/")
    fields: dict[str, str] = {}
    if steps[0] in ("api", "apis"):
        fields["group"] = "" if steps[0] == "api" else steps[1] if len(steps) > 1 else ""
        steps = steps[2:] if steps[0] == "api" else steps[3:]
        if len(steps) > 2 and steps[0] == "namespaces":
            fields["namespace"], steps = steps[1], steps[2:]
        fields |= dict(zip(("plural", "name", "subresource"), steps, strict=False))
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch"}
    one = bool(fields.get("name"))
    if method == "GET":
        verb = "watch" if watch else "get" if one or not fields.get("plural") else "list"
    elif method == "DELETE":
        verb = "delete" if one else "deletecollection"
    else:
        verb = verbs.get(method, method.lower())
    return Seen(method=method, path=path, verb=verb, **fields)


@dataclass(slots=True)
class FaultProxy:
    """Serves from a thread of its own while it is entered. Its methods may be called from any thread."""

    upstream: Path
    """Kubeconfig of the identity whose requests are passed on; it has to hold a token."""
    folder: Path
    """Where the kubeconfig that leads through the proxy is written."""
    requests: list[Seen] = field(default_factory=list)
    """Every request so far, in the order of their arrival."""
    _rules: list[Rule] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _started: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _port: int = 0

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fault-proxy")
        self._thread.start()
        assert self._started.wait(_START_SECONDS), "the proxy did not start"
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def kubeconfig(self) -> Path:
        """A kubeconfig of the same identity, through the proxy."""
        user = json.loads(self.upstream.read_text())["users"][0]["user"]
        cluster: dict[str, object] = {"server": f"http://127.0.0.1:{self._port}"}
        return write_kubeconfig(self.folder / f"through-proxy-{self._port}", cluster=cluster, user=user)

    def fail(self, wanted: Predicate, fault: Fault, *, times: int | None = 1, skip: int = 0, every: int = 1) -> Rule:
        """From now on do `fault` to requests that are `wanted`; the first rule that applies counts.

        times: how often; None until `clear`. skip: how many pass unharmed before. every: 3 harms each third.
        """
        rule = Rule(wanted, fault, skip=skip, times=times, every=every)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget every rule. What is held stays held, and a mute watch mute."""
        with self._lock:
            self._rules.clear()

    def _fault_for(self, request: Seen) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            return next((rule.fault for rule in self._rules if rule.applies(request)), None)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        cluster = json.loads(self.upstream.read_text())["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=authority), limit=0)
        async with aiohttp.ClientSession(
            cluster["server"],
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
        ) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(request, session)

            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{path:.*}", handle)
            # A client that gives up ends its request here, and so at the API server.
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                self._port = runner.addresses[0][1]
                self._started.set()
                await self._stop.wait()
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request, session: aiohttp.ClientSession) -> web.StreamResponse:
        watch = request.query.get("watch", "") in ("1", "true")
        fault = self._fault_for(parse(request.method, request.path_qs, watch=watch))
        match fault:
            case Refuse(status, retry_after):
                return _status(status, retry_after)
            case Hold():
                await asyncio.Event().wait()
            case Drop(applied=False):
                return _dropped(request)
        body = await request.read()
        try:
            async with session.request(
                request.method, request.rel_url, data=body or None, headers=_passed_on(request.headers)
            ) as answer:
                try:
                    return await self._pass_back(request, answer, fault)
                finally:
                    # Of an answer that was not read to its end. Closing TLS politely takes longer than the proxy lives.
                    if answer.connection is not None and answer.connection.transport is not None:
                        answer.connection.transport.abort()
        except aiohttp.ClientConnectionError:
            return _dropped(request)

    async def _pass_back(
        self, request: web.Request, answer: aiohttp.ClientResponse, fault: Fault | None
    ) -> web.StreamResponse:
        match fault:
            case Drop():
                await answer.read()
                return _dropped(request)
            case Delay(seconds):
                await asyncio.sleep(seconds)
        response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            if isinstance(fault, CutWatch | MuteWatch | ExpireWatch):
                await self._spoil(request, response, answer, fault)
            else:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            await response.write_eof()
        return response

    async def _spoil(
        self,
        request: web.Request,
        response: web.StreamResponse,
        answer: aiohttp.ClientResponse,
        fault: CutWatch | MuteWatch | ExpireWatch,
    ) -> None:
        """Pass a watch's events on up to the fault."""
        lines = _lines(answer)
        for _ in range(fault.events):
            if (line := await anext(lines, None)) is None:
                return
            await response.write(line)
        if isinstance(fault, CutWatch) and fault.half:
            line = await anext(lines, b"")
            await response.write(line[: len(line) // 2])
        match fault:
            case CutWatch():
                _dropped(request)
            case MuteWatch():
                await asyncio.Event().wait()
            case ExpireWatch():
                event = {"type": "ERROR", "object": _status_object(410)}
                await response.write(json.dumps(event).encode() + b"\n")


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The events of a watch, one a line, however long."""
    rest = b""
    async for chunk in answer.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _OF_ONE_CONNECTION)


def _dropped(request: web.Request) -> web.Response:
    """End the connection at once; the response goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _status_object(code: int) -> dict[str, object]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": "the test's proxy says so",
        "reason": _REASONS.get(code, "Unknown"),
        "code": code,
    }


def _status(code: int, retry_after: int | None) -> web.Response:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return web.json_response(_status_object(code), status=code, headers=headers)
