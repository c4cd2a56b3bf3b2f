"""The engine core: requests, their blocks, and what is retained for other engines.

A state machine over a block pool. Time comes in as ``now`` (seconds on the engine's own clock); what takes time is
returned to the caller: how long to wait, what to read from whom, whom to notify.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from kvloop_connector.lifecycle import Effect, Event, Lease, State, transition
from kvloop_sim import computing, generation, tokenizer, transfer
from kvloop_sim.blocks import BlockNames, BlockPool, OutOfBlocks
from kvloop_sim.computing import blocks_of
from kvloop_sim.records import (
    Admission,
    Counters,
    EngineRequest,
    EngineSettings,
    Phase,
    Retained,
    Sampling,
    Step,
)
from kvloop_sim.transfer import ConnectorSettings, EngineFatal, Location, Start


class Engine:
    """One engine core. Not safe for threads."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.num_blocks, settings.block_size)
        self.counters = Counters()
        self.waiting: deque[EngineRequest] = deque()
        self.loading: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.hung: list[EngineRequest] = []
        self.retained: dict[str, Retained] = {}
        self.leaked_blocks = 0
        self.draining = False
        self.dead: str | None = None
        self._compute_free_at = 0.0
        self._random = Random(settings.model)  # noqa: S311  it is only to look like noise

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        params: Mapping[str, Any] | None = None,
        salt: str = "",
        adapter: str = "",
    ) -> EngineRequest:
        """Enter a request into the queue; raises EngineFatal if the engine is dead."""
        self._alive()
        names = BlockNames(self.settings.block_size, salt, adapter)
        own = dict(params) if params and self.settings.connector else None
        seed = generation.kv_seed(self.settings.model + adapter)
        request = EngineRequest(request_id, list(prompt), len(prompt), sampling, own, names, seed)
        self.waiting.append(request)
        return request

    def schedule(self, now: float) -> list[Admission]:
        """Give blocks to waiting requests, first come first served, while they last."""
        self._alive()
        self.expire(now)
        admitted: list[Admission] = []
        while self.waiting and len(self.running) + len(self.loading) < self.settings.max_num_seqs:
            admission = self._admit(self.waiting[0])
            if admission is None:
                break
            self.waiting.popleft()
            admitted.append(admission)
        return admitted

    def loaded(self, request: EngineRequest, contents: Sequence[Sequence[int]]) -> None:
        """A read ended: put the contents into the request's blocks, under the names of its own tokens."""
        self.loading.remove(request)
        first = request.local_tokens // self.settings.block_size
        for block, values in zip(request.blocks[first:], contents, strict=False):
            self.pool.load(block, values)
        request.computed = request.local_tokens + request.external_tokens
        if request.aborted:
            self._end(request, "abort")
            return
        self._publish(request)
        request.phase = Phase.RUNNING
        self.running.append(request)

    def load_failed(self, request: EngineRequest) -> bool:
        """A read failed: whether the request goes on. Where it hangs, as a prefill with ``recompute`` does, it does."""
        connector = self._connector()
        self.loading.remove(request)
        if request.aborted:
            self._end(request, "abort")
            return False
        if connector.policy is transfer.Policy.FAIL:
            self._end(request, "error")
            return False
        if (request.params or {}).get("do_remote_decode"):
            request.phase = Phase.HUNG
            self.hung.append(request)
            return True
        request.external_tokens = 0
        request.computed = request.local_tokens
        request.phase = Phase.RUNNING
        self.running.append(request)
        return True

    def begin_prefill(self, request: EngineRequest, now: float) -> float:
        """When the request's first token is there, if its prefill is queued now. Prefills share one accelerator."""
        # At least the last token is computed anew, whatever was loaded.
        request.computed = min(request.computed, len(request.tokens) - 1)
        seconds = self.settings.timing.prefill_seconds(len(request.tokens) - request.computed, request.computed)
        start = max(now, self._compute_free_at)
        self._compute_free_at = start + seconds
        return self._compute_free_at

    def step(self, request: EngineRequest, now: float) -> Step | None:
        """Compute what is missing and sample one token; None where the request was preempted for want of a block."""
        self._alive()
        if not self._compute(request):
            return None
        sampling = request.sampling
        token = generation.next_token(
            request.attention,
            position=request.generated,
            after=request.tokens[-1],
            may_end=request.generated >= sampling.min_tokens and not sampling.ignore_eos,
            style=self.settings.style,
            child=sampling.child,
        )
        likely = self._likely(request.attention, token) if sampling.logprobs else ()
        request.tokens.append(token)
        self.counters.generation_tokens += 1
        ended = request.generated > sampling.min_tokens
        if ended and token in sampling.stop_token_ids:
            return Step(token, "stop", token, self._finish(request, "stop", now), likely)
        if ended and token == tokenizer.MESSAGE_END and not sampling.ignore_eos:
            return Step(token, "stop", None, self._finish(request, "stop", now), likely)
        if request.generated >= sampling.max_tokens:
            return Step(token, "length", None, self._finish(request, "length", now), likely)
        return Step(token, likely=likely)

    def abort(self, request: EngineRequest) -> Location | None:
        """End a request without an answer and free its blocks; whom to tell that its remote blocks are not needed."""
        notify = None
        match request.phase:
            case Phase.FINISHED:
                return None
            case Phase.LOADING:
                # The read cannot be called back; its blocks are freed when it ends.
                request.aborted = True
                return None
            case Phase.HUNG:
                # As seen on vLLM: the blocks of a request that hangs are lost.
                self.hung.remove(request)
                self.leaked_blocks += len(request.blocks)
                request.phase = Phase.FINISHED
                return None
            case Phase.WAITING:
                self.waiting.remove(request)
                if not request.transferred:
                    notify = transfer.on_rejected(request.params)
            case Phase.RUNNING:
                self.running.remove(request)
        self._end(request, "abort")
        return notify

    def serve_read(self, request_id: str, blocks: Sequence[int], now: float) -> list[array[int]]:
        """The contents of ``blocks`` now, for a reader that holds a handle of ``request_id``.

        Nothing is checked but that the blocks exist (ValueError), as a one-sided read checks nothing. Whether the
        life cycle would have granted the read is counted.
        """
        unknown = [block for block in blocks if not self.pool.exists(block)]
        if unknown:
            raise ValueError(f"no such blocks: {unknown[:3]}")
        self.expire(now)
        record = self.retained.get(request_id)
        outcome = transition(record.lease, Event.TAKE, now) if record and record.lease else None
        if record is None or outcome is None or outcome.effect is not Effect.GRANT:
            self.counters.reads_not_granted += 1
        else:
            record.lease = outcome.lease
        return [self.pool.read(block) for block in blocks]

    def notified(self, request_id: str, now: float) -> None:
        """A reader says that it has what it needs of ``request_id``."""
        self.expire(now)
        record = self.retained.get(request_id)
        if record is None or record.lease is None:
            self.counters.notifications_after_expiry += 1
            return
        event = Event.RELEASE if record.lease.state is State.ISSUED else Event.READ
        outcome = transition(record.lease, event, now)
        record.lease = outcome.lease
        if outcome.effect is Effect.FREE:
            self._drop(record)

    def heartbeat(self, request_ids: Sequence[str], now: float) -> None:
        """A reader still waits for these: keep them for another while."""
        extension = self._connector().lease_extension
        for request_id in request_ids:
            record = self.retained.get(request_id)
            if record is not None and record.lease is not None:
                record.lease = record.lease._replace(deadline=max(record.lease.deadline, now + extension))

    def expire(self, now: float) -> None:
        """Free what is retained past its deadline."""
        for record in list(self.retained.values()):
            if record.lease is None:
                continue
            outcome = transition(record.lease, Event.EXPIRE, now)
            record.lease = outcome.lease
            if outcome.effect is Effect.FREE:
                self.counters.kv_expired += 1
                self._drop(record)

    def next_deadline(self) -> float | None:
        """The earliest time at which something expires."""
        return min((record.lease.deadline for record in self.retained.values() if record.lease), default=None)

    def die(self, reason: str) -> None:
        """The engine core ended; nothing is scheduled any more."""
        self.dead = self.dead or reason

    @property
    def busy(self) -> bool:
        """Whether a draining engine has to stay: requests, or blocks that somebody may still read."""
        return bool(self.waiting or self.loading or self.running or self.hung or self.retained)

    def _admit(self, request: EngineRequest) -> Admission | None:
        size, pool, tokens = self.settings.block_size, self.pool, request.tokens
        request.names.extend(tokens)
        hits: list[int] = []
        if self.settings.prefix_caching and not request.sampling.skip_cache:
            # The last token is always computed, since its output is needed.
            hits = pool.lookup(request.names.names[: (len(tokens) - 1) // size])
        local, external = len(hits) * size, 0
        connector = self.settings.connector
        first = not request.transferred
        if connector and first and not request.sampling.skip_cache:
            external = transfer.external_tokens(
                request.params, prompt_tokens=request.prompt_tokens, local_tokens=local, settings=connector
            )
        needed = blocks_of(len(tokens), size) - len(hits)
        if needed > pool.free - sum(pool.is_free(block) for block in hits):
            return None
        plan = transfer.on_allocated(request.params, external, connector) if connector and first else request.plan
        read: tuple[int, ...] = ()
        if plan.start is Start.READ and plan.location and first:
            read = tuple(transfer.trim(plan.location.block_ids, blocks_of(local + external, size) - len(hits)))
        pool.share(hits)
        request.blocks = hits + pool.take(needed)
        request.plan, request.transferred = plan, True
        request.local_tokens, request.external_tokens, request.computed = local, external, local
        request.published = len(hits)
        self._count_admission(request)
        if first and plan.start is Start.HANG:
            request.phase = Phase.HUNG
            self.hung.append(request)
            return Admission(request)
        if first and plan.start is Start.READ:
            request.phase = Phase.LOADING
            self.loading.append(request)
            return Admission(request, read=read, read_from=plan.location)
        request.phase = Phase.RUNNING
        self.running.append(request)
        return Admission(request, notify=plan.location if first and plan.start is Start.NOTIFY else None)

    def _count_admission(self, request: EngineRequest) -> None:
        counters, total = self.counters, len(request.tokens)
        if self.settings.prefix_caching and not request.sampling.skip_cache:
            counters.prefix_cache_queries += total
            counters.prefix_cache_hits += request.local_tokens
        if self.settings.connector:
            counters.external_prefix_cache_queries += total - request.local_tokens
            counters.external_prefix_cache_hits += request.external_tokens
        if request.preemptions:
            return
        counters.prompt_tokens += request.prompt_tokens
        counters.local_cache_hit += request.local_tokens
        counters.external_kv_transfer += request.external_tokens
        counters.local_compute += request.prompt_tokens - request.local_tokens - request.external_tokens

    def _compute(self, request: EngineRequest) -> bool:
        """Compute the KV of all tokens but the one to be sampled; False where the request was preempted."""
        size, pool, tokens = self.settings.block_size, self.pool, request.tokens
        missing = blocks_of(len(tokens), size) - len(request.blocks)
        if missing > 0:
            try:
                request.blocks += pool.take(missing)
            except OutOfBlocks:
                self._preempt(request)
                return False
        computing.write(pool, request, size)
        self._publish(request)
        return True

    def _likely(self, attention: int, token: int) -> tuple[tuple[int, float], ...]:
        most = self.settings.logprob_noise
        errors = [self._random.uniform(-most, most) for _ in range(generation.LIKELY)]
        return tuple(generation.likely_tokens(attention, token, errors))

    def _publish(self, request: EngineRequest) -> None:
        if not self.settings.prefix_caching:
            return
        request.names.extend(request.tokens)
        whole = request.computed // self.settings.block_size
        for index in range(request.published, whole):
            self.pool.publish(request.blocks[index], request.names.names[index])
        request.published = max(request.published, whole)

    def _preempt(self, request: EngineRequest) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks, request.computed = [], 0
        request.attention = request.attended = request.published = 0
        request.phase = Phase.WAITING
        request.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(request)

    def _finish(self, request: EngineRequest, reason: str, now: float) -> dict[str, Any] | None:
        connector = self.settings.connector
        self.running.remove(request)
        retention = transfer.on_finished(request.params, request.plan, connector) if connector else None
        if connector is None or retention is None or retention.seconds is None:
            self._end(request, reason)
            return None
        if reason == "stop" and self.settings.overshoot:
            computing.overshoot(self.pool, request, self.settings.block_size, self.settings.overshoot)
        tokens = request.computed
        kept = blocks_of(tokens, self.settings.block_size)
        self.pool.release(request.blocks[kept:])
        deadline = now + retention.seconds
        record = Retained(
            request_id=request.request_id,
            blocks=request.blocks[:kept],
            tokens=tokens,
            kind="prefill" if retention.for_decode else "decode",
            lease=None if retention.leaked else Lease(deadline=deadline),
        )
        self.retained[request.request_id] = record
        request.phase = Phase.FINISHED
        self._count_end(reason)
        return transfer.handle(
            retention,
            connector,
            request_id=request.request_id,
            block_ids=record.blocks,
            tokens=tokens,
            deadline=deadline,
            cached_tokens=request.local_tokens + request.external_tokens,
        )

    def _end(self, request: EngineRequest, reason: str) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.phase = Phase.FINISHED
        self._count_end(reason)

    def _count_end(self, reason: str) -> None:
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1

    def _drop(self, record: Retained) -> None:
        del self.retained[record.request_id]
        self.pool.release(record.blocks)

    def _alive(self) -> None:
        if self.dead is not None:
            raise EngineFatal(self.dead)

    def _connector(self) -> ConnectorSettings:
        if self.settings.connector is None:
            raise EngineFatal("no KV connector is configured")
        return self.settings.connector
