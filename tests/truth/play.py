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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp

from kvloop_connector.handle import COLD_PREFILL_PARAMS
from kvloop_connector.settings import Connector
from kvloop_connector.verdict import Outcome
from tests.harness.engines import Engine, Engines
from tests.harness.metrics import EngineMetrics
from tests.integration.router_process import RouterUnderTest, routing, until
from tests.truth import legs, oracle
from tests.truth.judge import OK, Answered, Tally, judge
from tests.truth.stage import Stage, engine_ttl
from tests.truth.turns import Ask, Kind, Step, Talk, deal, draw, follow

API_KEYS: Final = ("key-of-one-tenant", "key-of-another-tenant")
ROUTER_SECONDS: Final = 60.0
"""How long a router may take to see an engine that was started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """An answer that came through a router, as `Answered` and the oracle want to know it."""

    status: int
    text: str
    path: str = ""
    reason: str = ""
    reused: int = 0
    prefill: str = ""
    decode: str = ""


class Arm(Protocol):
    """A router under test."""

    async def chat(self, ask: Ask, body: Mapping[str, Any]) -> Got:
        """The answer to a turn."""
        ...

    def clock(self) -> float:
        """The router's clock, in seconds."""
        ...

    def move_on(self, seconds: float) -> None:
        """Put that clock forward."""
        ...

    async def restarted(self, engine: Engine, *, told: bool) -> None:
        """An engine is there again; ``told``: whether the router learns that it is another process."""
        ...


@asynccontextmanager
async def kvloops_router(directory: Path, stage: Stage) -> AsyncIterator[Arm]:
    """kvloop's own router: with KvloopConnector prefill proves what is reused, else the router does."""
    keys = directory / "api-keys"
    keys.write_text("\n".join(API_KEYS))
    settings = stage.engines.decode[0].spec.settings
    connector = Connector.KVLOOP if stage.engines.kind.verifies else Connector.NIXL
    async with routing(
        directory,
        stage.engines.as_discovery_file(),
        handleTtlSeconds=stage.router_ttl,
        kvTransfer={
            "connector": connector.value,
            "kvRecomputeThreshold": settings.kv_recompute_threshold,
            "decoderKvBlocksTtlSeconds": settings.decoder_kv_blocks_ttl,
        },
        apiKeysFile=str(keys),
    ) as router:
        yield _KvloopsRouter(router, stage.engines)


class _KvloopsRouter:
    def __init__(self, router: RouterUnderTest, engines: Engines) -> None:
        self._router = router
        self._engines = engines
        self._entries = {entry["name"]: entry for entry in engines.as_discovery_file()}

    async def chat(self, ask: Ask, body: Mapping[str, Any]) -> Got:
        told = {"conversation_id": ask.conversation} if ask.told else {}
        sent = {**body, "stream": ask.stream, **told}
        headers = {"Authorization": f"Bearer {API_KEYS[ask.talk.tenant]}"}
        got = await legs.post(self._router.session, self._router.url, sent, headers)
        return Got(
            status=got.status,
            text=got.text,
            path=got.headers.get("X-Kvloop-Path", ""),
            reason=got.headers.get("X-Kvloop-Reason", ""),
            reused=int(got.headers.get("X-Kvloop-Reused-Tokens", "0")),
            prefill=got.headers.get("X-Kvloop-Prefill", ""),
            decode=got.headers.get("X-Kvloop-Decode", ""),
        )

    def clock(self) -> float:
        return self._router.clock()

    def move_on(self, seconds: float) -> None:
        self._router.clock.ahead += seconds

    async def restarted(self, engine: Engine, *, told: bool) -> None:
        if told:
            self._entries[engine.name] = {**self._entries[engine.name], "podUID": engine.pod_uid}
            self._router.list_engines(list(self._entries.values()))
        assert self._router.router is not None
        known = self._router.router.engines

        def there() -> bool:
            found = {each.spec.name: each for each in known if each.healthy}
            current = self._entries[engine.name]["podUID"]
            return len(found) == len(self._entries) and found[engine.name].spec.pod_uid == current

        await until(there, seconds=ROUTER_SECONDS)


@asynccontextmanager
async def naive_router(directory: Path, stage: Stage) -> AsyncIterator[Arm]:
    """A router that compares nothing."""
    async with _session() as session:
        router = legs.NaiveRouter(session, stage.engines.prefill, stage.engines.decode)
        yield _Naive(router, salt=uuid.uuid4().hex)
        await router.close()


class _Naive:
    """salt: for every turn, so that what it spoils is spoilt for its own turns only."""

    def __init__(self, router: legs.NaiveRouter, salt: str) -> None:
        self._router = router
        self._salt = salt

    async def chat(self, ask: Ask, body: Mapping[str, Any]) -> Got:
        turned, prefill, decode = await self._router.chat(ask, {**body, "cache_salt": self._salt})
        return Got(status=turned.status, text=turned.text, prefill=prefill.name, decode=decode.name)

    def clock(self) -> float:
        return time.monotonic()

    def move_on(self, seconds: float) -> None:
        pass

    async def restarted(self, engine: Engine, *, told: bool) -> None:
        pass


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
    async with _session() as session:
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


def _session() -> aiohttp.ClientSession:
    # Engines end and start again on the same address: no connection outlives its request.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=180)
    )
