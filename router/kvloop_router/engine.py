"""What is known of one engine, and what a turn or a request is to it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import NamedTuple

from kvloop_connector.settings import Role
from kvloop_router import ranks
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.health import Health
from kvloop_router.load import prompt_tokens
from kvloop_router.policy import Candidate, decode_load
from kvloop_router.request import Request


@dataclass(slots=True)
class Engine:
    """What is known of one engine process.

    load: requests of this router there now. tokens: of the work that they are; see Work. by_rank: requests at each
        data-parallel rank, where the router chose it.
    needed: turns of this router that need it although no request of theirs is there: their decode leg is still to
        come, or reads what their prefill leg left.
    probed: whether a check of its health is on its way. next_check: when the next is due.
    engine_id: as in its last handle, without the rank.
    version, block_size, kv_blocks (of one rank), prefix_caching, max_model_len, models, ranks: None or empty until the
        engine has told.
    leases: whether it releases and renews by name what it retains; None until it was asked.
    """

    spec: EngineSpec
    health: Health = field(default_factory=Health)
    load: int = 0
    tokens: int = 0
    by_rank: dict[int, int] = field(default_factory=dict)
    needed: int = 0
    probed: bool = False
    next_check: float = -inf
    engine_id: str | None = None
    version: str | None = None
    block_size: int | None = None
    kv_blocks: int | None = None
    prefix_caching: bool | None = None
    max_model_len: int | None = None
    models: tuple[str, ...] = ()
    ranks: int = 1
    leases: bool | None = None

    @property
    def healthy(self) -> bool:
        """Whether it answers, though it may be draining."""
        return self.health.healthy

    @property
    def turns(self) -> int:
        """What of this router's would suffer if the engine ended now."""
        return self.load + self.needed

    @property
    def serving(self) -> bool:
        """Whether it gets new turns."""
        return self.healthy and self.spec.ready and not self.spec.draining

    def begins(self, work: Work) -> None:
        """A request has been sent."""
        self.load += 1
        self.tokens += work.tokens
        if work.rank is not None:
            self.by_rank[work.rank] = self.by_rank.get(work.rank, 0) + 1

    def ends(self, work: Work) -> None:
        """It is no longer there."""
        self.load -= 1
        self.tokens -= work.tokens
        if work.rank is not None:
            self.by_rank[work.rank] -= 1

    def rank_loads(self) -> list[int]:
        """Requests at each rank."""
        return [self.by_rank.get(rank, 0) for rank in range(self.ranks)]

    def serves(self, model: str, unnamed: str) -> bool:
        """Whether it has this model. unnamed: the model of engines that discovery names none for."""
        return model in self.models or model == (self.spec.model or unnamed)

    def candidate(self, now: float, most_turns: int | None) -> Candidate:
        """This engine as the policy sees it."""
        spec = self.spec
        work = decode_load(self.turns, self.tokens) if spec.role is Role.DECODE else self.tokens + self.load
        healthy = self.health.healthy
        return Candidate(
            spec.name,
            spec.role,
            spec.process,
            spec.kv_revision,
            work / self.ranks,
            healthy and spec.ready and not spec.draining,
            healthy,
            self.health.suspect(now),
            spec.role is Role.DECODE and most_turns is not None and self.turns >= most_turns,
        )


class Needs:
    """The engines that a turn needs while no request of it is there, counted so that nobody takes them for idle."""

    def __init__(self) -> None:
        self._held: list[Engine] = []
        self._closed = False

    def hold(self, engine: Engine | None) -> None:
        """Count the turn at ``engine``, unless the turn has ended."""
        if engine is not None and not self._closed:
            engine.needed += 1
            self._held.append(engine)

    def only(self, engine: Engine | None) -> None:
        """Count it at ``engine`` and nowhere else."""
        self.let_go()
        self.hold(engine)

    def let_go(self) -> None:
        """Count it nowhere."""
        for engine in self._held:
            engine.needed -= 1
        self._held.clear()

    def close(self) -> None:
        """The turn has ended; what of it still runs holds nothing any more."""
        self.let_go()
        self._closed = True


class Work(NamedTuple):
    """What a request is to an engine.

    tokens: prefill, those to be computed; decode, those of its prompt. rank: which computes it; None: the engine's
    choice. tells: whether its outcome tells anything of this engine: not where it fails with another one.
    """

    tokens: int = 0
    rank: int | None = None
    tells: bool = True


NO_WORK = Work(tells=False)
"""What is no leg: an engine that answers it can fail its legs all the same."""


def decode_work(engine: Engine, request: Request, counted: int | None, home: str, random: Random) -> Work:
    """What a decode leg is to an engine. counted: tokens of its prompt. home: the engine id, with the rank, of what
    holds its conversation; empty where nothing does.
    """
    rank = None
    if engine.ranks > 1:
        holds = engine.engine_id is not None and engine.engine_id == ranks.without(home)
        rank = ranks.choose(engine.rank_loads(), random, ranks.of(home) if holds else None)
    return Work(prompt_tokens(request, counted), rank)
