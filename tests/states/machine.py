"""The stateful property test: a house, random steps, and what has to hold after each of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Any, ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvloop_connector.settings import READ_MARGIN_SECONDS, Role
from kvloop_router.pairs import Templates
from tests.states.cold import Cold, cold
from tests.states.engines import BLOCK_SIZE, MODEL, THRESHOLD, TTL_SECONDS, Kind as EngineKind, LocalEngine
from tests.states.house import API_KEYS, ROUTER_TTL_SECONDS, Hosted, Reply, nothing_left
from tests.states.steps import KINDS, TWISTS, Request, Twist, request, twisted
from tests.states.virtual_time import VirtualTimeLoop
from tests.truth import oracle
from tests.truth.turns import Kind, Talk, draw, follow

SEEDS: Final = st.integers(0, 2**16)
PLANS: Final = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(TWISTS)), min_size=1, max_size=3)


class Event(StrEnum):
    """What happens beside turns."""

    NONE = "none"
    WAIT = "wait"
    EXPIRE = "expire"
    RESTART = "restart"
    DRAIN = "drain"
    END = "end"
    """A client ends its conversation."""


EVENTS: Final = (
    *(24 * (Event.NONE,)),
    *(3 * (Event.WAIT,)),
    Event.EXPIRE,
    *(2 * (Event.RESTART,)),
    *(2 * (Event.DRAIN,)),
    Event.END,
)


@dataclass(slots=True)
class Tally:
    """Sums over all examples. faults: what was found to be wrong, where it was found.

    templates: what their routers know of the engines' tokenizers, learnt once, as by one that runs for long.
    failed: turns without an answer, while an engine was restarted. left: turns whose client left.
    reused, reusable: tokens, by the router's word and by the oracle's. had: of these, what an engine that got a handle
    had itself, all but fewer than the threshold, so that it pulled nothing. lost: tokens that only the oracle reused.
    """

    examples: int = 0
    faults: list[Exception] = field(default_factory=list)
    templates: Templates = field(default_factory=Templates)
    turns: int = 0
    steps: int = 0
    failed: int = 0
    left: int = 0
    warm: int = 0
    reused: int = 0
    had: int = 0
    reusable: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    twists: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Of what the oracle could reuse."""
        return (self.reused + self.had) / self.reusable if self.reusable else 1.0


@dataclass(slots=True)
class _Played:
    request: Request
    reply: Reply
    cold: Cold
    kind: Kind
    twist: Twist


