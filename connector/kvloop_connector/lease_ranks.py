"""Release and renewal on the ranks of one engine: what one rank does, and what the ranks' answers amount to.

Each rank (a worker process of vLLM) keeps a deadline of its own for what it retains, on its own clock, and blocks are
free once every rank has given them up. So what is said of a handle holds only if it holds on all ranks.

What goes between the processes is plain lists, maps and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvloop_connector.errors import InvalidAnswer, UnsupportedEngine
from kvloop_connector.settings import LONGEST_LEASE

LONGEST_LEASE_SECONDS = 3600
"""How long blocks are retained at most where nobody says it."""

_DECODER_TTL_SECONDS = 480
"""vLLM's own default (``nixl/base_scheduler.py:180``)."""

Deadlines = MutableMapping[str, float]
"""Request id -> until when its blocks are retained, on the rank's clock."""

RankAnswer = dict[str, Any]
"""What a rank answers: ``{"held": [ids]}``, ``{"renewed": {id: [increment, remaining, number]}, "engine_id": …}``, or
``{"fault": why it could do nothing}``."""


def renewable_seconds(extra: Mapping[str, Any]) -> float:
    """How many seconds all renewals together may add to a decode engine's deadline; raises UnsupportedEngine."""
    ttl = extra.get("decoder_kv_blocks_ttl", _DECODER_TTL_SECONDS)
    longest = extra.get(LONGEST_LEASE, max(LONGEST_LEASE_SECONDS, ttl))
    if isinstance(longest, bool) or not isinstance(longest, int | float) or not ttl <= longest < math.inf:
        raise UnsupportedEngine(
            f"kv_connector_extra_config.{LONGEST_LEASE} is {longest}: use a number of seconds, "
            f"decoder_kv_blocks_ttl ({ttl}) or more"
        )
    return float(longest - ttl)


class RankLeases:
    """What one rank remembers of the leases that were renewed.

    most: how many seconds all renewals together may add to a deadline.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._first: dict[str, float] = {}
        self._numbers: dict[str, int] = {}

    def release(self, deadlines: Deadlines, request_ids: Iterable[str], now: float) -> RankAnswer:
        """Let the leases end now."""
        self._forget_ended(deadlines)
        held = [request_id for request_id in request_ids if request_id in deadlines]
        for request_id in held:
            deadlines[request_id] = min(deadlines[request_id], now)
        return {"held": held}

    def renew(
        self, deadlines: Deadlines, request_ids: Iterable[str], seconds: float, *, now: float, engine_id: str
    ) -> RankAnswer:
        """Let the leases end ``seconds`` from now, never sooner than before, nor later than ``most`` allows.

        One whose deadline is over but which was not given up yet is not held any more.
        """
        self._forget_ended(deadlines)
        renewed: dict[str, list[float]] = {}
        for request_id in request_ids:
            before = deadlines.get(request_id)
            if before is None or before <= now:
                continue
            latest = self._first.setdefault(request_id, before) + self._most
            deadline = max(before, min(now + seconds, latest))
            deadlines[request_id] = deadline
            self._numbers[request_id] = number = self._numbers.get(request_id, 0) + 1
            renewed[request_id] = [deadline - before, deadline - now, number]
        return {"renewed": renewed, "engine_id": engine_id}

    def set_back(self, deadlines: Deadlines, increments: Mapping[str, float]) -> RankAnswer:
        """Take back a renewal of leases that other ranks do not hold: nobody may count on it."""
        held = [request_id for request_id in increments if request_id in deadlines]
        for request_id in held:
            deadlines[request_id] -= increments[request_id]
        return {"held": held}

    def _forget_ended(self, deadlines: Deadlines) -> None:
        for request_id in [request_id for request_id in self._first if request_id not in deadlines]:
            del self._first[request_id], self._numbers[request_id]


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a renewal led to on all ranks.

    seconds: by how much the deadline moved, on the rank where it moved least.
    remaining: seconds from when the ranks were asked until the first of them ends the lease.
    number: of this renewal of this lease, from 1.
    """

    seconds: float
    remaining: float
    number: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """What the ranks renewed.

    engine_id: of the engine.
    leases: by request id, those that all ranks hold.
    set_back: by request id, by how much to set those back that only some hold.
    """

    engine_id: str
    leases: Mapping[str, Renewal]
    set_back: Mapping[str, float]


def released(answers: Sequence[Any]) -> frozenset[str]:
    """The request ids that all ranks held; raises InvalidAnswer where one could do nothing."""
    held = [frozenset(_said(answer, "held", list)) for answer in _all(answers)]
    return frozenset.intersection(*held)


def renewed(answers: Sequence[Any]) -> Renewed:
    """What the answers amount to; raises InvalidAnswer where a rank could do nothing."""
    ranks = [_renewals(answer) for answer in _all(answers)]
    leases: dict[str, Renewal] = {}
    set_back: dict[str, float] = {}
    for request_id in dict.fromkeys(request_id for rank in ranks for request_id in rank):
        found = [rank[request_id] for rank in ranks if request_id in rank]
        if len(found) < len(ranks):
            set_back[request_id] = max(renewal.seconds for renewal in found)
            continue
        leases[request_id] = Renewal(
            seconds=min(renewal.seconds for renewal in found),
            remaining=min(renewal.remaining for renewal in found),
            number=max(renewal.number for renewal in found),
        )
    return Renewed(_said(answers[0], "engine_id", str), leases, set_back)


def _all(answers: Sequence[Any]) -> Sequence[Any]:
    if not answers:
        raise InvalidAnswer("no worker answered")
    for answer in answers:
        if not isinstance(answer, Mapping):
            raise InvalidAnswer("a worker's answer is not an object")
        if "fault" in answer:
            raise InvalidAnswer(str(answer["fault"]))
    return answers


def _renewals(answer: Mapping[str, Any]) -> dict[str, Renewal]:
    try:
        return {
            request_id: Renewal(float(seconds), float(remaining), int(number))
            for request_id, (seconds, remaining, number) in _said(answer, "renewed", dict).items()
        }
    except (TypeError, ValueError) as error:
        raise InvalidAnswer("a worker's answer is not what renewals look like") from error


def _said(answer: Mapping[str, Any], name: str, kind: type) -> Any:
    value = answer.get(name)
    if not isinstance(value, kind):
        raise InvalidAnswer(f"a worker's answer lacks {name}")
    return value
