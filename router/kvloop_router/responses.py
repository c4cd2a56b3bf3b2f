"""OpenAI's Responses API without its memory: here no answer is stored, so that each request must say all. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvloop_router.errors import RequestError

PATH = "/v1/responses"
STORED = PATH + "/{response}"
"""Paths of what would have been stored."""

_REMEDY = "No responses are stored here: send the whole conversation in 'input'."


def stateless(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body for an engine. Raises RequestError where it asks for what only a server with a memory can do.

    The API stores unless it is told not to, and an engine that does never forgets: so it is told.
    """
    if body.get("previous_response_id") is not None:
        raise RequestError(
            f"Previous response cannot be found. {_REMEDY}",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if body.get("conversation") is not None:
        raise RequestError(
            f"'conversation' is not supported. {_REMEDY}", param="conversation", code="unsupported_value"
        )
    if body.get("background"):
        raise RequestError(
            "'background' is not supported, since no responses are stored here. Use 'stream'.",
            param="background",
            code="unsupported_value",
        )
    return {**body, "store": False}


def not_stored(response: str) -> RequestError:
    """What asking for a stored response is answered with."""
    return RequestError(f"Response '{response[:128]}' not found. {_REMEDY}", code="response_not_found", status=404)