class RouterStates(RuleBasedStateMachine):
    """Of one kind of engines; see ``machine``."""

    engines: ClassVar[EngineKind]
    tally: ClassVar[Tally]

    def __init__(self) -> None:
        super().__init__()
        self._loop = VirtualTimeLoop()
        asyncio.set_event_loop(self._loop)
        self._left = nothing_left(self._loop)
        self._left.__enter__()
        self._hosted = Hosted(self._loop, self.engines, seed=1, decodes=2, templates=self.tally.templates)
        self._house = self._hosted.house
        self._network = self._house.network
        self._talks: dict[int, Talk] = {}
        self._number = 0
        self._asks = 0
        self._draining: LocalEngine | None = None
        self._unnoticed: dict[str, list[str]] = {}
        self._turns: list[oracle.Turn] = []
        self._gone: dict[int, float] = {}
        self._running: set[int] = set()
        self._doubtful: list[tuple[int, str, float]] = []
        self._had: dict[int, int] = {}
        self._played: list[_Played | None] = []
        self._scopes: dict[tuple[int, str, str], int] = {}
        self.tally.examples += 1

    @rule(plan=PLANS, event=st.sampled_from(EVENTS), seed=SEEDS)
    def step(self, plan: list[tuple[Kind, Twist]], event: Event, seed: int) -> None:
        """One to three conversations go on at the same time, while something happens."""
        self.tally.events[event.value] += 1
        with self._telling():
            self._loop.run_until_complete(self._happen(event, plan, seed))
            self._check()

    def teardown(self) -> None:
        """All of it ends; what is wrong by then is found even where no step failed."""
        with self._telling():
            try:
                self._loop.run_until_complete(self._finish())
                self._check()
            finally:
                self._hosted.close()
                self._left.__exit__(None, None, None)
                self._loop.close()
                asyncio.set_event_loop(None)
        self._count()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What is found stays known, even if the same steps do not show it once more."""
        try:
            yield
        except (AssertionError, ExceptionGroup) as fault:
            self.tally.faults.append(fault)
            raise

    async def _happen(self, event: Event, plan: Sequence[tuple[Kind, Twist]], seed: int) -> None:
        chance = Random(seed)
        waits = {Event.NONE: 0.0, Event.WAIT: chance.choice([1.2, 6.0, 20.0]), Event.EXPIRE: ROUTER_TTL_SECONDS + 1.0}
        if event in waits:
            await asyncio.sleep(waits[event])
            await self._ask(plan, seed, excused=False)
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask(plan, seed, excused=event is Event.RESTART))
            await asyncio.sleep(chance.choice([0.0, 0.02, 0.06, 0.1, 0.15, 1.0]))
            match event:
                case Event.RESTART:
                    await self._restart(chance)
                case Event.DRAIN:
                    await self._drain(chance)
                case Event.END:
                    await self._end(chance)

    async def _restart(self, chance: Random) -> None:
        engine, told = chance.choice((*self._house.engines, *self._house.decode)), chance.random() < 0.4
        now, gone = self._loop.time(), engine.engine_id
        self._forget(lambda turn: bool(turn.answer) and turn.decode == engine.name)
        self._doubtful += [(index, engine.name, now) for index in self._running]
        self._had |= engine.engine.had if engine.role is Role.PREFILL else {}
        await self._house.restart(engine, told=told)
        if not told:
            self._unnoticed.setdefault(engine.name, []).append(gone)

    async def _drain(self, chance: Random) -> None:
        if self._draining is not None:
            await self._house.drain(self._draining, draining=False)
            self._draining = None
        else:
            self._draining = chance.choice(self._house.engines)
            await self._house.drain(self._draining, draining=True)

    async def _end(self, chance: Random) -> None:
        if not self._talks:
            return
        talk = self._talks[chance.choice(sorted(self._talks))]
        # Of turns that run, what they leave in the end is given up too.
        self._forget(lambda turn: turn.conversation == talk.name and turn.tenant in self._scopes_of(talk.tenant))
        await self._house.delete(talk.name, {"Authorization": f"Bearer {API_KEYS[talk.tenant]}"})

    async def _ask(self, plan: Sequence[tuple[Kind, Twist]], seed: int, *, excused: bool) -> None:
        chance = Random(seed)
        steps, sent = [], []
        for index, (kind, twist) in enumerate(plan):
            step, _ = draw(seed + index, self._number, (kind,), self._talks)
            self._number += 1
            asks = tuple(twisted(ask, twist, chance) for ask in step.asks)
            steps.append((step, asks))
            for ask in asks:
                sent.append((step.kind, twist, request(ask, twist, chance, model=MODEL)))
            self.tally.kinds[step.kind.value] += 1
            self.tally.twists[twist.value] += 1
        played = await asyncio.gather(*(self._turn(*each, excused=excused) for each in sent))
        answers = iter(played)
        for step, asks in steps:
            texts = [next(answers).cold.texts[0] for _ in asks]
            self._talks = follow(replace(step, asks=asks), self._talks, texts)
        for each in played:
            decode = each.reply.headers.get("X-Kvloop-Decode", "")
            if each.reply.status == 200 and each.cold.retained and not each.request.several:
                self._network.known_to_be_gone.update(self._unnoticed.pop(decode, ()))
        self.tally.turns += len(played)
        self.tally.steps += len(steps)

    async def _turn(self, kind: Kind, twist: Twist, sent: Request, *, excused: bool) -> _Played:
        number, self._asks = self._asks, self._asks + 1
        talk, model = sent.ask.talk, str(sent.body["model"])
        self._network.scope_of[number] = (talk.tenant, model)
        headers = {"Authorization": f"Bearer {API_KEYS[talk.tenant]}", "X-Request-Id": f"ask-{number}"}
        right = cold(_for_engines(sent.body), self._house.engines[0].options, chat=sent.chat)
        index = len(self._turns)
        began = self._loop.time()
        # In the order of sending, which is the oracle's too.
        self._turns.append(self._oracles(sent, right, (), "", began, began))
        self._played.append(None)
        self._running.add(index)
        reply = await self._house.ask(sent.path, sent.body, headers, sent.leaves)
        self._running.discard(index)
        played = _Played(sent, reply, right, kind, twist)
        if reply.status == 200:
            assert reply.texts == right.texts, f"wrong: {reply.texts} instead of {right.texts} to {sent.body}"
            assert "remote_block_ids" not in reply.raw, reply.raw
            answer = right.answers[0][0] if right.retained else ()
            decode = reply.headers.get("X-Kvloop-Decode", "")
            self._turns[index] = self._oracles(sent, right, answer, decode, began, self._loop.time())
            self._played[index] = played
        elif reply.status == 0:
            self.tally.left += 1
        else:
            assert excused, f"{reply.status}: {reply.raw} to {sent.body}"
            self.tally.failed += 1
        return played

    def _oracles(
        self, sent: Request, right: Cold, answer: Sequence[int], decode: str, began: float, ended: float
    ) -> oracle.Turn:
        ask = sent.ask
        # Several answers leave no handle. What ids do not tell of, as of media, only an engine can prove.
        silent = sent.several or (sent.media and not self.engines.verifying)
        scope = self._scopes.setdefault((ask.talk.tenant, str(sent.body["model"]), sent.path), len(self._scopes))
        return oracle.Turn(
            tenant=scope,
            conversation=ask.conversation if ask.told else None,
            prompt=() if silent else right.prompt,
            answer=() if silent else answer,
            decode=decode,
            process="",
            sent=began,
            ended=ended,
            router_sent=began,
            router_ended=ended,
        )

    def _forget(self, which: Any) -> None:
        """The oracle may not reuse these any more."""
        now = self._loop.time()
        for index, turn in enumerate(self._turns):
            if which(turn):
                self._gone.setdefault(index, now)

    def _scopes_of(self, tenant: int) -> set[int]:
        return {number for (of, _, _), number in self._scopes.items() if of == tenant}

    def _check(self) -> None:
        self._loop.run_until_complete(self._house.quiet())
        faults = [*self._house.faults()]
        assert not faults, "\n".join(faults)

    async def _finish(self) -> None:
        await self._house.settle()
        unknown = [each async for each in self._house.unknown_retained()]
        assert not unknown, "\n".join(unknown)
        await asyncio.sleep(TTL_SECONDS + 1)
        await self._house.settle()

    def _count(self) -> None:
        rules = oracle.Rules(
            block_size=BLOCK_SIZE,
            threshold=THRESHOLD,
            router_ttl=ROUTER_TTL_SECONDS,
            engine_ttl={engine.name: TTL_SECONDS - READ_MARGIN_SECONDS for engine in self._house.decode},
            ids_believed=False,
        )
        for index, decode, at in self._doubtful:
            if self._turns[index].decode == decode:
                self._gone.setdefault(index, at)
        for engine in self._house.engines:
            self._had |= engine.engine.had if engine.role is Role.PREFILL else {}
        # Each turn has a process of its own: what it leaves ends by itself.
        turns = [replace(turn, process=str(index)) for index, turn in enumerate(self._turns)]
        gone = [oracle.Gone(str(index), at) for index, at in self._gone.items()]
        most = oracle.reusable(turns, gone, rules)
        for index, (played, best) in enumerate(zip(self._played, most, strict=True)):
            if played is None:
                continue
            reply, reused = played.reply, played.reply.reused
            reason = reply.headers.get("X-Kvloop-Reason", "")
            self.tally.warm += reply.headers.get("X-Kvloop-Path") == "warm"
            self.tally.reused += reused
            self.tally.reusable += best
            self.tally.reasons[reason or "warm"] += 1
            had = min(best, self._had.get(index, 0)) if reason == "below_threshold" else 0
            self.tally.had += had
            if best > reused + had:
                self.tally.lost[f"{reason or 'warm'}/{played.kind.value}/{played.twist.value}"] += best - reused - had


def machine(kind: EngineKind, tally: Tally) -> type[RouterStates]:
    """The test for one kind of engines, whose sums go into ``tally``."""
    return type("RouterStates", (RouterStates,), {"engines": kind, "tally": tally})


def _for_engines(body: Any) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "conversation_id"}
