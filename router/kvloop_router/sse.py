"""Server-sent events as raw bytes: where one ends, and where its data is.

Nothing is decoded or rebuilt, so that what is forwarded is what the engine sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_EVENT_BYTES = 32 * 1024 * 1024
"""The largest event to expect is a first chunk with the token ids of the prompt: some 7 bytes a token."""

# A blank line, whichever line ends the sender uses. "\n\r" is one too, unless a "\n" that completes it follows; a
# terminator that may still grow is not matched, so that no event depends on how the bytes were read.
_BLANK_LINE = re.compile(rb"\n\n|\n\r\n|\n\r(?=[^\n])|\r\r")
_LONGEST_BLANK_LINE = 3
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event exceeds the bound; the stream cannot be followed any further."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"a server-sent event is larger than {limit} bytes")
        self.limit = limit


class Events:
    """Cuts a byte stream into whole events, each with its terminator; the events joined are the stream."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit = max_event_bytes
        self._pending = bytearray()
        self._searched = 0

    @property
    def rest(self) -> bytes:
        """The bytes of an event that has not ended yet."""
        return bytes(self._pending)

    @property
    def unfinished(self) -> bool:
        """Whether there are such bytes."""
        return bool(self._pending)

    def feed(self, data: bytes) -> list[bytes]:
        """The events that end in ``data``. Raises EventTooLarge, after which the stream must be given up."""
        events = []
        if self._pending or b"\r" in data:
            self._pending += data
            start = 0
            for end in self._ends():
                events.append(bytes(self._pending[start:end]))
                start = end
            del self._pending[:start]
        else:
            *whole, rest = data.split(b"\n\n")
            events = [event + b"\n\n" for event in whole]
            self._pending += rest
        self._searched = len(self._pending)
        if max(map(len, [*events, self._pending])) > self._limit:
            raise EventTooLarge(self._limit)
        return events

    def _ends(self) -> Iterator[int]:
        """Where the events end that wait."""
        pending = self._pending
        at = max(0, self._searched - _LONGEST_BLANK_LINE)
        if pending.find(b"\r", at) < 0:
            # Far faster, and the same. Most of what waits is one long line.
            if pending.find(b"\n", at) < 0:
                return
            while (at := pending.find(b"\n\n", at) + 2) >= 2:
                yield at
        else:
            for found in _BLANK_LINE.finditer(pending, at):
                yield found.end()


def data_spans(event: bytes) -> list[tuple[int, int]]:
    """Start and end of each ``data`` line's value in ``event``; the data is these, joined by newlines."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return [(len(b"data: "), len(event) - 2)]
    spans = []
    start = len(_BYTE_ORDER_MARK) if event.startswith(_BYTE_ORDER_MARK) else 0
    while start < len(event):
        line_end = _LINE_END.search(event, start)
        end, next_start = line_end.span() if line_end else (len(event), len(event))
        if event.startswith(b"data:", start, end):
            value = start + len(b"data:")
            spans.append((value + event.startswith(b" ", value, end), end))
        start = next_start
    return spans
