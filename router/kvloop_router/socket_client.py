"""HTTP between the processes of one router, over Unix sockets."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

_ORIGIN = "http://router"
_SECONDS = 3.0


class Silent(Exception):
    """The other process does not answer, or not in time."""


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, whatever its status is."""

    status: int
    content_type: str
    body: bytes


class SocketClient:
    """Asks the process that listens at the path ``socket``. ``token``: of the admin API; empty: none is needed."""

    def __init__(self, socket: str, token: str = "", *, most: int = 100) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=socket, limit=most),
            headers=headers,
        )

    async def get(self, path: str, *, seconds: float = _SECONDS) -> Told:
        """What a GET gives. Raises Silent."""
        return await self._ask("GET", path, None, seconds)

    async def post(self, path: str, body: bytes) -> Told:
        """What a POST gives. Raises Silent."""
        return await self._ask("POST", path, body, _SECONDS)

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, path: str, body: bytes | None, seconds: float) -> Told:
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, _ORIGIN + path, data=body, timeout=limit) as answer:
                return Told(answer.status, answer.headers.get("Content-Type", ""), await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Silent(type(error).__name__) from error
