"""Work that outlives the request that began it, with an owner that keeps it, and long work that others go on beside.

The event loop holds tasks weakly, and a client that leaves cancels its handler: a prefill leg in flight and the
record of a handle must survive both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")

_AGAIN_SECONDS = 1.0
_LONG_BYTES = 128 * 1024


class Background:
    """Owns tasks until they end or ``close`` ends them: work that has an end, and services that have none."""

    def __init__(self) -> None:
        self._work: set[asyncio.Task[Any]] = set()
        self._services: set[asyncio.Task[Any]] = set()

    @property
    def working(self) -> int:
        """Pieces of work that have not ended."""
        return len(self._work)

    @property
    def services(self) -> frozenset[str]:
        """Names of the services that run."""
        return frozenset(task.get_name() for task in self._services)

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, which runs to its end even if whoever awaits is cancelled."""
        return await asyncio.shield(self._keep(work, self._work))

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run ``work`` to its end, with nobody who waits for it. An error is logged."""
        self._keep(_logged(work, name), self._work)

    def serve(self, service: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run ``service`` beside everything else, until ``close``. One that fails is logged, and run anew: a router
        without health checks or discovery would look well and serve nobody."""
        self._keep(_again_and_again(service, name), self._services).set_name(name)

    async def idle(self) -> None:
        """Wait until no work is left."""
        while self._work:
            await asyncio.wait(self._work)

    async def close(self) -> None:
        """Cancel all that is still running and wait for it."""
        tasks = self._work | self._services
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _keep(self, work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        self._services.discard(task)
        if not task.cancelled():
            # Looked at here, so that a failure after its client has left is no "exception never retrieved".
            task.exception()


async def let_others_go_on(size: int) -> None:
    """A pause between two parts of the work for a request whose body has ``size`` bytes; none where it is short."""
    if size >= _LONG_BYTES:
        await asyncio.sleep(0)


async def aside(size: int, work: Callable[[], T]) -> T:
    """What ``work`` gives, which hashes bytes and changes nothing: of a request so long that others should go on
    meanwhile, in a thread."""
    return work() if size < _LONG_BYTES else await asyncio.to_thread(work)


async def in_parts(part: Callable[[], bool]) -> None:
    """Do ``part`` again and again while it gives True, with a pause before each."""
    await asyncio.sleep(0)
    while part():  # noqa: ASYNC110  nothing is waited for
        await asyncio.sleep(0)


async def _logged(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except Exception:  # noqa: BLE001  as for a service
        _log.exception("%s ended by an error", name)


async def _again_and_again(service: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    while True:
        try:
            await service()
        except Exception:  # noqa: BLE001  nobody awaits it: the log is the only place where it can be seen
            _log.exception("%s ended by an error", name)
        await asyncio.sleep(_AGAIN_SECONDS)
