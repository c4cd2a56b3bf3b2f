"""Copies an engine's answer to the client: bytes as they are, but for the handle and the token ids that are cut out.

The first byte that goes downstream is the point of no return. Before it, a failure can be tried again elsewhere; after
it, an answer that does not end well is cut off, so that no client takes it for a short one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from kvloop_router import chunks, splice, sse
from kvloop_router.engines import Answer
from kvloop_router.errors import EngineDraining, EngineFailed, StreamBroken

_DONE = b"data: [DONE]"
_SERVER_ERROR = 500


class ClientGone(Exception):
    """The client has closed its connection."""


class Source(Protocol):
    """The engine's side of an answer; see ``engines.Upstream``."""

    engine: str
    status: int
    content_type: str

    async def read(self) -> bytes:
        """The next bytes; empty at the end. Raises StreamBroken where the answer ends before its end."""
        ...

    @property
    def over(self) -> bool:
        """Whether it has come to its end, and all of it was read."""
        ...

    def unread(self) -> bytes:
        """What has arrived and was not read."""
        ...

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """Hand all that arrives to ``take``, until it refuses some, which is then to be read, or until the end."""
        ...


class Downstream(Protocol):
    """The client's side of an answer."""

    @property
    def started(self) -> bool:
        """Whether a first byte was sent."""
        ...

    async def start(self, status: int, content_type: str) -> None:
        """Send status and headers."""
        ...

    async def write(self, data: bytes) -> None:
        """Send bytes of the body. Raises ClientGone."""
        ...

    def write_now(self, data: bytes) -> bool:
        """Send bytes of the body, unless they would have to wait for the client; gives whether they were sent."""
        ...

    async def comment(self, data: bytes) -> None:
        """Send bytes that are no part of the answer. Raises ClientGone."""
        ...

    async def end(self, data: bytes = b"") -> None:
        """The body is complete, with ``data``. Raises ClientGone."""
        ...


class Begun:
    """A Downstream that tells when the answer begins: by then the decode engine has read what prefill left."""

    def __init__(self, downstream: Downstream, begun: Callable[[], None]) -> None:
        self._downstream = downstream
        self._begun = begun
        self.write = downstream.write
        self.write_now = downstream.write_now
        self.comment = downstream.comment
        self.end = downstream.end

    @property
    def started(self) -> bool:
        return self._downstream.started

    async def start(self, status: int, content_type: str) -> None:
        self._begun()
        await self._downstream.start(status, content_type)


@dataclass(slots=True)
class Ended:
    """What an answer told about its turn.

    error: the status in an error event; 0 without one.
    held_up: seconds for which the client, by reading slowly, kept the router from reading the engine.
    """

    handle: Mapping[str, Any] | None = None
    prompt_token_ids: Sequence[int] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    content: bool = False
    error: int = 0
    done: bool = False
    held_up: float = 0.0

    def add(self, part: splice.Stripped) -> None:
        """Take over what one event, or the whole body, says."""
        self.handle = part.handle or self.handle
        self.prompt_token_ids = part.prompt_token_ids or self.prompt_token_ids
        self.token_ids += part.token_ids.get(0, ())
        self.finish_reasons |= part.finish_reasons
        self.content = self.content or part.has_content

    def add_plain(self, part: chunks.Plain) -> None:
        """As above, of events that tell little."""
        self.token_ids += part.token_ids
        self.content = self.content or part.has_content

    @property
    def aborted_empty(self) -> bool:
        """A draining engine's answer: status 200, nothing in it."""
        nothing = not self.content and not self.token_ids
        return nothing and bool(self.finish_reasons) and set(self.finish_reasons.values()) == {"abort"}


Finished = Callable[[Ended], Awaitable[None]]
"""Called once, when the handle is known and before the client can know that the turn has ended."""


async def whole(answer: Answer, engine: str, *, keep_token_ids: bool, finished: Finished) -> tuple[bytes, Ended]:
    """The body for the client of an answer that came as one. Raises EngineFailed where it is no answer."""
    ended = Ended(done=True)
    try:
        part = splice.strip(answer.body, keep_token_ids=keep_token_ids)
    except splice.UnreadableAnswer as error:
        raise EngineFailed(engine, "an answer that is not JSON") from error
    ended.add(part)
    if ended.aborted_empty:
        raise EngineDraining(engine)
    await finished(ended)
    return part.data, ended


