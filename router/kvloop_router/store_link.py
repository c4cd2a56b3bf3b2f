"""The connection to a Valkey or Redis server: one script that is called, within a time limit, or not at all.

After a call that failed nothing is sent until the server has answered again: turns do not wait for one that is away.
A call that failed may have been carried out all the same; it is never sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha1
from pathlib import Path
from random import Random
from typing import Any

from kvloop_router.store_connection import Argument, Refused, Server, StoreConnection

_log = logging.getLogger(__name__)

_SOONEST_SECONDS = 0.1
_LATEST_SECONDS = 5.0


class StoreUnavailable(Exception):
    """The server did not answer, or not as it should. sent: whether the call may have been carried out."""

    def __init__(self, outcome: str, *, sent: bool) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.sent = sent


class _NotConnectedError(OSError):
    """No connection could be made: nothing was sent."""


class StoreLink:
    """Calls ``script``. count: told of each call's name and outcome."""

    def __init__(
        self,
        url: str,
        *,
        script: str,
        seconds: float,
        random: Random,
        password_file: Path | None = None,
        ca_file: Path | None = None,
        count: Callable[[str, str], None] = lambda operation, outcome: None,
    ) -> None:
        """seconds: for one call, connecting included where that is needed."""
        self._script = script
        self._sha = sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._seconds = seconds
        self._random = random
        self._count = count
        self._down = asyncio.Event()
        self._down.set()
        self._server = Server.at(url, password_file=password_file, ca_file=ca_file)
        self._connecting = asyncio.Lock()
        self._connection: StoreConnection | None = None

    @property
    def up(self) -> bool:
        """Whether the last call was answered."""
        return not self._down.is_set()

    async def call(self, operation: str, keys: Sequence[str], *arguments: Argument) -> list[Any]:
        """The script's answer. Raises StoreUnavailable."""
        if not self.up:
            self._count(operation, "skipped")
            raise StoreUnavailable("skipped", sent=False)
        answer: list[Any] = await self._within_time(operation, self._run(keys, operation, *arguments))
        return answer

    async def connect(self, check: Callable[[], Awaitable[Any]]) -> bool:
        """See whether the server answers; then calls are sent. check: a call that shows it, made once they are."""
        self._close()
        try:
            await self._within_time("ping", self._ask("PING"))
            self._down.clear()
            await check()
        except StoreUnavailable:
            return False
        _log.info("the handle store answers")
        return True

    async def watch(self, check: Callable[[], Awaitable[Any]]) -> None:
        """Connect anew after each failure, ever more seldom while it fails, until cancelled."""
        while True:
            wait = _SOONEST_SECONDS
            await self._down.wait()
            while not await self.connect(check):
                await asyncio.sleep(wait * (0.5 + self._random.random() / 2))
                wait = min(2 * wait, _LATEST_SECONDS)

    async def close(self) -> None:
        """Close the connection."""
        self._down.set()
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _run(self, keys: Sequence[str], *arguments: Argument) -> Any:
        try:
            return await self._ask("EVALSHA", self._sha, len(keys), *keys, *arguments)
        except Refused as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
            return await self._ask("EVAL", self._script, len(keys), *keys, *arguments)

    async def _ask(self, *command: Argument) -> Any:
        connection = self._connection
        if connection is None or not connection.open:
            connection = await self._connected()
        return await connection.ask(command)

    async def _connected(self) -> StoreConnection:
        async with self._connecting:
            if self._connection is None or not self._connection.open:
                try:
                    self._connection = await self._server.connect()
                except OSError as error:
                    raise _NotConnectedError(str(error) or "in vain") from error
            return self._connection

    async def _within_time(self, operation: str, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._seconds):
                answer = await call
        except TimeoutError as error:
            raise self._failed(operation, "timeout", error) from error
        except OSError as error:
            raise self._failed(operation, "unreachable", error) from error
        except Refused as error:
            raise self._failed(operation, "refused", error) from error
        self._count(operation, "ok")
        return answer

    def _failed(self, operation: str, outcome: str, error: Exception) -> StoreUnavailable:
        if self.up:
            _log.warning(
                "the handle store does not answer, and turns go cold: %s of %s: %s",
                outcome,
                operation,
                error,
            )
        self._down.set()
        self._count(operation, outcome)
        return StoreUnavailable(outcome, sent=not isinstance(error, _NotConnectedError))
