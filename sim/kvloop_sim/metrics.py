"""vLLM's Prometheus metrics, under vLLM's names and labels.

Names as in ``v1/metrics/loggers.py`` and ``nixl/stats.py`` of vLLM 0.32.0; counters get ``_total`` by the client
library, as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvloop_sim.engine import Engine

_LABELS: Final = ("model_name", "engine")
_TIME_TO_FIRST_TOKEN: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_INTER_TOKEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TRANSFER: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
_BYTES: Final = tuple(2 ** (10 + power) for power in range(1, 25, 2))
_DESCRIPTORS: Final = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)


class Metrics:
    """The metrics of one engine. Histograms are observed; all else is read from the engine at each scrape."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry()
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", _TIME_TO_FIRST_TOKEN)
        self._inter_token = self._histogram("vllm:inter_token_latency_seconds", _INTER_TOKEN)
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", _REQUEST)
        self._transfer = self._histogram("vllm:nixl_xfer_time_seconds", _TRANSFER)
        self._post = self._histogram("vllm:nixl_post_time_seconds", (0.001, *_TRANSFER))
        self._bytes = self._histogram("vllm:nixl_bytes_transferred", _BYTES)
        self._descriptors = self._histogram("vllm:nixl_num_descriptors", _DESCRIPTORS)
        self._registry.register(self)

    def on_token(self, seconds: float, *, first: bool) -> None:
        """A token came ``seconds`` after the one before it, or after the request."""
        (self._first_token if first else self._inter_token).observe(seconds)

    def on_finished(self, seconds: float) -> None:
        """A request ended ``seconds`` after it came."""
        self._latency.observe(seconds)

    def on_transfer(self, seconds: float, size: int, blocks: int) -> None:
        """``blocks`` blocks of ``size`` bytes in all were read from a peer."""
        self._transfer.observe(seconds)
        # Posting a transfer takes no time here.
        self._post.observe(0)
        self._bytes.observe(size)
        self._descriptors.observe(blocks)

    def exposition(self) -> bytes:
        """The text that a scrape gets."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Counters and gauges, read from the engine now."""
        engine, counters = self._engine, self._engine.counters
        loading = sum(not request.aborted for request in engine.loading)
        deferred = loading + len(engine.hung)
        yield self._gauge("vllm:num_requests_running", "Running requests.", len(engine.running))
        yield self._gauge("vllm:num_requests_waiting", "Waiting requests.", len(engine.waiting) + deferred)
        yield self._by(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "reason",
            {"capacity": len(engine.waiting), "deferred": deferred},
        )
        connector = engine.settings.connector
        if connector is not None and connector.role != "kv_producer":
            yield self._by(
                GaugeMetricFamily,
                "vllm:num_requests_kv_fetch_by_stage",
                "stage",
                {"waiting_to_start": len(engine.hung), "in_progress": loading, "completed_waiting": 0},
            )
        yield self._gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.pool.usage)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=("block_size", "enable_prefix_caching", "num_gpu_blocks", "engine"),
        )
        settings = engine.settings
        info.add_metric(
            (str(settings.block_size), str(settings.prefix_caching), str(settings.num_blocks), self._labels[1]), 1
        )
        yield info
        for name, value in (
            ("prefix_cache_queries", counters.prefix_cache_queries),
            ("prefix_cache_hits", counters.prefix_cache_hits),
            ("external_prefix_cache_queries", counters.external_prefix_cache_queries),
            ("external_prefix_cache_hits", counters.external_prefix_cache_hits),
            ("prompt_tokens", counters.prompt_tokens),
            ("prompt_tokens_cached", counters.local_cache_hit + counters.external_kv_transfer),
            ("generation_tokens", counters.generation_tokens),
            ("num_preemptions", counters.preemptions),
        ):
            yield self._counter(f"vllm:{name}", value)
        yield self._by(
            CounterMetricFamily,
            "vllm:prompt_tokens_by_source",
            "source",
            {
                "local_compute": counters.local_compute,
                "local_cache_hit": counters.local_cache_hit,
                "external_kv_transfer": counters.external_kv_transfer,
            },
        )
        reasons = dict.fromkeys(("stop", "length", "abort", "error"), 0) | counters.finished
        yield self._by(CounterMetricFamily, "vllm:request_success", "finished_reason", reasons)
        if connector is not None:
            for name, value in (
                ("nixl_num_failed_transfers", counters.failed_transfers),
                ("nixl_num_failed_notifications", counters.failed_notifications),
                ("nixl_num_kv_expired_reqs", counters.kv_expired),
                ("nixl_num_notifications_after_expiry", counters.notifications_after_expiry),
            ):
                yield self._counter(f"vllm:{name}", value)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            name, f"Histogram of {name}.", labelnames=_LABELS, buckets=buckets, registry=self._registry
        )
        return histogram.labels(*self._labels)

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, documentation, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, value: float) -> Metric:
        family = CounterMetricFamily(name, f"Count of {name}.", labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _by(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        label: str,
        values: dict[str, int],
    ) -> Metric:
        family = kind(name, f"{name} by {label}.", labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family
