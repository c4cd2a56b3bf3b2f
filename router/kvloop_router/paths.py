"""What is known of how long each engine takes, and what it has to do: learned from the router's own legs.

Time comes in by a clock; nothing here waits or talks to anybody. The models are in ``cost_model``, the choice is in
``path_choice``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvloop_router.cost_model import DecodeSpeed, PrefillSpeed, Work, decode_speed, prefill_speed
from kvloop_router.path_choice import Forecast, Path, Place, Sizes, Terms, compare, pick
from kvloop_router.sizes import TOKENS_PER_CHARACTER

_ENGINES = 1024
"""Of how many engines, at most, it is remembered how fast they are."""
_RATE_MEMORY = 50
_IDLE = 1.5
"""An engine that needs so many times as long for a leg as for computing it was waiting for what the leg reads."""

_Known = TypeVar("_Known")


@dataclass(slots=True)
class Backlog:
    """Legs that an engine computes, which it does one after the other.

    legs: for each, when it was sent and how long it is expected to take. since: when the first of them came first.
    free: when the last one ended.
    """

    legs: OrderedDict[int, tuple[float, float]] = field(default_factory=OrderedDict)
    since: float = 0.0
    free: float = 0.0

    def begin(self, key: int, seconds: float, now: float) -> None:
        """A leg is sent that will take so many seconds."""
        if not self.legs:
            self.since = now
        self.legs[key] = (now, seconds)

    def end(self, key: int, now: float) -> tuple[float, bool]:
        """It has ended: for how long it had the engine for itself, and whether it had to wait for it."""
        started, _ = self.legs[key]
        if next(iter(self.legs)) == key:
            self.since = now
        del self.legs[key]
        waited = self.free > started
        seconds = now - max(started, self.free)
        self.free = now
        return seconds, waited

    def wait(self, now: float) -> float:
        """Seconds until all of them have ended."""
        if not self.legs:
            return 0.0
        _, first = next(iter(self.legs.values()))
        return sum(seconds for _, seconds in self.legs.values()) - min(first, max(0.0, now - self.since))


class Watch:
    """One leg on its way. It is told when the leg gave its first token, and that it has ended."""

    def __init__(self, learned: Callable[[Work | None], None], closed: Callable[[], None]) -> None:
        self._learned = learned
        self._closed = closed
        self._open = True

    def first_token(self, work: Work | None = None) -> None:
        """Its first token is there. ``work``: what it turned out to be; None: what it was thought to be."""
        if self._open:
            self._open = False
            self._learned(work)

    def close(self) -> None:
        """It has ended; without a first token nothing is learned of it."""
        if self._open:
            self._open = False
            self._closed()


class Paths:
    """Speeds and backlogs of all engines, by name: a pod that is started anew is as fast as it was."""

    def __init__(self, terms: Terms, clock: Callable[[], float]) -> None:
        self.terms = terms
        self._clock = clock
        self._prefill: OrderedDict[str, PrefillSpeed] = OrderedDict()
        self._decode: OrderedDict[str, DecodeSpeed] = OrderedDict()
        self._backlogs: dict[str, Backlog] = {}
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._legs = 0
        self._rated = 0
        self.tokens_per_character = TOKENS_PER_CHARACTER

    def place(self, prefill: str, decode: str, *, running: int, holds: bool, can_serve_alone: bool) -> Place:
        """Two engines as they are now."""
        now = self._clock()
        return Place(
            prefill=prefill,
            decode=decode,
            prefill_speed=self.prefill_speed(prefill),
            decode_speed=self.decode_speed(decode),
            prefill_wait=self._wait(prefill, now),
            decode_wait=self._wait(decode, now),
            seen=self._seen.get(prefill, 0),
            running=running,
            holds=holds,
            can_serve_alone=can_serve_alone,
        )

    def choose(self, sizes: Sizes, places: Sequence[Place]) -> tuple[Forecast, Mapping[Path, Forecast]]:
        """The path of a turn, and where; and what each path that is possible would cost at best. Raises ValueError
        where there is no place."""
        best = compare(sizes, places, self.terms)
        return pick(best, self.terms), best

    def prefill_speed(self, name: str) -> PrefillSpeed:
        """How fast a prefill engine is; one that was never seen, as fast as the last one that was."""
        return self._prefill.get(name) or prefill_speed(next(reversed(self._prefill.values()), None))

    def decode_speed(self, name: str) -> DecodeSpeed:
        """How fast a decode engine is; likewise."""
        return self._decode.get(name) or decode_speed(next(reversed(self._decode.values()), None))

    def prefill_leg(self, name: str, work: Work) -> Watch:
        """A prefill leg is sent."""
        speed, key, started = self.prefill_speed(name), self._next(), self._clock()
        backlog = self._backlog(name)
        backlog.begin(key, speed.compute_seconds(work), started)

        def learned(turned_out: Work | None) -> None:
            now, did, speed = self._clock(), turned_out or work, self.prefill_speed(name)
            seconds, waited = backlog.end(key, now)
            _remember(self._seen, name, self._seen.get(name, 0) + 1)
            if waited and did.pulled:
                # It read while others computed. Only where the engine then waited for it, it took all of its time.
                if seconds < _IDLE * speed.compute_seconds(did):
                    return
                seconds = now - started
            _remember(self._prefill, name, speed.after(did, seconds))

        return Watch(learned, lambda: _drop(backlog, key, self._clock()))

    def decode_leg(self, name: str, work: Work, *, like: str) -> Watch:
        """A decode leg is sent: with something to compute, it is one without a prefill leg.

        like: a prefill engine that decode is expected to compute like.
        """
        if work.uncached:
            return self._alone(name, work, like)
        started, busy = self._clock(), bool(self._backlog(name).legs)

        def learned(turned_out: Work | None) -> None:
            if not busy:
                seconds = self._clock() - started
                _remember(self._decode, name, self.decode_speed(name).after_pull(turned_out or work, seconds))

        return Watch(learned, _nothing)

    def count(self, characters: int, tokens: int) -> None:
        """An engine has counted the tokens of a prompt of so many characters."""
        if characters > 0 and tokens > 0:
            self._rated = min(self._rated + 1, _RATE_MEMORY)
            self.tokens_per_character += (tokens / characters - self.tokens_per_character) / self._rated

    def _alone(self, name: str, work: Work, like: str) -> Watch:
        key, started = self._next(), self._clock()
        backlog, prefill = self._backlog(name), self.prefill_speed(like)
        expected = self.decode_speed(name).compute_seconds(work, prefill, self.terms.caution)
        backlog.begin(key, expected, started)

        def learned(turned_out: Work | None) -> None:
            seconds, _ = backlog.end(key, self._clock())
            did = turned_out or work
            _remember(self._decode, name, self.decode_speed(name).after_compute(did, seconds, self.prefill_speed(like)))

        return Watch(learned, lambda: _drop(backlog, key, self._clock()))

    def _wait(self, name: str, now: float) -> float:
        backlog = self._backlogs.get(name)
        return 0.0 if backlog is None else backlog.wait(now)

    def _backlog(self, name: str) -> Backlog:
        backlog = self._backlogs.get(name)
        if backlog is None:
            for gone in [known for known, idle in self._backlogs.items() if not idle.legs][_ENGINES:]:
                del self._backlogs[gone]
            backlog = self._backlogs[name] = Backlog()
        return backlog

    def _next(self) -> int:
        self._legs += 1
        return self._legs


def unwatched() -> Watch:
    """Of a leg that nothing is learned of."""
    return Watch(_ignored, _nothing)


def _remember(known: OrderedDict[str, _Known], name: str, what: _Known) -> None:
    known[name] = what
    known.move_to_end(name)
    while len(known) > _ENGINES:
        known.popitem(last=False)


def _drop(backlog: Backlog, key: int, now: float) -> None:
    backlog.end(key, now)


def _nothing() -> None:
    return None


def _ignored(work: Work | None) -> None:
    return None
