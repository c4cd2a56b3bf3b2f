"""The router's metrics. Nothing else imports prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvloop_connector.lifecycle import State
from kvloop_connector.settings import Role
from kvloop_router.engine import Engine
from kvloop_router.gaps import BOUNDS, Gaps
from kvloop_router.pairs import PairReport, Verdict
from kvloop_router.turn_log import TurnReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "kvloop_router_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_NATS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 5.0)
_VERDICTS = {Verdict.VERIFIED: 1.0, Verdict.UNKNOWN: 0.0, Verdict.FAILED: -1.0, Verdict.WRONG: -2.0}


_Metric = TypeVar("_Metric", Counter, Histogram)


class Labelled(Generic[_Metric]):
    """A metric with labels, each of whose series is looked up in it once: that takes longer than to count."""

    def __init__(self, metric: _Metric) -> None:
        self._metric: _Metric = metric
        self._series: dict[tuple[str, ...], _Metric] = {}

    def labels(self, *values: str) -> _Metric:
        """The series with these labels."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._metric.labels(*values)
        return series


class Metrics:
    """All counters and histograms, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = self._counter("turns", "Turns that ended, by how their prompt's KV came about.", "path", "reason")
        self.requests = self._counter("requests", "Answers, by API and status.", "api", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of turns, where they are known.", "path")
        self.reused_tokens = self._total("reused_tokens", "Prompt tokens that were not computed, thanks to a handle.")
        self.reusable_tokens = self._total(
            "reusable_tokens", "Prompt tokens that a handle which was taken was proven to hold."
        )
        self.recomputed_tokens = self._counter(
            "recomputed_tokens",
            "Prompt tokens, where they are known, that no handle saved from being computed.",
            "path",
        )
        self.handles = self._counter("handles", "What became of KV handles.", "event")
        self.given_up = self._counter("handles_given_up", "Handles that were to be released, and why.", "reason")
        self.renewals = self._counter("lease_renewals", "Renewals of what engines retain, by outcome.", "outcome")
        self.verdicts = self._counter(
            "handle_verdicts", "What prefill engines with KvloopConnector said of handles.", "outcome"
        )
        self.truth_samples = self._counter(
            "truth_samples", "Warm turns whose prompt was computed anew, and what came of it.", "outcome"
        )
        self.truth_distance = Histogram(
            _PREFIX + "truth_distance_nats",
            "How far apart first tokens are that should be equal: of what was reused, and of what was computed twice.",
            ("of",),
            registry=self.registry,
            buckets=_NATS,
        )
        self.handle_store_calls = self._counter(
            "handle_store_calls", "Calls of a shared handle store, by outcome.", "operation", "outcome"
        )
        self.handle_store_up = Gauge(
            _PREFIX + "handle_store_up", "1: the shared handle store answers.", registry=self.registry
        )
        self.handle_store_up.set(1)
        self.handle_store_bytes = Gauge(
            _PREFIX + "handle_store_bytes", "Memory that kept handles take in this router.", registry=self.registry
        )
        self.no_handle = self._counter("no_handle", "Turns that left nothing to reuse.", "reason")
        self.retries = self._counter("retries", "Legs that were sent again.", "leg")
        self.disconnects = self._counter("client_disconnects", "Clients that left before their answer's end.", "phase")
        self.refused_turns = self._counter("refused_turns", "Turns that found too many waiting.", "model")
        self.breaks = self._counter("upstream_breaks", "Answers that ended before their end.", "engine")
        self.discovery = self._counter(
            "discovery_interruptions", "Watches of the engines' pods that did not end by their time.", "reason"
        )
        self.over_limit = self._total("over_limit", "Requests that were refused since their tenant had too many.")
        self.reloads = self._counter("reloads", "Files that changed while the router ran.", "file", "outcome")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From the request to the answer's first byte.", "path"
        )
        self.legs = self._histogram("leg_seconds", "Duration of a leg.", "leg", "outcome")
        self.spans = self._counter("trace_spans", "Spans that were to be exported, by outcome.", "outcome")
        self._gaps = _GapHistogram()
        self.registry.register(self._gaps)

    def turn_ended(self, report: TurnReport) -> None:
        """A turn that was not refused as its client's fault has ended."""
        path = report.path
        self.turns.labels(path, report.reason).inc()
        if report.prompt_tokens is not None:
            self.prompt_tokens.labels(path).inc(report.prompt_tokens)
            self.recomputed_tokens.labels(path).inc(max(0, report.prompt_tokens - report.reused_tokens))
        self.reusable_tokens.inc(report.proven_tokens)
        self.reused_tokens.inc(report.reused_tokens)
        if report.ttft_seconds is not None:
            self.ttft.labels(path).observe(report.ttft_seconds)
        self._gaps.add(path, report.gaps)

    def handle_ended(self, state: State) -> None:
        """A kept handle has reached a final state. Released ones are counted when it is done."""
        if state is not State.RELEASED:
            self.handles.labels(state.value).inc()

    def observe(
        self,
        *,
        engines: Callable[[], Iterable[Engine]],
        pairs: Callable[[], Iterable[PairReport]],
        handles: Callable[[], int],
        turns: Callable[[], int],
        retained_blocks: Callable[[str], int],
        retained_share: float,
        template: Callable[[], Iterable[tuple[str, str, bool]]],
    ) -> None:
        """Add gauges that are read from live state at each scrape, so that what is gone leaves no series.

        retained_share: of an engine's blocks, those that kept handles may hold. template: what the probe of the chat
        template found: model, case, and whether it is append-only there.
        """
        self.registry.register(_Live(engines, pairs, handles, turns, retained_blocks, retained_share, template))

    def expose(self) -> bytes:
        """The Prometheus text."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Labelled[Counter]:
        return Labelled(Counter(_PREFIX + name, text, labels, registry=self.registry))

    def _total(self, name: str, text: str) -> Counter:
        return Counter(_PREFIX + name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Labelled[Histogram]:
        return Labelled(Histogram(_PREFIX + name, text, labels, registry=self.registry, buckets=_SECONDS))


class _GapHistogram(Collector):
    """Adds up what streams have counted themselves."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._totals: dict[str, float] = {}

    def add(self, path: str, gaps: Gaps) -> None:
        if gaps.counts is None:
            return
        counts = self._counts.setdefault(path, [0] * (len(BOUNDS) + 1))
        for index, count in enumerate(gaps.counts):
            counts[index] += count
        self._totals[path] = self._totals.get(path, 0.0) + gaps.total

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            _PREFIX + "inter_token_seconds", "Between two pieces of a streamed answer.", labels=["path"]
        )
        for path, counts in self._counts.items():
            bounds = (*map(floatToGoString, BOUNDS), "+Inf")
            family.add_metric([path], list(zip(bounds, accumulate(counts), strict=True)), self._totals[path])
        yield family


