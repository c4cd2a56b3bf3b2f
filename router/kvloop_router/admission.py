"""Whether a turn may begin now, has to wait or is refused: so many run and so many wait, for each decode engine.

A turn counts from before its prefill leg on. Tenants with turns that wait get theirs by turns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from kvloop_router.errors import RequestError

_LONGEST_RETRY_SECONDS = 120
_SHARE_OF_NEWEST = 0.1


def retry_after(ahead: int, at_once: int, seconds: float | None) -> int:
    """Seconds until a turn that comes now could begin, with ``ahead`` waiting before it, of which ``at_once`` run at
    once for ``seconds`` each; None: not known yet."""
    if seconds is None:
        return 1
    return max(1, min(_LONGEST_RETRY_SECONDS, ceil((ahead + 1) * seconds / at_once)))


@dataclass(slots=True)
class _Line:
    """Turns of one model. seconds: that they take, in a mean that follows the newest."""

    running: int = 0
    waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = field(default_factory=OrderedDict)
    seconds: float | None = None

    @property
    def length(self) -> int:
        return sum(map(len, self.waiting.values()))

    def join(self, tenant: bytes, place: asyncio.Future[None]) -> None:
        self.waiting.setdefault(tenant, deque()).append(place)

    def leave(self, tenant: bytes, place: asyncio.Future[None]) -> None:
        places = self.waiting.get(tenant)
        if places is not None and place in places:
            places.remove(place)
            if not places:
                del self.waiting[tenant]

    def next(self) -> asyncio.Future[None]:
        """Take the oldest of the tenant whose turn it is, who then comes last."""
        tenant, places = self.waiting.popitem(last=False)
        place = places.popleft()
        if places:
            self.waiting[tenant] = places
        return place


class _Admitted:
    """A turn's place. A class: a context that is a generator costs several times as much."""

    __slots__ = ("_admission", "_line", "_model", "_since", "_tenant")

    def __init__(self, admission: Admission, line: _Line, model: str, tenant: bytes) -> None:
        self._admission = admission
        self._line = line
        self._model = model
        self._tenant = tenant
        self._since = 0.0

    async def __aenter__(self) -> None:
        self._since = await self._admission.enter(self._line, self._model, self._tenant)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._admission.leave(self._line, self._model, self._since)


class Admission:
    """running, waiting: turns of one decode engine; None: any number run. engines: how many serve a model now.

    refused: told the model of each turn that finds too many waiting.
    """

    def __init__(
        self,
        *,
        running: int | None,
        waiting: int,
        engines: Callable[[str], int],
        clock: Callable[[], float],
        refused: Callable[[str], None] = lambda model: None,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._engines = engines
        self._clock = clock
        self._refused = refused
        self._lines: dict[str, _Line] = {}

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return sum(line.length for line in self._lines.values())

    def admitted(self, model: str, tenant: bytes) -> _Admitted:
        """A place for a turn, for as long as the context lasts. Raises RequestError where too many wait already."""
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = _Line()
        return _Admitted(self, line, model, tenant)

    async def enter(self, line: _Line, model: str, tenant: bytes) -> float:
        """Wait for a place in a line; gives when it was had."""
        await self._enter(line, model, tenant)
        return self._clock()

    def leave(self, line: _Line, model: str, since: float) -> None:
        """Give back a place that was had since then."""
        self._left(line, model, self._clock() - since)

    async def _enter(self, line: _Line, model: str, tenant: bytes) -> None:
        engines = self._engines(model)
        if not engines or (self._has_room(line, engines) and not line.waiting):
            line.running += 1
            return
        if line.length >= self._waiting * engines:
            self._refused(model)
            seconds = retry_after(line.length, engines * (self._running or 1), line.seconds)
            raise RequestError(
                f"All engines with the model '{model}' have as many turns as they take. Try again in {seconds} s.",
                code="engines_busy",
                status=429,
                kind="rate_limit_error",
                retry_after=seconds,
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.join(tenant, place)
        try:
            await place
        except asyncio.CancelledError:
            line.leave(tenant, place)
            if place.done() and not place.cancelled():
                # It was given the place and cannot take it.
                self._left(line, model, None)
            raise

    def _left(self, line: _Line, model: str, seconds: float | None) -> None:
        line.running -= 1
        if seconds is not None:
            known = seconds if line.seconds is None else line.seconds
            line.seconds = known + _SHARE_OF_NEWEST * (seconds - known)
        engines = self._engines(model)
        while line.waiting and self._has_room(line, engines):
            place = line.next()
            # Who is cancelled has left the line only when its task has run.
            if not place.cancelled():
                place.set_result(None)
                line.running += 1

    def _has_room(self, line: _Line, engines: int) -> bool:
        """Where no engine serves nobody waits: each turn is then told so."""
        return self._running is None or not engines or line.running < self._running * engines
