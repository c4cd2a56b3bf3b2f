"""Engine cores wired to one another without a network, and time that a test sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvloop_sim import transfer
from kvloop_sim.engine import Engine
from kvloop_sim.records import Admission, EngineRequest, EngineSettings, Phase, Sampling, Step
from kvloop_sim.timing import TimingModel
from kvloop_sim.transfer import ConnectorSettings, Policy

BLOCK = 4
TTL = 100.0
LEASE = 30.0
COLD = {"do_remote_decode": True, "do_remote_prefill": False}


def engine(name: str, *, blocks: int = 64, **changes: Any) -> Engine:
    """A core named ``name``; ``changes`` are of the connector where it has such a field, else of the engine."""
    of_connector = {key: changes.pop(key) for key in list(changes) if key in ConnectorSettings.__slots__}
    connector = ConnectorSettings(
        engine_id=name,
        role="kv_both",
        bidirectional=True,
        recompute_threshold=0,
        decoder_ttl=TTL,
        lease=LEASE,
        policy=Policy.FAIL,
    )
    settings = EngineSettings(
        model="m",
        block_size=BLOCK,
        num_blocks=blocks + 1,
        timing=TimingModel(scale=0),
        connector=replace(connector, **of_connector),
    )
    return Engine(replace(settings, **changes))


@dataclass(slots=True)
class Answer:
    """What one request gave. ``tokens``: prompt and answer."""

    prompt: list[int]
    steps: list[Step]

    @property
    def generated(self) -> list[int]:
        return [step.token for step in self.steps]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def handle(self) -> dict[str, Any]:
        handle = self.steps[-1].handle
        assert handle is not None
        return handle


@dataclass(slots=True)
class Cores:
    """Cores that read from one another by engine id; ``now`` is everybody's clock."""

    by_id: dict[str, Engine]
    now: float = 0.0
    number: int = 0
    lose_notifications: bool = False
    declined: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, *engines: Engine) -> Cores:
        made = {}
        for core in engines:
            assert core.settings.connector is not None
            made[core.settings.connector.engine_id] = core
        return cls(made)

    def submit(
        self, on: Engine, prompt: Sequence[int], params: dict[str, Any] | None = None, **sampling: Any
    ) -> EngineRequest:
        self.number += 1
        salt = sampling.pop("salt", "")
        chosen = Sampling(**{"max_tokens": 6, "ignore_eos": True, **sampling})
        return on.submit(f"request-{self.number}", prompt, chosen, params=params, salt=salt)

    def run(self, on: Engine, prompt: Sequence[int], params: dict[str, Any] | None = None, **sampling: Any) -> Answer:
        """One request from beginning to end."""
        request = self.submit(on, prompt, params, **sampling)
        for admission in on.schedule(self.now):
            self.carry(on, admission)
        assert request.phase is Phase.RUNNING, request.phase
        return Answer(list(prompt), self.steps(on, request))

    def carry(self, on: Engine, admission: Admission) -> None:
        """Do what an admission asks for."""
        location = admission.read_from
        if admission.notify is not None:
            self.notify(admission.notify)
        if location is None:
            return
        connector = on.settings.connector
        assert connector is not None
        if transfer.is_declined(location, peer_clock_ahead=0.0, now=self.now, settings=connector):
            self.declined.append(location.request_id)
            on.load_failed(admission.request)
            return
        contents = self.by_id[location.engine_id].serve_read(location.request_id, admission.read, self.now)
        on.loaded(admission.request, contents)
        self.notify(location)

    def notify(self, location: transfer.Location) -> None:
        if not self.lose_notifications:
            self.by_id[location.engine_id].notified(location.request_id, self.now)

    def steps(self, on: Engine, request: EngineRequest) -> list[Step]:
        on.begin_prefill(request, self.now)
        steps: list[Step] = []
        while not steps or steps[-1].finish is None:
            step = on.step(request, self.now)
            assert step is not None
            steps.append(step)
        return steps

    def turn(
        self, prefill: Engine, decode: Engine, prompt: Sequence[int], handle: dict[str, Any] | None = None, **more: Any
    ) -> Answer:
        """A prefill leg, then a decode leg."""
        leg = self.run(prefill, prompt, handle or COLD, **{**more, "max_tokens": 1, "min_tokens": 0})
        return self.run(decode, prompt, leg.handle, **more)


def trimmed(handle: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The handle cut to ``tokens`` tokens, in whole blocks."""
    blocks = tokens // BLOCK
    return {
        **handle,
        "remote_num_tokens": blocks * BLOCK,
        "remote_block_ids": [handle["remote_block_ids"][0][:blocks]],
    }
