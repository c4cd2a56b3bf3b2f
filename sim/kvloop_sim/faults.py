"""Faults that a test can order, each for a number of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong next. Counts run down as requests meet them.

    fail_requests: generation requests that are answered 500.
    slow_headers_seconds: every generation request waits this long before its answer starts.
    stall_after_chunks, reset_after_chunks: a stream stops, or its connection is reset, after so many chunks;
    ``streams`` says how many streams.
    lose_notifications: completion notifications that are never sent.
    corrupt_reads: reads by other engines that give something else than what is retained.
    """

    fail_requests: int = 0
    slow_headers_seconds: float = 0.0
    stall_after_chunks: int | None = None
    reset_after_chunks: int | None = None
    streams: int = 1
    lose_notifications: int = 0
    corrupt_reads: int = 0


@dataclass(frozen=True, slots=True)
class StreamFault:
    """What happens to one stream after ``chunks`` chunks."""

    chunks: int
    reset: bool


class FaultPlan:
    """The faults that are still to happen."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def order(self, wanted: Mapping[str, Any]) -> None:
        """Replace what is ordered. Raises ValueError on an unknown fault or a value that is not a number."""
        unknown = sorted(wanted.keys() - {field.name for field in fields(Faults)})
        if unknown:
            raise ValueError(f"no such fault: {unknown[0]}")
        for name, value in wanted.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
                raise ValueError(f"{name}: not a number of 0 or more")
        self.faults = replace(Faults(), **wanted)

    def fails(self) -> bool:
        """Whether this request is answered 500."""
        if self.faults.fail_requests <= 0:
            return False
        self.faults = replace(self.faults, fail_requests=self.faults.fail_requests - 1)
        return True

    def loses_notification(self) -> bool:
        """Whether this completion notification is lost."""
        if self.faults.lose_notifications <= 0:
            return False
        self.faults = replace(self.faults, lose_notifications=self.faults.lose_notifications - 1)
        return True

    def corrupts_read(self) -> bool:
        """Whether this read gives something else than what is retained."""
        if self.faults.corrupt_reads <= 0:
            return False
        self.faults = replace(self.faults, corrupt_reads=self.faults.corrupt_reads - 1)
        return True

    def on_stream(self) -> StreamFault | None:
        """What happens to this stream."""
        faults = self.faults
        chunks = faults.reset_after_chunks if faults.reset_after_chunks is not None else faults.stall_after_chunks
        if chunks is None or faults.streams <= 0:
            return None
        self.faults = replace(faults, streams=faults.streams - 1)
        return StreamFault(chunks, reset=faults.reset_after_chunks is not None)
