"""Engines and conversations in simulated time, for ``bench.paths``. Nothing of it is a measurement of an engine.

A prefill engine computes one leg after the other, in the order in which what they read has arrived; a decode engine
computes local turns likewise, and meanwhile none of its running answers goes on. How long things take says the
simulator's timing model (``kvloop_sim.timing``), each time a little more or less. The router's side is the real one:
``kvloop_router.paths`` learns of legs, at their end, what it would learn in a router.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import exp
from random import Random

from kvloop_router.cost_model import Work
from kvloop_router.path_choice import Path, Sizes, Terms, local_work, warm_work
from kvloop_router.paths import Paths, Watch
from kvloop_sim.timing import TimingModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations on engines. Token counts are (median, spread of the logarithm); pauses in seconds.

    network: the published link's speed, times this. retains: whether a local turn leaves a handle (KvloopConnector).
    """

    name: str
    conversations: int
    beginning: tuple[int, float]
    suffix: tuple[int, float]
    answer: tuple[int, float]
    pause: float
    prefills: int = 1
    decodes: int = 1
    network: float = 1.0
    retains: bool = True
    turns: int = 16
    noise: float = 0.1


@dataclass(slots=True)
class Conversation:
    """held: tokens that decode retains for its handle. cached: those in decode's own prefix cache."""

    home: int
    history: int
    held: int = 0
    cached: int = 0
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Played:
    """A turn: seconds until its first token, and those for which it held up others' answers, summed over these."""

    path: Path
    first_token: float
    held_up: float


@dataclass(slots=True)
class Answer:
    """A running answer, and when it ends."""

    ends: float


@dataclass(slots=True)
class Decode:
    free: float = 0.0
    running: list[Answer] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Turn:
    """A turn that has arrived. noise: factors of its reading, its computing, its computing at decode."""

    conversation: Conversation
    arrived: float
    suffix: int
    answer: int
    noise: tuple[float, float, float]

    @property
    def prompt(self) -> int:
        return self.conversation.history + self.suffix

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.prompt, self.conversation.held, self.answer)


Chooser = Callable[["World", Turn], Path]


class World:
    """One run of a workload, with one way to choose paths."""

    def __init__(self, workload: Workload, choose: Chooser, seed: int) -> None:
        self.workload = workload
        self.now = 0.0
        self.played: list[Played] = []
        self.timing = TimingModel(transfer_bytes_per_second=54e9 * workload.network)
        self.paths = Paths(Terms(retains=workload.retains), lambda: self.now)
        self.prefill_free = [0.0] * workload.prefills
        self.decode = [Decode() for _ in range(workload.decodes)]
        self._choose = choose
        self._random = Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def run(self) -> list[Played]:
        """All turns of all conversations."""
        for number in range(self.workload.conversations):
            conversation = Conversation(number % self.workload.decodes, self._drawn(self.workload.beginning))
            # Its own chance, so that every way to choose meets the same turns.
            chance = Random(self._random.random())
            self._at(chance.random() * self.workload.pause * 2, self._arrival(conversation, chance))
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.played

    def compute(self, work: Work) -> float:
        """Seconds, without noise."""
        return self.timing.prefill_seconds(work.uncached, work.context)

    def read(self, tokens: int) -> float:
        """Seconds, without noise."""
        return self.timing.transfer_seconds(tokens)

    def prefill_of(self, turn: Turn) -> int:
        """The prefill engine with the least to do."""
        return min(range(self.workload.prefills), key=lambda index: max(self.now, self.prefill_free[index]))

    def running(self, home: int) -> int:
        """Answers that a decode engine is giving."""
        decode = self.decode[home]
        decode.running = [answer for answer in decode.running if answer.ends > self.now]
        return len(decode.running)

    def _arrival(self, conversation: Conversation, chance: Random) -> Callable[[], None]:
        def arrive() -> None:
            noise = [exp(chance.gauss(0, self.workload.noise)) for _ in range(3)]
            turn = Turn(
                conversation=conversation,
                arrived=self.now,
                suffix=_drawn(self.workload.suffix, chance),
                answer=_drawn(self.workload.answer, chance),
                noise=(noise[0], noise[1], noise[2]),
            )
            path = self._choose(self, turn)
            pause = chance.expovariate(1 / self.workload.pause)
            if path is Path.LOCAL:
                self._alone(turn, pause, chance)
            else:
                self._through_prefill(turn, path, pause, chance)

        return arrive

    def _through_prefill(self, turn: Turn, path: Path, pause: float, chance: Random) -> None:
        index = self.prefill_of(turn)
        work = warm_work(turn.sizes) if path is Path.WARM else Work(turn.prompt)
        watch = self.paths.prefill_leg(f"p{index}", work)
        reading = self.read(work.pulled) * turn.noise[0] if work.pulled else 0.0

        def ready() -> None:
            begins = max(self.now, self.prefill_free[index])
            self.prefill_free[index] = begins + self.compute(work) * turn.noise[1]
            self._at(self.prefill_free[index], computed)

        def computed() -> None:
            watch.first_token()
            conversation = turn.conversation
            missing = max(1, turn.prompt - conversation.cached)
            leg = self.paths.decode_leg(f"d{conversation.home}", Work(0, pulled=missing), like=f"p{index}")
            decode = self.decode[conversation.home]
            first = max(self.now + self.read(missing) * turn.noise[0], decode.free)
            first += self.timing.decode_seconds(len(decode.running) + 1, turn.prompt)
            self._at(first, lambda: self._answer(turn, path, 0.0, leg, pause, chance))

        self._at(self.now + reading, ready)

    def _alone(self, turn: Turn, pause: float, chance: Random) -> None:
        conversation = turn.conversation
        decode, running = self.decode[conversation.home], self.running(conversation.home)
        watch = self.paths.decode_leg(f"d{conversation.home}", local_work(turn.sizes), like="p0")
        true = Work(max(1, turn.prompt - conversation.cached), context=conversation.cached)
        seconds = self.compute(true) * turn.noise[2]
        decode.free = max(self.now, decode.free) + seconds
        for answer in decode.running:
            answer.ends += seconds
        self._at(decode.free, lambda: self._answer(turn, Path.LOCAL, running * seconds, watch, pause, chance))

    def _answer(self, turn: Turn, path: Path, held_up: float, watch: Watch, pause: float, chance: Random) -> None:
        watch.first_token()
        self.played.append(Played(path, self.now - turn.arrived, held_up))
        conversation = turn.conversation
        running = self.running(conversation.home)
        whole = turn.prompt + turn.answer
        answer = Answer(self.now + turn.answer * self.timing.decode_seconds(running + 1, whole))
        self.decode[conversation.home].running.append(answer)

        def ended() -> None:
            if answer.ends > self.now:
                # It was held up meanwhile.
                self._at(answer.ends, ended)
                return
            conversation.history = conversation.cached = whole
            if path is not Path.LOCAL or self.workload.retains:
                conversation.held = whole - 1
            conversation.turns += 1
            if conversation.turns < self.workload.turns:
                self._at(self.now + pause, self._arrival(conversation, chance))

        self._at(answer.ends, ended)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _drawn(self, of: tuple[int, float]) -> int:
        return _drawn(of, self._random)


