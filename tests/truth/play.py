"""Plays a part of the truth test on engines that run: one seed through one router, beside a reference.

The reference is another engine, asked the very same thing in the same moment without any handle: it reuses nothing, or
nothing that anybody else has made (a salt of its own for each request). What it answers is right by definition.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from kvloop_connector.handle import COLD_PREFILL_PARAMS
from kvloop_connector.verdict import Outcome
from tests.harness.engines import Engine
from tests.harness.metrics import EngineMetrics
from tests.truth import legs, oracle
from tests.truth.arms import Arm, Got, session_of_requests
from tests.truth.judge import OK, Answered, Tally, judge
from tests.truth.stage import Stage, engine_ttl
from tests.truth.turns import Ask, Kind, Step, Talk, deal, draw, follow


async def play(
    stage: Stage,
    arm: Arm,
    seeds: Sequence[int],
    turns: int,
    *,
    expiries: int = 0,
    restarts: int = 0,
    past_router: bool = True,
    answered: Callable[[Answered], None] = lambda answer: None,
    judged: Callable[[Sequence[Answered]], None] = lambda answers: None,
) -> Tally:
    """One part: about so many answers in all, of several seeds side by side. ``answered`` is told of each as it comes,
    ``judged`` in the end of all, with what the oracle says of them.

    expiries: for each seed. restarts: for the first.
    past_router: whether handles are spent twice and forged too, past the router: a matter of the engines alone.
    """
    each = -(-turns // len(seeds))
    hands = {
        seed: deal(seed, each, expiries=expiries, restarts=0 if index else restarts, past_router=past_router)
        for index, seed in enumerate(seeds)
    }
    async with session_of_requests() as session:
        tally, answers = await _Part(stage, arm, session, answered, abreast=len(seeds)).play(hands, each)
    judged(answers)
    return tally


class _Part:
    def __init__(
        self,
        stage: Stage,
        arm: Arm,
        session: aiohttp.ClientSession,
        answered: Callable[[Answered], None],
        *,
        abreast: int,
    ) -> None:
        self._stage = stage
        self._arm = arm
        self._session = session
        self._answered = answered
        self._answers: list[Answered] = []
        self._turns: list[oracle.Turn] = []
        # For each of those turns, which of the answers it had.
        self._routes: list[int] = []
        self._gone: list[oracle.Gone] = []
        # By name of the prefill engine: what it had counted when it began to be counted for this part.
        self._before: dict[str, EngineMetrics] = {}
        self._reads = self._bytes = 0.0
        self._abreast = abreast
        self._steps = asyncio.Semaphore(abreast)
        self._exclusive = asyncio.Lock()

    async def play(self, hands: Mapping[int, Sequence[Kind]], turns: int) -> tuple[Tally, list[Answered]]:
        """All seeds side by side, each with the kinds that it was dealt."""
        started = time.monotonic()
        for engine in self._stage.engines.prefill:
            self._before[engine.name] = await asyncio.to_thread(engine.metrics)
        async with asyncio.TaskGroup() as group:
            for seed, kinds in hands.items():
                group.create_task(self._play(seed, kinds, turns))
        for engine in self._stage.engines.prefill:
            await self._count(engine)
        rules = self._stage.rules()
        most, unruled = (
            dict(zip(self._routes, oracle.reusable(self._turns, self._gone, each), strict=True))
            for each in (rules, replace(rules, ids_believed=False))
        )
        answers = [replace(answer, reusable=most.get(index, 0)) for index, answer in enumerate(self._answers)]
        tally = judge(
            answers,
            reusable_unruled=sum(unruled.values()),
            reads=round(self._reads),
            pulled_bytes=round(self._bytes),
            seconds=time.monotonic() - started,
        )
        return tally, answers

    async def _play(self, seed: int, kinds: Sequence[Kind], turns: int) -> None:
        talks: dict[int, Talk] = {}
        last: dict[int, Answered] = {}
        number = answers = 0
        while kinds and answers < turns:
            step, kinds = draw(seed, number, kinds, talks)
            number += 1
            if step.kind is Kind.EXPIRE:
                await self._let_expire(last.get(step.about))
            elif step.kind is Kind.RESTART:
                async with self._alone():
                    await self._restart(step.choice)
            async with self._steps:
                came = await (self._direct(seed, step) if step.direct else self._routed(seed, step))
            answers += len(came)
            talks = follow(step, talks, [each.right if each.failed else each.text for each in came])
            if step.slot is not None:
                last[step.slot] = came[-1]

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """While no step of another seed runs."""
        async with self._exclusive:
            for _ in range(self._abreast):
                await self._steps.acquire()
            try:
                yield
            finally:
                for _ in range(self._abreast):
                    self._steps.release()

    async def _routed(self, seed: int, step: Step) -> list[Answered]:
        return list(await asyncio.gather(*(self._turn(seed, step, ask) for ask in step.asks)))

    async def _turn(self, seed: int, step: Step, ask: Ask) -> Answered:
        body = self._body(ask)
        (got, times), reference = await asyncio.gather(self._timed(ask, body), self._right(body))
        prompt, ids = reference.body["prompt_token_ids"], reference.body["choices"][0]["token_ids"]
        if got.status == OK:
            names = {engine.name: engine for engine in self._stage.engines.decode}
            sent, ended, router_sent, router_ended = times
            self._routes.append(len(self._answers))
            self._turns.append(
                oracle.Turn(
                    tenant=ask.talk.tenant,
                    conversation=ask.conversation if ask.told else None,
                    prompt=prompt,
                    answer=ids,
                    decode=got.decode,
                    process=names[got.decode].pod_uid,
                    sent=sent,
                    ended=ended,
                    router_sent=router_sent,
                    router_ended=router_ended,
                )
            )
        return self._keep(
            Answered(
                seed=seed,
                number=step.number,
                kind=step.kind,
                text=got.text,
                right=reference.text,
                status=got.status,
                path=got.path,
                reason=got.reason,
                reused=got.reused,
                had=got.had,
                prefill=got.prefill,
                decode=got.decode,
                prompt_tokens=len(prompt),
            )
        )

    async def _timed(self, ask: Ask, body: Mapping[str, Any]) -> tuple[Got, tuple[float, float, float, float]]:
        sent, router_sent = time.monotonic(), self._arm.clock()
        got = await self._arm.chat(ask, body)
        return got, (sent, time.monotonic(), router_sent, self._arm.clock())

    async def _direct(self, seed: int, step: Step) -> list[Answered]:
        """A step that is sent past the router, under a salt of its own: what it spoils, it spoils for itself."""
        salt = {"cache_salt": uuid.uuid4().hex}
        engines = self._stage.engines
        prefill = engines.prefill[step.choice % len(engines.prefill)]
        decode = engines.decode[step.choice // 2 % len(engines.decode)]
        answers, left = [], []
        params: Mapping[str, Any] = COLD_PREFILL_PARAMS
        for index, ask in enumerate(step.asks):
            body = {**self._body(ask), **salt}
            turned, reference = await asyncio.gather(
                legs.turn(self._session, prefill, decode, body, params), self._right(self._body(ask))
            )
            answers.append(
                self._keep(
                    Answered(
                        seed=seed,
                        number=step.number,
                        kind=step.kind,
                        text=turned.text,
                        right=reference.text,
                        status=turned.status,
                        direct=True,
                        prefill=prefill.name,
                        decode=decode.name,
                        prompt_tokens=len(reference.body["prompt_token_ids"]),
                        engine_said=turned.said,
                    )
                )
            )
            left += [turned.handle] if turned.handle is not None else []
            if index == 0 and turned.handle is not None:
                params = turned.handle if step.forgery is None else legs.forged(turned.handle, step.forgery)
            if index > 0 and turned.said in ("", Outcome.READ):
                # Read, for all that is known: there is nothing left to be released of it.
                left = [each for each in left if each["remote_request_id"] != params.get("remote_request_id")]
        for handle in left:
            await legs.release(self._session, prefill, handle)
        return answers

    async def _right(self, body: Mapping[str, Any]) -> legs.Reply:
        """What the reference answers."""
        alone = {**body, "cache_salt": uuid.uuid4().hex, "return_token_ids": True}
        reply = await legs.post(self._session, self._stage.reference.url, alone)
        assert reply.status == OK, f"the reference answers {reply.status}"
        return reply

    def _body(self, ask: Ask) -> dict[str, Any]:
        bias = {"logit_bias": dict(self._stage.special)} if ask.special and self._stage.special else {}
        return {**ask.body(), **bias}

    def _keep(self, answer: Answered) -> Answered:
        self._answers.append(answer)
        self._answered(answer)
        return answer

    async def _let_expire(self, last: Answered | None) -> None:
        """Wait until the engine has forgotten; where that takes long, the router's clock goes on instead."""
        names = {engine.name: engine for engine in self._stage.engines.decode}
        engine = names.get(last.decode) if last is not None else None
        if engine is None:
            return
        if engine_ttl(engine) < self._stage.router_ttl:
            await asyncio.sleep(engine_ttl(engine) + 1)
        else:
            self._arm.move_on(self._stage.router_ttl)

    async def _restart(self, choice: int) -> None:
        """End an engine and start it again; the router is told, or is not."""
        engines = self._stage.engines.transferring
        engine = engines[choice % len(engines)]
        if engine in self._stage.engines.prefill:
            await self._count(engine)
        self._gone.append(oracle.Gone(engine.pod_uid, time.monotonic()))
        await asyncio.to_thread(engine.restart)
        if engine in self._stage.engines.prefill:
            self._before[engine.name] = await asyncio.to_thread(engine.metrics)
        await self._arm.restarted(engine, told=bool(choice // len(engines) % 2))

    async def _count(self, engine: Engine) -> None:
        counted = await asyncio.to_thread(engine.metrics) - self._before[engine.name]
        self._reads += counted.reads
        self._bytes += counted.bytes_read
