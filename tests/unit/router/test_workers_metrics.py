"""What several workers count, as what their router counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client.parser import text_string_to_metric_families

from kvloop_connector.settings import Role
from kvloop_router.engine import Engine
from kvloop_router.metrics import Metrics
from kvloop_router.workers_metrics import GAUGES, Totals
from tests.unit.router.test_metrics import engine, observed

TURNS = 'kvloop_router_turns_total{path="cold",reason="miss"}'
TTFT = 'kvloop_router_time_to_first_token_seconds_count{path="cold"}'


@dataclass(slots=True)
class Worker:
    """What a worker counts. ``engine``: the only one that it sees."""

    metrics: Metrics = field(default_factory=Metrics)
    engine: Engine = field(default_factory=lambda: engine(Role.DECODE, "decode-0"))
    turns: int = 0

    def __post_init__(self) -> None:
        self.metrics.observe(
            engines=lambda: (self.engine,),
            pairs=lambda: (),
            handles=lambda: 5,
            turns=lambda: self.turns,
            retained_blocks=lambda process: 7,
            retained_share=0.5,
            template=list,
        )

    def plays(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.metrics.turns.labels("cold", "miss").inc()
            self.metrics.ttft.labels("cold").observe(0.2)

    @property
    def text(self) -> str:
        return self.metrics.expose().decode()


def samples(totals: Totals) -> dict[str, float]:
    text = totals.expose(workers=1, restarts=0).decode()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}


def test_counters_and_histograms_are_summed_and_gauges_are_what_they_mean() -> None:
    totals, one, other = Totals(), Worker(turns=2), Worker(turns=3)
    one.plays(3)
    other.plays(4)
    other.metrics.handle_store_up.set(0)
    other.engine.health.refused()
    totals.tell(1, one.text)
    totals.tell(2, other.text)

    found = samples(totals)

    assert (found[TURNS], found[TTFT]) == (7, 7)
    bucket = 'kvloop_router_time_to_first_token_seconds_bucket{le="%s",path="cold"}'
    assert (found[bucket % "0.1"], found[bucket % "0.25"], found[bucket % "+Inf"]) == (0, 7, 7)
    assert found["kvloop_router_running_turns"] == 5
    assert found["kvloop_router_live_handles"] == 5
    assert found['kvloop_router_retained_blocks{engine="decode-0"}'] == 7
    assert found["kvloop_router_handle_store_up"] == 0
    assert found['kvloop_router_engine_healthy{engine="decode-0",kv_revision="a",role="decode"}'] == 0


def test_every_gauge_has_a_rule() -> None:
    gauges = {
        family.name.removeprefix("kvloop_router_") for family in observed().registry.collect() if family.type == "gauge"
    }

    assert gauges == set(GAUGES)


def test_one_worker_alone_is_told_as_it_tells() -> None:
    totals, worker = Totals(), Worker()
    worker.plays(3)
    totals.tell(1, worker.text)

    def families(text: str) -> dict[str, tuple[str, str, set[tuple[str, tuple[tuple[str, str], ...], float]]]]:
        return {
            family.name: (
                family.type,
                family.documentation,
                {(each.name, tuple(sorted(each.labels.items())), each.value) for each in family.samples},
            )
            for family in text_string_to_metric_families(text)
            if not family.name.endswith("_created") and "worker" not in family.name
        }

    assert families(totals.expose(workers=1, restarts=0).decode()) == families(worker.text)


def test_one_that_says_nothing_counts_as_it_did_and_has_nothing_that_runs() -> None:
    totals, worker = Totals(), Worker(turns=2)
    worker.plays(3)
    totals.tell(1, worker.text)

    totals.miss(1)
    totals.miss(2)

    assert samples(totals)[TURNS] == 3
    assert "kvloop_router_running_turns" not in samples(totals)


class Restarts(RuleBasedStateMachine):
    """Workers play, are asked, fall silent, are killed and started anew, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = Totals()
        self.workers: dict[int, Worker] = {0: Worker(), 1: Worker()}
        self.idents = 2
        self.known: dict[int, int] = {}
        self.before: dict[str, float] = {}

    @rule(which=st.integers(0, 1), turns=st.integers(1, 3))
    def play(self, which: int, turns: int) -> None:
        list(self.workers.values())[which].plays(turns)

    @rule(which=st.integers(0, 1))
    def ask(self, which: int) -> None:
        ident, worker = list(self.workers.items())[which]
        self.totals.tell(ident, worker.text)
        self.known[ident] = int(worker.metrics.turns.labels("cold", "miss")._value.get())

    @rule(which=st.integers(0, 1))
    def silence(self, which: int) -> None:
        self.totals.miss(list(self.workers)[which])

    @rule(which=st.integers(0, 1))
    def kill(self, which: int) -> None:
        ident = list(self.workers)[which]
        del self.workers[ident]
        self.totals.end(ident)
        self.workers[self.idents] = Worker()
        self.idents += 1

    @invariant()
    def nothing_goes_backwards_and_all_that_was_told_is_there(self) -> None:
        found = {name: value for name, value in samples(self.totals).items() if "_total" in name or "_seconds" in name}
        assert all(found.get(name, -1.0) >= value for name, value in self.before.items())
        assert found.get(TURNS, 0) == found.get(TTFT, 0) == sum(self.known.values())
        self.before = found


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)
