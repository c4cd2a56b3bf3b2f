"""Which path a turn goes: cold, warm or local, by the time that each is expected to take. Pure.

cold: prefill computes the prompt. warm: prefill reads from decode what that still holds, and computes the rest.
local: the decode engine that still holds it computes the rest itself, without prefill. Nothing of the engine's memory
is trusted then: it looks into its own prefix cache, by its own hashes, as for any request.

A path costs the time to its first token, and what others pay for it, in seconds that people wait as well:

- whoever decodes on an engine waits while it computes a prompt;
- a local turn on vLLM's own connector leaves no handle, so that the next turn's prefill computes this turn's tokens.

Warm is the rule. Another path has to be expected to be clearly better, since an expectation is not a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvloop_router.cost_model import DecodeSpeed, PrefillSpeed, Work


class Path(StrEnum):
    """How a turn's prompt KV comes about."""

    COLD = "cold"
    WARM = "warm"
    LOCAL = "local"


class Mode(StrEnum):
    """Who chooses: the cost model, or whoever set this. A path that is not possible gives way to the next one of
    local, warm, cold."""

    AUTO = "Auto"
    COLD = "Cold"
    WARM = "Warm"
    LOCAL = "Local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What choices go by.

    decode_delay_weight: what a second counts that a running answer is held up, against one until a first token.
    gain: by which part of the rule's cost, and least_gain: by how many seconds, another path has to be better.
    evidence: the rule is kept until a prefill engine was seen at so many legs.
    caution: how many times as long as prefill a decode engine is expected to compute, until it was seen.
    threshold: fewer tokens than this are not pulled (``kvRecomputeThreshold``).
    retains: whether a local turn leaves a handle (KvloopConnector).
    """

    mode: Mode = Mode.AUTO
    decode_delay_weight: float = 1.0
    gain: float = 0.1
    least_gain: float = 0.02
    evidence: int = 32
    caution: float = 2.0
    threshold: int = 64
    retains: bool = False


class Sizes(NamedTuple):
    """Tokens of a turn: of the whole prompt, of its beginning that the decode engine still holds, and of the answer
    that is expected."""

    prompt: int
    held: int = 0
    answer: int = 0

    @property
    def rest(self) -> int:
        """What nobody holds. The last token is always computed."""
        return max(1, self.prompt - self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A prefill and a decode engine that a turn could go to, as they are now.

    prefill_wait, decode_wait: seconds until they have computed what is before this turn.
    seen: legs that the prefill engine was seen at.
    running: answers that the decode engine is giving.
    holds: whether the decode engine is the one that holds the turn's beginning.
    can_serve_alone: whether it holds it in its own prefix cache, so that it can go on from there.
    """

    prefill: str
    decode: str
    prefill_speed: PrefillSpeed
    decode_speed: DecodeSpeed
    prefill_wait: float = 0.0
    decode_wait: float = 0.0
    seen: int = 0
    running: int = 0
    holds: bool = True
    can_serve_alone: bool = False


class Forecast(NamedTuple):
    """A path at a place. first_token: seconds until then. burden: what others pay, in seconds, weighted."""

    path: Path
    place: Place
    first_token: float
    burden: float = 0.0

    @property
    def cost(self) -> float:
        """What it costs in all."""
        return self.first_token + self.burden


def forecasts(sizes: Sizes, place: Place, terms: Terms) -> tuple[Forecast, ...]:
    """What each path that is possible at ``place`` is expected to cost."""
    found = [_through_prefill(Path.COLD, sizes, place, Work(sizes.prompt))]
    if sizes.held >= max(1, terms.threshold):
        found.append(_through_prefill(Path.WARM, sizes, place, warm_work(sizes)))
    if sizes.held > 0 and place.holds and place.can_serve_alone:
        found.append(_local(sizes, place, terms))
    return tuple(found)


def compare(sizes: Sizes, places: Sequence[Place], terms: Terms) -> dict[Path, Forecast]:
    """For each path that is possible somewhere, the place where it costs least."""
    all_of_them = [forecast for place in places for forecast in forecasts(sizes, place, terms)]
    return {path: min(found, key=_cost) for path in Path if (found := _of(all_of_them, path))}


def pick(best: Mapping[Path, Forecast], terms: Terms) -> Forecast:
    """The path that a turn goes. Raises ValueError where none is possible."""
    if not best:
        raise ValueError("there is no place for this turn")
    if terms.mode is not Mode.AUTO:
        wanted = Path(terms.mode.value.lower())
        order = (Path.LOCAL, Path.WARM, Path.COLD)
        return next(best[path] for path in order[order.index(wanted) :] if path in best)
    rule = best.get(Path.WARM) or best[Path.COLD]
    if rule.place.seen < terms.evidence:
        return rule
    other = min(best.values(), key=_cost)
    return other if rule.cost - other.cost > max(terms.least_gain, terms.gain * rule.cost) else rule


def warm_work(sizes: Sizes) -> Work:
    """What prefill does in a warm turn."""
    return Work(sizes.rest, context=sizes.held, pulled=sizes.held)


def local_work(sizes: Sizes) -> Work:
    """What decode does in a local one."""
    return Work(sizes.rest, context=sizes.held)


def decode_work(sizes: Sizes, *, holds: bool) -> Work:
    """What decode does in any other: it reads what it does not hold, which is at least the last block."""
    return Work(0, pulled=sizes.rest if holds else max(1, sizes.prompt))


def _through_prefill(path: Path, sizes: Sizes, place: Place, work: Work) -> Forecast:
    speed = place.prefill_speed
    # An engine reads for one request while it computes others.
    ready = max(place.prefill_wait, speed.pull_seconds(work))
    read = place.decode_speed.pull_seconds(decode_work(sizes, holds=place.holds))
    return Forecast(path, place, ready + speed.compute_seconds(work) + max(place.decode_wait, read))


def _local(sizes: Sizes, place: Place, terms: Terms) -> Forecast:
    seconds = place.decode_speed.compute_seconds(local_work(sizes), place.prefill_speed, terms.caution)
    burden = terms.decode_delay_weight * place.running * seconds
    if not terms.retains:
        again = Work(sizes.rest + sizes.answer, context=sizes.held)
        burden += place.prefill_speed.compute_seconds(again)
    return Forecast(Path.LOCAL, place, place.decode_wait + seconds, burden)


def _of(found: Iterable[Forecast], path: Path) -> list[Forecast]:
    return [forecast for forecast in found if forecast.path is path]


def _cost(forecast: Forecast) -> float:
    return forecast.cost
