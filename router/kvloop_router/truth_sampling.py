"""Looks at one warm turn in N: its prompt is computed anew, beside everything else, and the first tokens are compared.

Where they are further apart than computing anew ever brings about, nothing is reused any more between the decode
engine that retained the KV and the prefill engine that read it, for as long as both processes live. What the decode
engine retains else is released, and prefix caches are left behind, since what was computed from wrong KV is in them.

The warm turn's own prefill leg tells its log-probabilities, so that its client sees no difference. What is asked beside
it is sent to the same engine, only while nothing else of this router's runs there, one at a time; it has a salt that
nobody else has, carries no KV parameters and leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import orjson

from kvloop_router import headers, legs, truth
from kvloop_router.background import Background
from kvloop_router.config import Config
from kvloop_router.engine import Engine
from kvloop_router.engines import Engines
from kvloop_router.errors import EngineError, EngineFailed, EngineRejected
from kvloop_router.kept import Kept
from kvloop_router.metrics import Metrics
from kvloop_router.pairs import Pairs
from kvloop_router.request import Request
from kvloop_router.truth import FirstToken, Judgement, Noise, Outcome, Schedule

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmTurn:
    """A warm turn whose prefill leg has ended. What it was asked and answered is kept only until it was looked at.

    kept: the handle that was used. token_ids: those that the leg was given; None where the engine rendered the prompt.
    first: None where the leg did not tell.
    """

    prefill: Engine
    kept: Kept
    request: Request
    token_ids: Sequence[int] | None
    first: FirstToken | None

    @property
    def pair(self) -> tuple[str, str]:
        """The processes between which KV went."""
        return self.prefill.spec.process, self.kept.process


@dataclass(slots=True)
class _Prefill:
    """What is known of one prefill process.

    tells: whether it gives log-probabilities; None until it was asked, which no client's leg is the first to do: it
        would be the client's to whom a refusal goes. noise: by model.
    """

    tells: bool | None = None
    busy: bool = False
    noise: dict[str, Noise] = field(default_factory=dict)


class TruthSampling:
    """Decides which warm turns are looked at, and looks at them in the background."""

    def __init__(
        self,
        *,
        config: Config,
        engines: Engines,
        pairs: Pairs,
        metrics: Metrics,
        background: Background,
        random: Random,
        found_wrong: Callable[[str], Awaitable[None]],
    ) -> None:
        """found_wrong: told the decode process whose KV gave something else than computing it."""
        self._every = config.truth_sampling.every_nth_warm_turn
        self._floor = config.truth_sampling.least_tolerance_nats
        self._seconds = config.timeouts.prefill_seconds
        self._engines = engines
        self._pairs = pairs
        self._metrics = metrics
        self._background = background
        self._random = random
        self._found_wrong = found_wrong
        self._prefills: dict[str, _Prefill] = {}
        self._schedules: dict[tuple[str, str], Schedule] = {}
        self._stopped = False

    def stop(self) -> None:
        """Begin nothing any more."""
        self._stopped = True

    def asks(self, prefill: Engine | None, kept: Kept) -> bool:
        """Whether the prefill leg that is about to use this handle is to tell its log-probabilities."""
        if not self._every or self._stopped or prefill is None:
            return False
        known = self._prefills.get(prefill.spec.process)
        schedule = self._schedules.get((prefill.spec.process, kept.process))
        return known is not None and known.tells is True and schedule is not None and schedule.next_is_due

    def count(self, turn: WarmTurn) -> None:
        """A warm turn was played; look at it if it is due."""
        if not self._every or self._stopped:
            return
        self._forget_what_is_gone()
        schedule = self._schedules.setdefault(turn.pair, Schedule(self._every))
        prefill = self._prefills.setdefault(turn.prefill.spec.process, _Prefill())
        schedule.count()
        if not schedule.due or prefill.busy or prefill.tells is False:
            return
        if prefill.tells and turn.first is None:
            # It began before this one was due; the next is asked.
            return
        if turn.prefill.load or not turn.prefill.serving:
            self._metrics.truth_samples.labels(Outcome.BUSY).inc()
            return
        prefill.busy = True
        self._background.start(self._look_at(turn, prefill, schedule), "truth sampling")

    async def _look_at(self, turn: WarmTurn, prefill: _Prefill, schedule: Schedule) -> None:
        noise = prefill.noise.setdefault(turn.request.model, Noise(self._floor))
        outcome = Outcome.FAILED
        try:
            salt = self._random.randbytes(16).hex()
            anew = await self._compute(turn, salt)
            # Under the same salt: where there is a prefix cache, its last block upon those of the first time, as a
            # warm turn's are computed upon what was read.
            again = await self._compute(turn, salt)
            if turn.first is None:
                noise.add(truth.distance(anew, again))
                prefill.tells, outcome = True, Outcome.CALIBRATED
            else:
                judgement = truth.judge(turn.first, anew, again, noise)
                outcome = judgement.outcome
                await self._judged(turn, judgement)
        except EngineRejected:
            prefill.tells, outcome = False, Outcome.REFUSED
        except EngineError as error:
            _log.info("a turn could not be computed anew", extra={"error": str(error)})
        finally:
            prefill.busy = False
            if outcome is not Outcome.CALIBRATED:
                schedule.start_over()
            self._metrics.truth_samples.labels(outcome).inc()

    async def _compute(self, turn: WarmTurn, salt: str) -> FirstToken:
        """The first token's log-probabilities with nothing reused. Raises EngineError."""
        name = turn.prefill.spec.name
        if self._stopped or self._engines.get(name) is not turn.prefill:
            raise EngineFailed(name, "no longer asked")
        body = legs.anew(turn.request, token_ids=turn.token_ids, salt=salt)
        sent = headers.upstream({}, f"truth-{self._random.randbytes(8).hex()}")
        answer = await self._engines.complete(name, turn.request.api, body, sent, seconds=self._seconds)
        told = truth.first_token(_object(answer.body))
        if told is None:
            raise EngineFailed(name, "an answer without log-probabilities")
        return told

    async def _judged(self, turn: WarmTurn, judgement: Judgement) -> None:
        self._metrics.truth_distance.labels("reused").observe(judgement.distance)
        self._metrics.truth_distance.labels("computed").observe(judgement.noise)
        if judgement.outcome is not Outcome.MISMATCH:
            return
        apart = f"{judgement.distance:.2f} nats a token where {judgement.tolerance:.2f} are let pass"
        self._pairs.record_wrong(*turn.pair, f"a reused prefix gave other log-probabilities than computing it: {apart}")
        await self._found_wrong(turn.kept.process)
        _log.error(
            "wrong reuse",
            extra={
                "prefill": turn.prefill.spec.name,
                "prefill_process": turn.prefill.spec.process,
                "decode": turn.kept.decode,
                "decode_process": turn.kept.process,
                "model": turn.request.model,
                "distance": round(judgement.distance, 4),
                "noise": round(judgement.noise, 4),
                "tolerance": round(judgement.tolerance, 4),
            },
        )

    def _forget_what_is_gone(self) -> None:
        there = {engine.spec.process for engine in self._engines}
        if not there.issuperset(self._prefills):
            self._prefills = {process: known for process, known in self._prefills.items() if process in there}
        if any(not there.issuperset(pair) for pair in self._schedules):
            self._schedules = {pair: known for pair, known in self._schedules.items() if there.issuperset(pair)}


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}