async def stream(
    upstream: Source,
    downstream: Downstream,
    *,
    keep_token_ids: bool,
    finished: Finished,
    clock: Callable[[], float],
) -> Ended:
    """Copy a stream of events to its end. Raises EngineFailed before the first byte, StreamBroken after it.

    Nothing is sent until the first event with an answer in it: until then the turn can go elsewhere.
    """
    ended = Ended()
    events = sse.Events()
    held: list[bytes] = []
    told = False
    passing = _Passing(downstream, ended, keep_token_ids=keep_token_ids)
    try:
        while data := await _read(upstream, downstream):
            for event in _events(events, data, upstream.engine):
                event_data = _take(event, ended, upstream.engine, keep_token_ids=keep_token_ids)
                if not downstream.started:
                    _refuse_failure(ended, upstream.engine)
                if (ended.handle is not None or ended.done) and not told:
                    told = True
                    await finished(ended)
                held.append(event_data)
            if upstream.over and _complete(ended, events):
                break
            if ended.content or ended.finish_reasons or ended.token_ids or ended.error:
                await _send(downstream, held, upstream, ended, clock)
            if downstream.started and not events.unfinished:
                await upstream.pass_on(passing)
    except (ClientGone, asyncio.CancelledError):
        if not told and _told_by_unread(upstream, events, ended):
            await finished(ended)
        raise
    if not _complete(ended, events):
        if downstream.started:
            raise StreamBroken(upstream.engine, "the stream ended early")
        raise EngineFailed(upstream.engine, "the stream ended before it began")
    if not downstream.started:
        await downstream.start(upstream.status, upstream.content_type)
    await downstream.end(b"".join(held))
    return ended


class _Passing:
    """Sends on what arrives in the call in which it arrives, as long as it tells nothing but text, and nobody waits."""

    def __init__(self, downstream: Downstream, ended: Ended, *, keep_token_ids: bool) -> None:
        self._write_now = downstream.write_now
        self._ended = ended
        self._plain = chunks.Alike(keep_token_ids=keep_token_ids).plain

    def __call__(self, data: bytes) -> bool:
        found = self._plain(data)
        if found is None or not self._write_now(found.data):
            return False
        self._ended.add_plain(found)
        return True


async def copy(upstream: Source, downstream: Downstream) -> None:
    """Copy an answer to its end, as it is. Raises EngineFailed before the first byte, StreamBroken after it."""
    while data := await _read(upstream, downstream):
        if not downstream.started:
            await downstream.start(upstream.status, upstream.content_type)
        if upstream.over:
            break
        await downstream.write(data)
        await upstream.pass_on(downstream.write_now)
    if not downstream.started:
        await downstream.start(upstream.status, upstream.content_type)
    await downstream.end(data)


async def _read(upstream: Source, downstream: Downstream) -> bytes:
    try:
        return await upstream.read()
    except StreamBroken as error:
        if downstream.started:
            raise
        raise EngineFailed(upstream.engine, "the answer broke off before it began") from error


def _told_by_unread(upstream: Source, events: sse.Events, ended: Ended) -> bool:
    """The client has left an answer that is complete, though not yet passed on: whether what has arrived of it tells a
    handle, whose blocks would stay retained if nobody kept it.
    """
    with suppress(EngineFailed, StreamBroken):
        for event in _events(events, upstream.unread(), upstream.engine):
            _take(event, ended, upstream.engine, keep_token_ids=False)
    return ended.handle is not None


def _events(events: sse.Events, data: bytes, engine: str) -> list[bytes]:
    try:
        return events.feed(data)
    except sse.EventTooLarge as error:
        raise StreamBroken(engine, "an event that is too large") from error


def _take(event: bytes, ended: Ended, engine: str, *, keep_token_ids: bool) -> bytes:
    if event.startswith(_DONE):
        ended.done = True
        return event
    if (found := chunks.plain(event, keep_token_ids=keep_token_ids)) is not None:
        ended.add_plain(found)
        return found.data
    try:
        part = splice.strip(event, keep_token_ids=keep_token_ids)
    except splice.UnreadableAnswer as error:
        raise StreamBroken(engine, "an event that is not JSON") from error
    ended.add(part)
    ended.error = _error_status(event) or ended.error
    return part.data


def _refuse_failure(ended: Ended, engine: str) -> None:
    """Before the first byte, an engine's own error or a draining engine's empty answer is a failure like a 5xx."""
    if ended.aborted_empty:
        raise EngineDraining(engine)
    if ended.error >= _SERVER_ERROR and not ended.content and not ended.token_ids:
        raise EngineFailed(engine, f"error {ended.error} instead of an answer")


def _error_status(event: bytes) -> int:
    if not event.startswith(b'data: {"error"'):
        return 0
    try:
        error = orjson.loads(event[len(b"data: ") :])["error"]
    except orjson.JSONDecodeError:
        return 0
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else _SERVER_ERROR


async def _send(
    downstream: Downstream, held: list[bytes], upstream: Source, ended: Ended, clock: Callable[[], float]
) -> None:
    before = clock()
    if not downstream.started:
        await downstream.start(upstream.status, upstream.content_type)
    if held:
        await downstream.write(b"".join(held))
        held.clear()
    ended.held_up += clock() - before


def _complete(ended: Ended, events: sse.Events) -> bool:
    """Whether the stream said all it had to: the end mark, and why the answer ended (or an error instead)."""
    return ended.done and not events.rest.strip() and bool(ended.finish_reasons or ended.error)
