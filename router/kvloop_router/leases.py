"""How long what decode engines retain is worth its memory: which handles are renewed, and which are given up. Pure.

A conversation is idle from the end of one turn to the beginning of the next. How long it was so far is the best that
is known of how long it will be: a handle is renewed for as long as that makes another turn likely, up to the longest
lease. Memory is what it costs; past an engine's budget the longest idle are given up, however likely their next turn.
"""

from __future__ import annotations

from dataclasses import dataclass

_SLACK = 1e-3
"""Seconds; a renewal that moves a deadline by less has met the longest lease."""

_LONGEST_FACTOR = 1.5
"""A conversation that paused for long once may pause for so many times as long again."""

_ROOM = 10
"""Where an engine itself refuses to retain more, this part of its cap is left free for turns that are about to end."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The gaps between a conversation's turns so far: how many, their sum and the longest of them in seconds."""

    gaps: int = 0
    total: float = 0.0
    longest: float = 0.0

    def after(self, gap: float) -> Pace:
        """With one more gap."""
        gap = max(0.0, gap)
        return Pace(self.gaps + 1, self.total + gap, max(self.longest, gap))


UNKNOWN = Pace()
"""Of a conversation that has not paused yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What renewals go by; all but patience in seconds.

    ttl: how long a handle is kept without renewal.
    margin: how much sooner than its engine the router lets go of a handle.
    lead: how long before a handle's end it is renewed.
    expected_gap: what a conversation of which nothing is known is expected to pause; counts as one gap of its own.
    patience: for how many times its expected gap a conversation may be idle until nobody waits for it any more.
    """

    ttl: float
    margin: float
    lead: float
    expected_gap: float
    patience: float


@dataclass(frozen=True, slots=True)
class Held:
    """A handle that nobody has taken; times in seconds on the router's clock.

    since: when its conversation became idle. ends: past this no renewal moves its deadline.
    """

    since: float
    deadline: float
    ends: float
    pace: Pace


def patience(pace: Pace, terms: Terms) -> float:
    """For how many seconds of idleness a conversation's next turn is waited for."""
    expected = (terms.expected_gap + pace.total) / (1 + pace.gaps)
    return max(terms.patience * expected, _LONGEST_FACTOR * pace.longest)


def renewal(held: Held, now: float, terms: Terms) -> float | None:
    """For how many seconds from now its engine is to retain a handle's blocks; None where it is not to be asked now."""
    until = min(held.since + patience(held.pace, terms), held.ends)
    if not now < held.deadline <= now + terms.lead or until <= held.deadline:
        return None
    return min(until - now, terms.ttl) + terms.margin


def renewed(held: Held, seconds: float) -> Held:
    """The handle whose deadline its engine has moved by ``seconds``."""
    deadline = held.deadline + max(0.0, seconds)
    ends = deadline if seconds < _SLACK else held.ends
    return Held(held.since, deadline, ends, held.pace)


def budget(most: int, *, capped: bool, newest: int) -> int:
    """How many blocks kept handles may hold of an engine that may retain ``most``.

    capped: whether the engine itself retains no more than that: a turn that would pass it leaves no handle, so that
        there has to be room for the next one before it ends, as much as for the newest, of ``newest`` blocks.
    """
    return most - min(most // 2, max(most // _ROOM, newest)) if capped else most
