"""Work that outlives the request that began it, with an owner that keeps it.

The event loop holds tasks weakly, and a client that leaves cancels its handler: a prefill leg in flight and the
record of a handle must survive both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Background:
    """Owns tasks until they end or ``close`` ends them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, which runs to its end even if whoever awaits is cancelled."""
        return await asyncio.shield(self._keep(work))

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run ``work`` beside everything else, until ``close``; its failure is logged."""
        self._keep(_logged(work, name))

    async def idle(self) -> None:
        """Wait until no task is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel what is still running and wait for it."""
        for task in self._tasks:
            task.cancel()
        await self.idle()

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Looked at here, so that a failure after its client has left is no "exception never retrieved".
            task.exception()


async def _logged(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except Exception:  # noqa: BLE001  nobody awaits it: the log is the only place where it can be seen
        _log.exception("%s ended by an error", name)