class _Live(Collector):
    def __init__(
        self,
        engines: Callable[[], Iterable[Engine]],
        pairs: Callable[[], Iterable[PairReport]],
        handles: Callable[[], int],
        turns: Callable[[], int],
        retained_blocks: Callable[[str], int],
        retained_share: float,
        template: Callable[[], Iterable[tuple[str, str, bool]]],
    ) -> None:
        self._engines = engines
        self._pairs = pairs
        self._handles = handles
        self._turns = turns
        self._retained_blocks = retained_blocks
        self._retained_share = retained_share
        self._template = template

    def collect(self) -> Iterator[GaugeMetricFamily]:
        load = GaugeMetricFamily(
            _PREFIX + "engine_load", "Requests of this router there now.", labels=["engine", "role"]
        )
        healthy = GaugeMetricFamily(
            _PREFIX + "engine_healthy", "1: answers its health checks.", labels=["engine", "role", "kv_revision"]
        )
        serving = GaugeMetricFamily(
            _PREFIX + "engine_serving",
            "1: gets new turns; 0: is unhealthy, not ready or draining.",
            labels=["engine", "role", "kv_revision"],
        )
        retained = GaugeMetricFamily(
            _PREFIX + "retained_blocks", "KV blocks that it retains for kept handles.", labels=["engine"]
        )
        limit = GaugeMetricFamily(
            _PREFIX + "retained_blocks_limit", "KV blocks that it may retain for kept handles.", labels=["engine"]
        )
        for engine in self._engines():
            spec = engine.spec
            if spec.role is Role.DECODE:
                retained.add_metric([spec.name], self._retained_blocks(spec.process))
                if engine.kv_blocks is not None:
                    limit.add_metric([spec.name], int(engine.kv_blocks * self._retained_share))
            load.add_metric([spec.name, spec.role], engine.load)
            healthy.add_metric([spec.name, spec.role, spec.kv_revision], float(engine.healthy))
            serving.add_metric([spec.name, spec.role, spec.kv_revision], float(engine.serving))
        verified = GaugeMetricFamily(
            _PREFIX + "pair_verified",
            "Whether KV was seen to move both ways: 1 yes, 0 not known, -1 no, -2 what moved was wrong.",
            labels=["prefill", "decode"],
        )
        for report in self._pairs():
            verified.add_metric([report.prefill.name, report.decode.name], _VERDICTS[report.verdict])
        live = GaugeMetricFamily(_PREFIX + "live_handles", "Handles that are kept.", value=self._handles())
        running = GaugeMetricFamily(_PREFIX + "running_turns", "Turns that are running.", value=self._turns())
        template = GaugeMetricFamily(
            _PREFIX + "template_append_only",
            "1: the chat template renders a turn as the beginning of the next one's prompt; 0: it does not.",
            labels=["model", "case"],
        )
        for model, case, append_only in self._template():
            template.add_metric([model, case], float(append_only))
        yield from (load, healthy, serving, retained, limit, verified, live, running, template)
