"""From an error to an answer, in the error shape of the API that was asked: OpenAI's, or Anthropic's."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from kvloop_router import headers
from kvloop_router.errors import EngineError, EngineRejected, RequestError, Unavailable

_RETRY_AFTER_SECONDS = 1
_ANTHROPICS_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# What only a handle has: an engine's error can repeat the request that it refuses, and with it what a leg carried.
_OF_HANDLES = (b"kv_transfer_params", b"remote_engine_id", b"remote_host")


def refusal(error: Exception, told: dict[str, str], path: str = "") -> web.Response:
    """The one place where an error becomes an answer. ``path``: what was asked; it decides the shape."""
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
    if fault.status == HTTPStatus.UNAUTHORIZED:
        told = {**told, "WWW-Authenticate": "Bearer"}
    if not path.startswith(headers.MESSAGES):
        return json_response(fault.status, _openais(fault), told)
    request_id = told.get(headers.REQUEST_ID, "")
    return json_response(
        fault.status, _anthropics(fault, request_id), {**told, headers.ANTHROPICS_REQUEST_ID: request_id}
    )


def _openais(fault: RequestError) -> dict[str, Any]:
    return {"error": {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.code}}


def _anthropics(fault: RequestError, request_id: str) -> dict[str, Any]:
    client_fault = fault.status < HTTPStatus.INTERNAL_SERVER_ERROR
    kind = _ANTHROPICS_KINDS.get(fault.status, "invalid_request_error" if client_fault else "api_error")
    error = {"type": kind, "message": fault.message}
    return {"type": "error", "error": error, "request_id": request_id}


def json_response(status: int, body: Any, told: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status, body=orjson.dumps(body), headers={**(told or {}), "Content-Type": "application/json"}
    )
