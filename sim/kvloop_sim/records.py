"""The records of the engine core: its settings, its requests, what is retained, what is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvloop_connector.lifecycle import Lease
from kvloop_sim.blocks import BlockNames
from kvloop_sim.generation import Style
from kvloop_sim.timing import TimingModel
from kvloop_sim.transfer import ConnectorSettings, Location, Plan, Start


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is started with.

    logprob_noise: by how much log-probabilities are off at most, each time otherwise; nats.
    overshoot: how many tokens more than computed an answer that ends by a token claims, as asynchronous scheduling
    (1) and speculative decoding (more) do.
    connector: None without ``--kv-transfer-config``.
    """

    model: str
    block_size: int = 16
    num_blocks: int = 16384
    max_num_seqs: int = 256
    prefix_caching: bool = True
    logprob_noise: float = 0.0
    overshoot: int = 0
    style: Style = field(default_factory=Style)
    timing: TimingModel = field(default_factory=TimingModel)
    connector: ConnectorSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """When an answer ends, and what it may read. ``logprobs``: whether its tokens' probabilities are wanted."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_cache: bool = False
    child: int = 0
    logprobs: bool = False


class Phase(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    HUNG = "hung"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request inside the engine. Changed by Engine only.

    tokens: prompt and answer so far. seed: what the KV of the first of them is computed upon.
    computed: how many of them have KV in ``blocks``. attention: the state after
    attending to the first ``attended`` of those. published: how many of ``blocks`` the prefix cache knows.
    transferred: whether the connector has had its one look at ``params``.
    """

    request_id: str
    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    params: dict[str, Any] | None
    names: BlockNames
    seed: int
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    local_tokens: int = 0
    external_tokens: int = 0
    plan: Plan = field(default_factory=lambda: Plan(Start.COMPUTE, tracked=False))
    preemptions: int = 0
    transferred: bool = False
    aborted: bool = False
    attention: int = 0
    attended: int = 0
    published: int = 0

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Admission:
    """A request was given blocks. ``read``: the remote blocks to load; ``notify``: whom to tell to free."""

    request: EngineRequest
    read: tuple[int, ...] = ()
    read_from: Location | None = None
    notify: Location | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token. ``finish`` is vLLM's reason; ``handle`` comes with the last token, if any.

    likely: log-probabilities, the likeliest token first; empty where they were not asked for.
    """

    token: int
    finish: str | None = None
    stop_token: int | None = None
    handle: dict[str, Any] | None = None
    likely: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Retained:
    """Blocks of a finished request that wait for a reader. ``lease`` is None where no timer was ever started."""

    request_id: str
    blocks: list[int]
    tokens: int
    kind: str
    lease: Lease | None


@dataclass(slots=True)
class Counters:
    """What the engine counts; names follow vLLM's metrics."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    local_compute: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    kv_expired: int = 0
    notifications_after_expiry: int = 0
    failed_transfers: int = 0
    failed_notifications: int = 0
    reads_not_granted: int = 0
    released_while_read: int = 0
    finished: dict[str, int] = field(default_factory=dict)
