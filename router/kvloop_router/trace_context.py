"""W3C Trace Context: what names a distributed trace from one service to the next. Pure.

https://www.w3.org/TR/trace-context/ (Recommendation of 2021-11-23). What is malformed is not passed on: a trace that
begins anew is better than one with a wrong parent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

PARENT = "traceparent"
STATE = "tracestate"

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_FORBIDDEN_VERSION = "ff"
_VERSION = "00"
_STATE = re.compile(r"[\x20-\x7e\t]{1,8192}")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of a trace, as the service that made it names it.

    trace_id: 32 hexadecimal digits. span_id: 16 of them. flags: of ``traceparent``. state: ``tracestate``, or "".
    """

    trace_id: str
    span_id: str
    flags: int = 0
    state: str = ""

    @property
    def sampled(self) -> bool:
        """Whether whoever made it may have recorded it."""
        return bool(self.flags & _SAMPLED)

    def child(self, span_id: str) -> TraceContext:
        """The context of a span of one's own below it, for requests that are made within that span."""
        return replace(self, span_id=span_id)

    def headers(self) -> dict[str, str]:
        """The headers that pass it on."""
        told = {PARENT: f"{_VERSION}-{self.trace_id}-{self.span_id}-{self.flags:02x}"}
        return {**told, STATE: self.state} if self.state else told


def parse(parent: str | None, state: str | None = None) -> TraceContext | None:
    """The context in the two headers' values; None where ``parent`` is missing or malformed."""
    found = _PARENT.fullmatch((parent or "").strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == _FORBIDDEN_VERSION or (version == _VERSION and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    # Of a later version, only what this one knows is kept.
    told = (state or "").strip(" \t")
    known_flags = int(flags, 16) if version == _VERSION else int(flags, 16) & _SAMPLED
    return TraceContext(trace_id, span_id, known_flags, told if _STATE.fullmatch(told) else "")


def passed_on(incoming: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request that is made on behalf of one with the headers ``incoming``, within no span of one's
    own."""
    if PARENT not in incoming:
        return {}
    several = getattr(incoming, "getall", None)
    state = ",".join(several(STATE, ())) if several is not None else incoming.get(STATE)
    context = parse(incoming[PARENT], state)
    return {} if context is None else context.headers()
