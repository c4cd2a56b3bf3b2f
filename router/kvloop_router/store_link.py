"""The connection to a Valkey or Redis server: one script that is called, within a time limit, or not at all.

After a call that failed nothing is sent until the server has answered again: turns do not wait for one that is away.
A call that failed may have been carried out all the same; it is never sent again.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha1
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as NoConnection, NoScriptError, RedisError, TimeoutError as TooLate

_log = logging.getLogger(__name__)

_CONNECTIONS = 32
_SOONEST_SECONDS = 0.1
_LATEST_SECONDS = 5.0
_TLS_SCHEMES = frozenset({"rediss", "valkeys"})
_DEFAULT_PORT = 6379


class StoreUnavailable(Exception):
    """The server did not answer, or not as it should. sent: whether the call may have been carried out."""

    def __init__(self, outcome: str, *, sent: bool) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.sent = sent


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
        """seconds: for one call, waiting for a free connection included."""
        self._script = script
        self._sha = sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._seconds = seconds
        self._random = random
        self._count = count
        self._down = asyncio.Event()
        self._down.set()
        self._redis = Redis(connection_pool=_pool(url, seconds, password_file, ca_file))

    @property
    def up(self) -> bool:
        """Whether the last call was answered."""
        return not self._down.is_set()

    async def call(self, operation: str, keys: Sequence[str], *arguments: bytes | str | float) -> list[Any]:
        """The script's answer. Raises StoreUnavailable."""
        if not self.up:
            self._count(operation, "skipped")
            raise StoreUnavailable("skipped", sent=False)
        answer: list[Any] = await self._within_time(operation, self._run(keys, operation, *arguments))
        return answer

    async def connect(self, check: Callable[[], Awaitable[Any]]) -> bool:
        """See whether the server answers; then calls are sent. check: a call that shows it, made once they are."""
        try:
            await self._within_time("ping", self._redis.ping())
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
        """Close all connections."""
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    async def _run(self, keys: Sequence[str], *arguments: bytes | str | float) -> Any:
        try:
            return await self._redis.evalsha(self._sha, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self._redis.eval(self._script, len(keys), *keys, *arguments)

    async def _within_time(self, operation: str, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._seconds):
                answer = await call
        except (TimeoutError, TooLate) as error:
            raise self._failed(operation, "timeout", error) from error
        except (NoConnection, OSError) as error:
            raise self._failed(operation, "unreachable", error) from error
        except RedisError as error:
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
        return StoreUnavailable(outcome, sent=True)


class _PasswordFile(CredentialProvider):
    """The user of the URL and a password that is read at each connection, so that it may change."""

    def __init__(self, user: str | None, path: Path) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._path.read_text(encoding="utf-8").strip()
        return (password,) if self._user is None else (self._user, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _pool(url: str, seconds: float, password_file: Path | None, ca_file: Path | None) -> BlockingConnectionPool:
    parts = urlsplit(url)
    user = unquote(parts.username) if parts.username else None
    options: dict[str, Any] = {
        "host": parts.hostname or "localhost",
        "port": parts.port or _DEFAULT_PORT,
        "db": int(parts.path.strip("/") or 0),
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "socket_keepalive": True,
        # What was sent may have been carried out, and must not be twice.
        "retry": Retry(NoBackoff(), 0),
    }
    if password_file is not None:
        options["credential_provider"] = _PasswordFile(user, password_file)
    elif parts.password is not None:
        options |= {"username": user, "password": unquote(parts.password)}
    kind: type[Connection] = Connection
    if parts.scheme in _TLS_SCHEMES:
        kind = SSLConnection
        options["ssl_min_version"] = ssl.TLSVersion.TLSv1_2
        if ca_file is not None:
            options["ssl_ca_certs"] = str(ca_file)
    return BlockingConnectionPool(connection_class=kind, max_connections=_CONNECTIONS, timeout=seconds, **options)
