"""Header names, and which headers cross the router. Pure.

Nothing a client sends goes to an engine but its content type, trace context and request id; nothing an engine sends
goes to the client but its content type. Everything else is the router's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvloop_router import trace_context

PATH = "X-Kvloop-Path"
REASON = "X-Kvloop-Reason"
REUSED_TOKENS = "X-Kvloop-Reused-Tokens"
PREFILL = "X-Kvloop-Prefill"
DECODE = "X-Kvloop-Decode"
REQUEST_ID = "X-Request-Id"
CONVERSATION_ID = "X-Conversation-ID"
API_KEY = "X-Api-Key"
ANTHROPICS_REQUEST_ID = "Request-Id"

MESSAGES = "/v1/messages"
"""Where Anthropic's API begins, whose errors and request id have a shape of their own."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+=@-]{1,128}")


def request_id(offered: str | None, fresh: str) -> str:
    """The client's own request id where it is short and printable, else ``fresh``."""
    return offered if offered and _REQUEST_ID.fullmatch(offered) else fresh


def upstream(incoming: Mapping[str, str], request: str, content_type: str = "application/json") -> dict[str, str]:
    """The headers of a leg."""
    return {"Content-Type": content_type, REQUEST_ID: request, **trace_context.passed_on(incoming)}


def raw(value: str) -> bytes:
    """The bytes that a header's value came as: any, since HTTP does not make them text."""
    return value.encode("utf-8", "surrogateescape")


def api_keys(incoming: Mapping[str, str]) -> tuple[str, ...]:
    """The keys that a client gives: as OpenAI's clients do, as Anthropic's do, or both."""
    offered = (bearer(incoming.get("Authorization")), (incoming.get(API_KEY) or "").strip())
    return tuple([key for key in offered if key])


def bearer(authorization: str | None) -> str | None:
    """The key in an ``Authorization: Bearer`` header, or None."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None
