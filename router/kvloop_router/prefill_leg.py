"""A prefill leg, and what becomes of the handle that it carries.

It runs to its end whatever becomes of the client: cancelling it can end the engine, and what it used is used. Until
then nobody releases its handle; after it the handle is spent, or provably unread and there again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from kvloop_connector.verdict import Outcome
from kvloop_router import cost_model, legs, sizes
from kvloop_router.background import Background
from kvloop_router.engine import Engine, Work
from kvloop_router.engines import Engines
from kvloop_router.errors import EngineDraining, EngineError, EngineFailed, EngineRejected, EngineUnreachable
from kvloop_router.kept import HandleStore, Why
from kvloop_router.load import prompt_tokens
from kvloop_router.metrics import Metrics
from kvloop_router.pairs import Pairs
from kvloop_router.paths import Paths
from kvloop_router.release import Pending, Releases
from kvloop_router.request import Request
from kvloop_router.reuse import Option
from kvloop_router.truth import FirstToken, first_token
from kvloop_router.truth_sampling import TruthSampling

_UNTOUCHED = frozenset(
    {
        Outcome.UNPROVEN,
        Outcome.MALFORMED,
        Outcome.FOREIGN_ENGINE,
        Outcome.FORGED,
        Outcome.OWN_ENGINE,
        Outcome.OTHER_REVISION,
        Outcome.EXPIRED,
    }
)
"""Verdicts after which a prefill engine neither reads a handle nor tells its issuer."""


class Prefilled(NamedTuple):
    """A prefill leg that succeeded, on ``engine``.

    params: for the decode leg; None where the engine gave none. first: None where the leg did not ask for it.
    """

    engine: Engine | None
    params: Mapping[str, Any] | None
    rendered: Sequence[int] | None = None
    prompt_tokens: int | None = None
    first: FirstToken | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """What a prefill leg is sent with.

    token_ids: the prompt's, where the engine is given them. learning: whether it is to say which ids it rendered.
    may_release: whether it may carry a handle to be released, if it has none of its own.
    seconds: for everything.
    """

    request: Request
    token_ids: Sequence[int] | None
    salt: str | None
    headers: Mapping[str, str]
    learning: bool
    may_release: bool
    seconds: float


class PrefillLegs:
    """Sends prefill legs."""

    def __init__(
        self,
        *,
        engines: Engines,
        store: HandleStore,
        releases: Releases,
        pairs: Pairs,
        metrics: Metrics,
        truth_sampling: TruthSampling,
        paths: Paths,
        background: Background,
        clock: Callable[[], float],
    ) -> None:
        self._engines = engines
        self._store = store
        self._releases = releases
        self._pairs = pairs
        self._metrics = metrics
        self._truth_sampling = truth_sampling
        self._paths = paths
        self._background = background
        self._clock = clock

    async def run(
        self, leg: Leg, name: str, option: Option | None, ended: Callable[[Engine | None], None]
    ) -> Prefilled:
        """Send a leg and settle what it carried. Raises EngineError.

        ended: called with the engine as soon as its answer is there. Here and not where the result is awaited: between
            the two, others run.
        """
        engine = self._engines.get(name)
        rider = self._rider(engine) if option is None and leg.may_release and engine is not None else None
        carried = option.handle if option is not None else rider.rider if rider is not None else None
        body = legs.prefill(
            leg.request,
            handle=carried,
            token_ids=leg.token_ids,
            salt=leg.salt,
            ask_token_ids=leg.learning,
            ask_logprobs=option is not None and self._truth_sampling.asks(engine, option.kept),
        )
        held = option.tokens if option is not None else 0
        rate = self._paths.tokens_per_character
        watch = self._paths.prefill_leg(name, sizes.prefill_work(leg.request, leg.token_ids, held, rate))
        started = self._clock()
        outcome = "failed"
        try:
            # One that carries a handle fails with the handle's issuer too.
            counted = None if leg.token_ids is None else len(leg.token_ids)
            to_compute = max(1, prompt_tokens(leg.request, counted) - (option.tokens if option is not None else 0))
            work = Work(to_compute, tells=carried is None)
            answer = await self._engines.complete(
                name, leg.request.api, body, leg.headers, seconds=leg.seconds, work=work
            )
            ended(engine)
            prefilled = _prefilled(name, engine, answer.body)
            outcome = "ok"
            watch.first_token(_work(prefilled, held))
        except EngineError as error:
            await self._settle_failure(error, option, rider)
            raise
        finally:
            watch.close()
            self._metrics.legs.labels("prefill", outcome).observe(self._clock() - started)
        if prefilled.prompt_tokens is not None and leg.token_ids is None:
            self._paths.count(sizes.characters(leg.request), prefilled.prompt_tokens)
        if option is not None:
            await self._settle(option, prefilled)
        if rider is not None:
            self._releases.sent(rider)
        return prefilled

    async def _settle(self, option: Option, prefilled: Prefilled) -> None:
        spending = self._store.spend(option.kept.ident, option.grant)
        if self._store.shared:
            # Nobody else is given what was taken: the decode leg need not wait for the server.
            self._background.start(spending, "a handle that was used")
        else:
            await spending
        verdict = None if option.proven else legs.verdict(prefilled.params)
        if verdict is not None and verdict.outcome in _UNTOUCHED:
            self._releases.add_refused(option.kept)

    async def _settle_failure(self, error: EngineError, option: Option | None, rider: Pending | None) -> None:
        """After a failed leg: a handle that provably nobody read goes back after a 4xx and is released if nothing was
        sent; any other is lost. One that nobody reads any more, since the engine has answered, its issuer lets go if it
        can be told.
        """
        if rider is not None:
            self._releases.failed(rider)
        ended_there = isinstance(error, EngineFailed) and error.status
        if option is not None and ended_there and self._releases.add_failed(option.kept):
            await self._store.spend(option.kept.ident, option.grant)
        if option is None or not isinstance(error, EngineRejected | EngineUnreachable):
            return
        ended = await self._store.put_back(option.kept.ident, option.grant)
        if ended is not None:
            self._releases.add(ended, Why.ENDED)
        elif isinstance(error, EngineUnreachable) and await self._store.withdraw(option.kept.ident):
            self._releases.add(option.kept, Why.NOT_SENT)

    def _rider(self, prefill: Engine) -> Pending | None:
        def reachable(item: Pending) -> bool:
            return self._engines.present(item.process) and self._pairs.usable(prefill.spec.name, item.decode)

        return self._releases.rider(prefill.spec.kv_revision, reachable)


def _work(prefilled: Prefilled, held: int) -> cost_model.Work | None:
    """What a leg turned out to do that was to read ``held`` tokens; None where the engine does not tell."""
    cached = (prefilled.params or {}).get("remote_prefill_cached_tokens")
    if prefilled.prompt_tokens is None or type(cached) is not int:
        return None
    # The last token is always computed. Less than it was to read: its own cache had nearly all.
    context = max(0, min(cached, prefilled.prompt_tokens - 1))
    return cost_model.Work(prefilled.prompt_tokens - context, context, held if held and cached >= held else 0)


def _prefilled(name: str, engine: Engine | None, body: bytes) -> Prefilled:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise EngineFailed(name, "an answer that is not JSON") from error
    if not isinstance(answer, dict):
        raise EngineFailed(name, "an answer that is not an object")
    choices = answer.get("choices") or [{}]
    if choices[0].get("finish_reason") == "abort":
        raise EngineDraining(name)
    params = answer.get(legs.PARAMS)
    usage = answer.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return Prefilled(
        engine=engine,
        params=params if isinstance(params, dict) and params else None,
        rendered=answer.get("prompt_token_ids"),
        prompt_tokens=counted if type(counted) is int else None,
        first=first_token(answer),
    )
