"""From an error to an answer, in OpenAI's error shape."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from kvloop_router.errors import EngineError, EngineRejected, RequestError, Unavailable

_RETRY_AFTER_SECONDS = 1

# What only a handle has: an engine's error can repeat the request that it refuses, and with it what a leg carried.
_OF_HANDLES = (b"kv_transfer_params", b"remote_engine_id", b"remote_host")


def refusal(error: Exception, told: dict[str, str]) -> web.Response:
    """The one place where an error becomes an answer, in OpenAI's error shape."""
    match error:
        case EngineRejected() if any(name in error.body for name in _OF_HANDLES):
            fault = RequestError("The engine refused the request.", status=error.status)
        case EngineRejected():
            if error.retry_after is not None:
                told = {**told, "Retry-After": error.retry_after}
            return web.Response(
                status=error.status, body=error.body, headers={**told, "Content-Type": error.content_type}
            )
        case RequestError():
            fault = error
        case web.HTTPRequestEntityTooLarge():
            fault = RequestError("The body is larger than this server accepts.", code="request_too_large", status=413)
        case web.RequestPayloadError():
            fault = RequestError("The body cannot be read.")
        case Unavailable():
            fault = RequestError(str(error), code=error.reason, status=503, retry_after=_RETRY_AFTER_SECONDS)
        case EngineError():
            fault = RequestError("The engine could not answer.", code="engine_failed", status=502)
        case _:
            raise error
    if fault.retry_after is not None:
        told = {**told, "Retry-After": str(fault.retry_after)}
    shape = {"error": {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.code}}
    return json_response(fault.status, shape, told)


def json_response(status: int, body: Any, told: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status, body=orjson.dumps(body), headers={**(told or {}), "Content-Type": "application/json"}
    )
