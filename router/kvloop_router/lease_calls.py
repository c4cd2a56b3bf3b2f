"""Asking a decode engine to release or to renew what it retains, by kvloop's plug-in in it.

Whether an engine has the plug-in is asked once, when its facts are learnt (``Engine.leases``); one that takes it back
later is not asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kvloop_connector.lease_requests import MOST_HANDLES, RELEASE_PATH, RENEW_PATH, Outcome
from kvloop_router.engine import Engine
from kvloop_router.engines import LACKS_LEASES, Engines
from kvloop_router.errors import EngineFailed, EngineRejected
from kvloop_router.headers import upstream

_CALL_SECONDS = 5.0


class LeaseCalls:
    """The calls, at all engines."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def offered(self, decode: str, process: str) -> bool:
        """Whether this engine process has the plug-in, as far as is known."""
        engine = self._engines.get(decode)
        return engine is not None and engine.spec.process == process and engine.leases is True

    async def release(self, decode: str, request_ids: Sequence[str]) -> frozenset[str]:
        """Which of these it held and has released. Raises EngineError; some may then be released all the same."""
        entries = await self._ask(decode, RELEASE_PATH, request_ids)
        return frozenset(name for name, entry in entries.items() if entry.get("outcome") == Outcome.RELEASED)

    async def renew(self, decode: str, request_ids: Sequence[str], seconds: float) -> Mapping[str, Mapping[str, Any]]:
        """The answer's entry for each of these; those that are not held have none. Raises EngineError."""
        entries = await self._ask(decode, RENEW_PATH, request_ids, seconds=seconds)
        return {name: entry for name, entry in entries.items() if entry.get("outcome") == Outcome.RENEWED}

    async def _ask(
        self, decode: str, path: str, request_ids: Sequence[str], **fields: float
    ) -> Mapping[str, Mapping[str, Any]]:
        entries: dict[str, Mapping[str, Any]] = {}
        for start in range(0, len(request_ids), MOST_HANDLES):
            named = list(request_ids[start : start + MOST_HANDLES])
            body = {"remote_request_ids": named, **fields}
            try:
                answer = await self._engines.complete(
                    decode, path, body, upstream({}, f"lease-{named[0]}"), seconds=_CALL_SECONDS
                )
            except (EngineRejected, EngineFailed) as error:
                _take_back(self._engines.get(decode), error.status)
                raise
            entries |= _entries(decode, answer.body)
        return entries


def _take_back(engine: Engine | None, status: int) -> None:
    if engine is not None and status in LACKS_LEASES:
        engine.leases = False


def _entries(decode: str, body: bytes) -> dict[str, Mapping[str, Any]]:
    try:
        return {str(entry["remote_request_id"]): entry for entry in orjson.loads(body)["handles"]}
    except (ValueError, TypeError, KeyError) as error:
        raise EngineFailed(decode, "an answer about leases that is not one") from error
