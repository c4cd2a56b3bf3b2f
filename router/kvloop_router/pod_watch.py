"""Follows the pods of a deployment through the API server: a list, then a watch from its version, for ever.

Whatever goes wrong ends in a new list after a while; until it succeeds, the engines stay as they were last known.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import orjson
from kubernetes.aio import client, config

from kvloop_router.engine_spec import EngineSpec
from kvloop_router.errors import InvalidConfig
from kvloop_router.pod_discovery import Pods, WatchExpired, WatchFailed, listed, observed, selector

_log = logging.getLogger(__name__)

_GONE = 410
_DETAIL_BYTES = 500

Update = Callable[[tuple[EngineSpec, ...]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds.

    watch: after which the API server is asked to end a watch, which then goes on with another.
    silence: after which a watch is taken for dead. The API server sends a bookmark every minute or so.
    retry, longest_retry: the longest wait before the first new list, and before any.
    """

    answer: float = 30.0
    connect: float = 10.0
    watch: float = 300.0
    silence: float = 90.0
    retry: float = 0.5
    longest_retry: float = 30.0


class _Unavailable(Exception):
    """The API server could not be asked, or refused. ``retry_after``: the seconds that it asked to wait."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PodWatch:
    """Gives ``update`` the engines of a deployment, whenever they change, until cancelled.

    interrupted: told why, whenever a watch ended otherwise than by its time: ``expired``, ``timeout`` or ``failed``.
    """

    def __init__(
        self,
        deployment: str,
        namespace: str,
        update: Update,
        *,
        random: Random,
        patience: Patience | None = None,
        interrupted: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._selector = selector(deployment)
        self._update = update
        self._random = random
        self._patience = patience or Patience()
        self._interrupted = interrupted
        self._engines: tuple[EngineSpec, ...] | None = None
        self._failures = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            wait = 0.0
            try:
                # Anew each time: the token, and the authority that the server is known by, may have been replaced.
                async with _connected() as api:
                    await self._follow(api)
            except WatchExpired:
                self._note("expired", "the API server has forgotten the version")
            except TimeoutError:
                self._note("timeout", "no answer in time")
            except (_Unavailable, WatchFailed, InvalidConfig, aiohttp.ClientError, OSError) as error:
                wait = getattr(error, "retry_after", 0.0)
                self._note("failed", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            await asyncio.sleep(max(wait, self._pause()))

    async def _follow(self, api: client.ApiClient) -> None:
        """List and watch, until something is wrong."""
        pods = listed(await self._list(api))
        await self._publish(pods)
        if self._failures:
            _log.info("the engines' pods are watched again")
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            async with aclosing(self._watch(api, pods.version)) as events:
                async for event in events:
                    pods = observed(pods, event)
                    self._failures = 0
                    await self._publish(pods)
            if loop.time() - began < self._patience.retry:
                raise WatchFailed("the watch ended at once")

    async def _publish(self, pods: Pods) -> None:
        if pods.engines != self._engines:
            await self._update(pods.engines)
            self._engines = pods.engines

    async def _list(self, api: client.ApiClient) -> Any:
        limits = aiohttp.ClientTimeout(total=self._patience.answer)
        async with self._get(api, limits, []) as response:
            return _json(await response.read())

    async def _watch(self, api: client.ApiClient, version: str) -> AsyncGenerator[Any]:
        patience = self._patience
        # Not all routers at the same moment.
        seconds = self._random.uniform(0.8 * patience.watch, patience.watch)
        query = [
            ("watch", "true"),
            ("resourceVersion", version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(max(1, round(seconds)))),
        ]
        limits = aiohttp.ClientTimeout(total=None, sock_connect=patience.connect, sock_read=patience.silence)
        async with self._get(api, limits, query) as response:
            while line := await response.content.readline():
                yield _json(line)

    @asynccontextmanager
    async def _get(
        self, api: client.ApiClient, limits: aiohttp.ClientTimeout, query: list[tuple[str, str]]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a request for the pods, unread. Raises WatchExpired, _Unavailable, and what aiohttp raises."""
        method, url, headers, _, _ = await api.param_serialize(
            "GET",
            self._path,
            query_params=[("labelSelector", self._selector), *query],
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        response = (await api.call_api(method, url, headers, _request_timeout=limits)).response
        try:
            if response.status == _GONE:
                raise WatchExpired
            if response.status >= 300:
                detail = (await response.content.read(_DETAIL_BYTES)).decode("utf-8", "replace")
                raise _Unavailable(f"status {response.status}: {detail}", _seconds(response.headers.get("Retry-After")))
            yield response
        finally:
            _cut(response)

    def _note(self, why: str, message: str) -> None:
        self._interrupted(why)
        if self._failures == 0 and why == "expired":
            _log.info("the watch of the engines' pods starts anew: %s", message)
        else:
            _log.warning("the engines' pods are not watched, and stay as they were: %s", message)
        self._failures += 1

    def _pause(self) -> float:
        """Seconds until the next try: growing, and not the same for all routers."""
        patience = self._patience
        return self._random.uniform(0.0, min(patience.longest_retry, patience.retry * 2.0 ** min(self._failures, 16)))


async def check_connection() -> None:
    """Raises InvalidConfig where nothing says which API server to ask, or how."""
    async with _connected():
        pass


@asynccontextmanager
async def _connected() -> AsyncIterator[client.ApiClient]:
    """A client for the API server of the pod's service account, or that of ``$KUBECONFIG``. Raises InvalidConfig."""
    configuration = client.Configuration()
    kubeconfig = os.environ.get("KUBECONFIG")
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(kubeconfig, client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise InvalidConfig(f"discovery.kubernetes: no way to reach the API server: {error}") from error
    # New tries are made here, with a new list.
    configuration.retries = None
    api = client.ApiClient(configuration)
    api.user_agent = "kvloop-router"
    try:
        yield api
    finally:
        session = api.rest_client.pool_manager
        if session is not None and session.connector is not None:
            await session.connector.close(abort_ssl=True)
        await api.close()  # type: ignore[no-untyped-call]


def _cut(response: aiohttp.ClientResponse) -> None:
    """End an answer, and its connection where it was not read to its end: a polite end to TLS takes an answer from the
    other side, which may have fallen silent."""
    transport = response.connection.transport if response.connection is not None else None
    if transport is not None:
        transport.abort()
    response.close()


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise WatchFailed("an answer that is not JSON") from error


def _seconds(text: str | None) -> float:
    return float(text) if text is not None and text.isdigit() else 0.0
