"""A turn. Start reading here.

::

    find a handle ─▶ tokens of the new prompt ─▶ proof ─▶ choose engines ─▶ take
      ─▶ prefill leg (pulls from decode what was proven, computes the rest)
      ─▶ decode leg (pulls from prefill) ─▶ relay ─▶ keep the new handle

With KvloopConnector there are no tokens and no proof here: prefill proves what it pulls.

A prefill leg runs to its end even if its client leaves: cancelling it can end the engine, and what it used is used.
A decode leg is never sent without its prefill leg's own parameters, except on path local, which has no prefill leg; and
each prefill leg has one decode leg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import orjson

from kvloop_connector.settings import Role
from kvloop_router import history, legs, relay
from kvloop_router.background import Background, aside, in_parts, let_others_go_on
from kvloop_router.choosing import Choosing
from kvloop_router.config import Config
from kvloop_router.engine import Engine, decode_work
from kvloop_router.engines import Engines
from kvloop_router.errors import (
    EngineError,
    EngineFailed,
    EngineRejected,
    EngineUnreachable,
    StreamBroken,
    Unavailable,
)
from kvloop_router.keep_alive import kept_alive
from kvloop_router.kept import HandleStore, Query
from kvloop_router.metrics import Metrics
from kvloop_router.outline import outline
from kvloop_router.pairs import Pairs, Templates
from kvloop_router.path_choice import Path
from kvloop_router.paths import Paths
from kvloop_router.policy import Candidate, Pair, choose_one, choose_pair, still_serving
from kvloop_router.prefill_leg import Leg, Prefilled, PrefillLegs
from kvloop_router.relay import Downstream, Ended
from kvloop_router.release import Releases
from kvloop_router.request import Request
from kvloop_router.reuse import Option, Options, Reuse, report_reuse
from kvloop_router.scope import Scope
from kvloop_router.tokens import Tokenizer
from kvloop_router.truth_sampling import TruthSampling, WarmTurn
from kvloop_router.turn_log import LegReport, TurnReport
from kvloop_router.turn_progress import Turn

_DECODE_ATTEMPTS = 2


class Turns:
    """Plays turns. Everything it depends on is handed in."""

    def __init__(
        self,
        *,
        config: Config,
        engines: Engines,
        store: HandleStore,
        releases: Releases,
        pairs: Pairs,
        templates: Templates,
        metrics: Metrics,
        truth_sampling: TruthSampling,
        paths: Paths,
        background: Background,
        clock: Callable[[], float],
        random: Random,
        epoch: Callable[[], bytes],
    ) -> None:
        self._config = config
        self._engines = engines
        self._store = store
        self._pairs = pairs
        self._templates = templates
        self._metrics = metrics
        self._truth_sampling = truth_sampling
        self._choosing = Choosing(paths, engines)
        self._background = background
        self._clock = clock
        self._random = random
        self._running: dict[int, Turn] = {}
        self._verified_by_engine = config.kv_transfer.verified_by_engine
        self._digests_answers = (
            config.reuse and config.kv_transfer.bidirectional_kv_xfer and not config.kv_transfer.verified_by_engine
        )
        self._reuse = Reuse(config, store, releases, engines, clock, epoch)
        self._prefill_legs = PrefillLegs(
            engines=engines,
            store=store,
            releases=releases,
            pairs=pairs,
            metrics=metrics,
            truth_sampling=truth_sampling,
            paths=paths,
            background=background,
            clock=clock,
        )
        self._tokenizer = Tokenizer(config, engines, templates, random)

    async def end_conversation(self, scope: Scope, conversation: str) -> int:
        """Release all that is kept of a conversation, and in the end what its running turns leave; gives how many
        handles there were."""
        for turn in self._running.values():
            if (turn.query.tenant_scope, turn.query.conversation) == (scope.ident, conversation):
                turn.ended = True
        return await self._reuse.end(scope, conversation)

    async def play(
        self, request: Request, scope: Scope, headers: Mapping[str, str], report: TurnReport, downstream: Downstream
    ) -> bytes | None:
        """Play a turn. A streamed answer goes to ``downstream``; any other is given back as its body.

        Raises RequestError, Unavailable, EngineRejected or EngineFailed before the first byte, StreamBroken after it.
        """
        trail = await aside(request.size, lambda: history.trail(scope.history_key, request))
        query = Query(scope.ident, request.conversation, trail)
        turn = Turn(request, scope, query, headers, report)
        self._running[id(turn)] = turn
        try:
            if request.plain:
                return await self._play_plain(turn, downstream)
            why_unprovable = await self._tokenize(turn)
            found = await self._reuse.find(query, turn.proof, why_unprovable)
            report.proven_tokens = found.equal
            return await self._play_legs(turn, found, downstream)
        finally:
            turn.needs.close()
            del self._running[id(turn)]
            report.outline = outline(scope.history_key, request, query.trail)

    async def _play_plain(self, turn: Turn, downstream: Downstream) -> bytes | None:
        """A request that no KV moves for goes to a decode engine as it is, which then retains nothing."""
        turn.report.reason = "api"
        for attempt in range(_DECODE_ATTEMPTS):
            turn.report.decode = choose_one(self._pool(turn), self._random, Role.DECODE, turn.tried)
            try:
                return await self._decode(turn, turn.report.decode, None, downstream)
            except EngineError as error:
                self._may_retry(turn, error, "decode", downstream, last=attempt + 1 == _DECODE_ATTEMPTS)
        raise AssertionError("the last attempt raises")

    async def _play_legs(self, turn: Turn, found: Options, downstream: Downstream) -> bytes | None:
        pair, option, reason = await self._choose(turn, found)
        turn.report.reason = reason
        for attempt in range(_DECODE_ATTEMPTS):
            if turn.report.path == Path.LOCAL:
                prefilled = Prefilled(engine=None, params=self._reuse.params_alone)
            else:
                pair, prefilled = await self._prefill(turn, pair, option)
            option = None
            pair = still_serving(pair, self._pool(turn), self._random, avoid=turn.tried, usable=self._pairs.usable)
            turn.needs.only(self._engines.get(pair.prefill))
            await let_others_go_on(turn.request.size)
            try:
                return await self._decode(turn, pair.decode, prefilled, relay.Begun(downstream, turn.needs.let_go))
            except EngineError as error:
                self._may_retry(turn, error, "decode", downstream, last=attempt + 1 == _DECODE_ATTEMPTS)
            turn.report.path, turn.report.reused_tokens, turn.report.reason = "cold", 0, "engine_failed"
            pair = choose_pair(self._pool(turn), self._random, avoid_prefill=turn.tried, avoid_decode=turn.tried)
        raise AssertionError("the last attempt raises")

    async def _tokenize(self, turn: Turn) -> str:
        """Learn the prompt's token ids. Gives why nothing can be proven, or "". Raises RequestError, EngineRejected."""
        if self._verified_by_engine:
            return ""
        prompt = await self._tokenizer.prompt(turn.request, turn.headers, turn.report)
        turn.tokenized, turn.learning = prompt.token_ids, prompt.rendering_known is None
        if prompt.rendering_known:
            turn.token_ids = prompt.token_ids
        return prompt.why_unprovable

    async def _choose(self, turn: Turn, found: Options) -> tuple[Pair, Option | None, str]:
        """The engines, and the handle that is taken for them; why there is none. Raises Unavailable."""
        reason = found.reason
        for option in found.options:
            turn.home = str(option.kept.params["remote_engine_id"])
            if not self._engines.present(option.kept.process):
                reason = "engine_gone"
                continue
            pair, reason = self._warm_pair(turn, option)
            if pair is None:
                await self._reuse.discard(option)
            elif (path := self._foresee(turn, option, pair)) is not Path.WARM:
                # Nothing is read: the handle stays where it is, until this turn's own takes its place.
                return (pair if path is Path.COLD else pair._replace(prefill="")), None, "cheaper"
            elif (grant := await self._store.take(option.kept.ident)) is not None:
                turn.report.proven_tokens = option.tokens if option.proven else 0
                turn.report.retained_tokens = int(option.kept.params["remote_num_tokens"])
                return pair, option._replace(grant=grant), ""
            else:
                reason = "taken"
        home = found.options[0].kept.process if found.options else None
        return choose_pair(self._pool(turn), self._random, issuer=home), None, reason

    def _foresee(self, turn: Turn, option: Option, pair: Pair) -> Path:
        """The path that this turn goes between the engines of ``pair``."""
        turn.pace = option.kept.pace.after(self._clock() - option.kept.since)
        turn.outlook = self._choosing.outlook(turn.request, turn.token_ids, turn.query, option, pair, turn.report)
        return turn.outlook.path

    def _warm_pair(self, turn: Turn, option: Option) -> tuple[Pair | None, str]:
        """Engines between which this handle may go, or why there are none.

        Where its issuer drains, prefill still pulls from there, and another engine gets the decode leg.
        """
        kept = option.kept

        def usable(prefill: str, decode: str) -> bool:
            return self._pairs.usable(prefill, kept.decode) and self._pairs.usable(prefill, decode)

        try:
            pair = choose_pair(
                self._pool(turn),
                self._random,
                issuer=kept.process,
                revision=kept.kv_revision,
                usable=usable,
            )
        except Unavailable:
            return None, "no_pair"
        return (pair, "") if self._pairs.usable(pair.prefill, kept.decode) else (None, "pair_failed")

    async def _prefill(self, turn: Turn, pair: Pair, option: Option | None) -> tuple[Pair, Prefilled]:
        """A prefill leg that succeeded; after a failure once more, cold and if possible elsewhere."""
        try:
            return pair, await self._prefill_leg(turn, pair, option, may_release=True)
        except (EngineUnreachable, EngineFailed) as error:
            self._failed(turn, "prefill", error)
            if option is not None:
                turn.report.reason = "engine_failed"
        pair = choose_pair(
            self._pool(turn),
            self._random,
            issuer=option.kept.process if option else None,
            avoid_prefill=turn.tried,
            avoid_decode=turn.tried,
        )
        try:
            return pair, await self._prefill_leg(turn, pair, None, may_release=False)
        except (EngineUnreachable, EngineFailed) as error:
            self._engines.failed(error)
            turn.report.attempts.append(f"prefill {error}")
            raise

    async def _prefill_leg(self, turn: Turn, pair: Pair, option: Option | None, *, may_release: bool) -> Prefilled:
        turn.report.prefill, turn.report.decode, turn.report.phase = pair.prefill, pair.decode, "prefill"
        started = self._clock()
        turn.needs.only(self._engines.get(pair.decode))
        if (more := self._reuse.to_digest(turn.proof, pair.decode)) is not None:
            self._background.start(in_parts(more), "digests of a prompt")
        prefilled = await self._background.finish(
            self._run_prefill(turn, pair.prefill, option, may_release=may_release)
        )
        turn.report.prefill_seconds = self._clock() - started
        if turn.report.prompt_tokens is None:
            turn.report.prompt_tokens = prefilled.prompt_tokens
        if option is not None:
            verdict = report_reuse(turn.report, option, prefilled.params)
            if verdict:
                self._metrics.verdicts.labels(verdict).inc()
            self._count_warm(turn, option, prefilled)
        if turn.learning and prefilled.rendered is not None and turn.tokenized is not None:
            self._templates.learn(legs.shape(turn.request), turn.tokenized, prefilled.rendered)
            turn.learning = False
            turn.token_ids = prefilled.rendered
        return prefilled

    def _count_warm(self, turn: Turn, option: Option, prefilled: Prefilled) -> None:
        if prefilled.engine is None or turn.report.path != "warm" or not turn.report.reused_tokens:
            return
        self._truth_sampling.count(
            WarmTurn(
                prefill=prefilled.engine,
                kept=option.kept,
                request=turn.request,
                token_ids=self._sent_ids(turn),
                first=prefilled.first,
            )
        )

    async def _run_prefill(self, turn: Turn, name: str, option: Option | None, *, may_release: bool) -> Prefilled:
        """Runs to its end whatever becomes of the client."""
        with turn.report.leg("prefill", name) as reported:
            leg = Leg(
                request=turn.request,
                token_ids=self._sent_ids(turn),
                salt=turn.scope.salt,
                headers=reported.headers(turn.headers),
                learning=turn.learning,
                may_release=may_release,
                seconds=self._config.timeouts.prefill_seconds,
            )
            return await self._prefill_legs.run(leg, name, option, turn.needs.hold)

    def _pool(self, turn: Turn) -> Sequence[Candidate]:
        """The engines that have the turn's model."""
        return self._engines.snapshot(turn.request.model)

    def _sent_ids(self, turn: Turn) -> Sequence[int] | None:
        """The ids that a leg may be given; chat takes them only on engines that know how."""
        from_chat = "messages" in turn.request.body
        return turn.token_ids if self._config.engine.prompt_token_ids or not from_chat else None

    async def _decode(self, turn: Turn, name: str, prefilled: Prefilled | None, downstream: Downstream) -> bytes | None:
        """The decode leg, to the answer's end."""
        engine = self._engines.get(name)
        if engine is None:
            raise EngineUnreachable(name, "no longer there")
        turn.report.decode, turn.report.phase = name, "decode"
        params = prefilled.params if prefilled is not None else None
        ids, ask = self._sent_ids(turn), self._digests_answers
        body = legs.decode(turn.request, params=params, token_ids=ids, salt=turn.scope.salt, ask_token_ids=ask)
        watch = self._choosing.decode_leg(engine, turn.outlook, turn.report)
        downstream = relay.Begun(downstream, watch.first_token)
        started = self._clock()
        outcome = "failed"

        async def finished(ended: Ended) -> None:
            finish = self._finish(turn, engine, params, ended)
            # In this process's memory nothing waits, so that no client that leaves can cut it off.
            await (self._background.finish(finish) if self._store.shared else finish)

        try:
            with turn.report.leg("decode", name) as reported:
                whole = await self._relay(turn, engine, reported, body, downstream, finished)
            outcome = "ok"
        finally:
            watch.close()
            self._metrics.legs.labels("decode", outcome).observe(self._clock() - started)
        return whole

    async def _relay(
        self,
        turn: Turn,
        engine: Engine,
        reported: LegReport,
        body: Mapping[str, Any],
        downstream: Downstream,
        finished: relay.Finished,
    ) -> bytes | None:
        name, api, sent = engine.spec.name, turn.request.api, reported.headers(turn.headers)
        keep_token_ids, limits = turn.request.wants_token_ids, self._config.timeouts
        work = decode_work(engine, turn.request, turn.report.prompt_tokens, turn.home, self._random)
        if not turn.request.stream:
            answer = await self._engines.complete(name, api, body, sent, seconds=limits.decode_seconds, work=work)
            data, _ = await relay.whole(answer, name, keep_token_ids=keep_token_ids, finished=finished)
            return data
        data, stall = orjson.dumps(body), limits.decode_stall_seconds
        async with self._engines.stream(name, api, data, sent, stall_seconds=stall, work=work) as upstream:
            source = kept_alive(upstream, downstream, limits.keep_alive_seconds)
            await relay.stream(source, downstream, keep_token_ids=keep_token_ids, finished=finished, clock=self._clock)
        return None

    async def _finish(self, turn: Turn, engine: Engine, params: Mapping[str, Any] | None, ended: Ended) -> None:
        """The turn's answer is complete: keep its handle, before the client can send the next turn."""
        if params is None:
            reason = "api" if turn.request.plain else turn.report.no_prefill
        else:
            reason = await self._reuse.keep(turn.request, turn.query, turn.scope, engine, turn.proof, ended, turn.pace)
            if turn.ended and turn.query.conversation is not None:
                await self._reuse.end(turn.scope, turn.query.conversation)
        if reason == "none_returned":
            reason = self._reuse.why_none_returned(turn.request, ended)
        turn.report.no_handle = reason
        if turn.report.prompt_tokens is None and ended.prompt_token_ids is not None:
            turn.report.prompt_tokens = len(ended.prompt_token_ids)
        if reason:
            self._metrics.no_handle.labels(reason).inc()
        else:
            self._metrics.handles.labels("kept").inc()
            await self._reuse.supersede(turn.outlook.unread if turn.outlook is not None else None)

    def _may_retry(self, turn: Turn, error: EngineError, leg: str, downstream: Downstream, *, last: bool) -> None:
        """Raise ``error`` unless the leg may be sent again."""
        if isinstance(error, StreamBroken) and not downstream.started:
            error = EngineFailed(error.engine, "the answer broke off before it began")
        if downstream.started or isinstance(error, EngineRejected) or last:
            self._engines.failed(error)
            turn.report.attempts.append(f"{leg} {error}")
            raise error
        self._failed(turn, leg, error)

    def _failed(self, turn: Turn, leg: str, error: EngineError) -> None:
        turn.report.attempts.append(f"{leg} {error}")
        turn.tried.add(error.engine)
        self._metrics.retries.labels(leg).inc()
        self._engines.failed(error)
