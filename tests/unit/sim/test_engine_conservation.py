"""Whatever happens to an engine, no block is lost, none is free and in use, and nothing is kept past its time."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloop_sim.records import Admission, EngineRequest, Phase, Sampling
from tests.unit.sim.cores import COLD, engine

PEER = {
    "remote_engine_id": "peer",
    "remote_request_id": "theirs",
    "remote_host": "peer",
    "remote_port": 1,
    "remote_block_ids": [list(range(1, 13))],
}
PULL = {**PEER, "do_remote_decode": True, "remote_num_tokens": 20}
LOAD = {**PEER, "do_remote_prefill": True}


class OneEngine(RuleBasedStateMachine):
    """Requests of every kind, in any order, with few blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.core = engine("core", blocks=24, decoder_ttl=20.0, lease=6.0)
        self.now = 0.0
        self.requests: list[EngineRequest] = []
        self.loading: list[Admission] = []

    @rule(
        length=st.integers(1, 40),
        first=st.integers(0, 2),
        most=st.integers(1, 6),
        params=st.sampled_from([None, COLD, PULL, LOAD, {"neither": 1}]),
    )
    def submit(self, length: int, first: int, most: int, params: dict[str, object] | None) -> None:
        prompt = [first, *range(length - 1)]
        sampling = Sampling(max_tokens=most, ignore_eos=True)
        self.requests.append(self.core.submit(f"r{len(self.requests)}", prompt, sampling, params=params))

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.loading += [admission for admission in self.core.schedule(self.now) if admission.read_from]

    @precondition(lambda self: self.loading)
    @rule(fails=st.booleans(), values=st.integers(0, 100))
    def read_ends(self, fails: bool, values: int) -> None:
        admission = self.loading.pop(0)
        if fails:
            self.core.load_failed(admission.request)
        else:
            self.core.loaded(admission.request, [[values] * 4 for _ in admission.read])

    @precondition(lambda self: self.core.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.core.running))
        self.core.begin_prefill(request, self.now)
        self.core.step(request, self.now)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.core.abort(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: self.core.retained)
    @rule(data=st.data(), reads=st.booleans())
    def peer_reads_or_releases(self, data: st.DataObject, reads: bool) -> None:
        record = self.core.retained[data.draw(st.sampled_from(sorted(self.core.retained)))]
        if reads:
            self.core.serve_read(record.request_id, record.blocks, self.now)
        self.core.notified(record.request_id, self.now)

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        pool = self.core.pool
        assert pool.free + pool.held == pool.capacity
        assert 0 <= pool.cached_free <= pool.free

    @invariant()
    def no_block_is_both_free_and_in_use(self) -> None:
        used = [block for request in self.requests for block in request.blocks if request.phase is not Phase.FINISHED]
        retained = [block for record in self.core.retained.values() for block in record.blocks]
        assert not any(self.core.pool.is_free(block) for block in [*used, *retained])
        assert len(set(used) | set(retained)) + self.core.leaked_blocks == self.core.pool.held

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        core = self.core
        places = Counter(
            {
                Phase.WAITING: len(core.waiting),
                Phase.LOADING: len(core.loading),
                Phase.RUNNING: len(core.running),
                Phase.HUNG: len(core.hung),
            }
        )
        assert +places == Counter(r.phase for r in self.requests if r.phase is not Phase.FINISHED)

    @invariant()
    def nothing_that_has_a_timer_is_kept_past_it(self) -> None:
        self.core.expire(self.now)
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now


OneEngine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestOneEngine = OneEngine.TestCase