def fixed(path: Path) -> Chooser:
    """This path, wherever a handle is there."""

    def choose(world: World, turn: Turn) -> Path:
        return path if turn.conversation.held else Path.COLD

    return choose


def learned(world: World, turn: Turn) -> Path:
    """What the router does by itself."""
    home = turn.conversation.home
    if not turn.conversation.held:
        return Path.COLD
    place = world.paths.place(
        f"p{world.prefill_of(turn)}", f"d{home}", running=world.running(home), holds=True, can_serve_alone=True
    )
    chosen, _ = world.paths.choose(turn.sizes, [place])
    return chosen.path


def oracle(world: World, turn: Turn) -> Path:
    """Whatever costs least, knowing what everything that is there will take; not what is still to come."""
    conversation = turn.conversation
    if not conversation.held:
        return Path.COLD
    reading, computing, alone = turn.noise
    decode = world.decode[conversation.home]
    busy = max(0.0, world.prefill_free[world.prefill_of(turn)] - world.now)
    missing = world.read(max(1, turn.prompt - conversation.cached)) * reading
    step = world.timing.decode_seconds(world.running(conversation.home) + 1, turn.prompt)

    def through_prefill(work: Work) -> float:
        ready = max(busy, world.read(work.pulled) * reading if work.pulled else 0.0)
        computed = ready + world.compute(work) * computing
        return max(computed + missing, decode.free - world.now) + step

    true = Work(max(1, turn.prompt - conversation.cached), context=conversation.cached)
    seconds = world.compute(true) * alone
    costs = {
        Path.COLD: through_prefill(Work(turn.prompt)),
        Path.WARM: through_prefill(warm_work(turn.sizes)),
        Path.LOCAL: max(0.0, decode.free - world.now) + seconds * (1 + world.running(conversation.home)),
    }
    if not world.workload.retains:
        again = Work(turn.prompt + turn.answer - conversation.held, context=conversation.held)
        costs[Path.LOCAL] += world.compute(again)
    return min(costs, key=lambda path: costs[path])


def _drawn(of: tuple[int, float], chance: Random) -> int:
    median, spread = of
    return max(1, round(median * exp(chance.gauss(0, spread))))
