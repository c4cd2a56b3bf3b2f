"""The operator's own metrics, with the prefix ``kvloop_operator_``."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class Metrics:
    """Counters and gauges. The functions give what is true at the moment of a scrape."""

    def __init__(
        self,
        *,
        resources: Callable[[], int],
        waiting: Callable[[], int],
        lag: Callable[[], float],
        requests: Callable[[], int],
        writes: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "kvloop_operator_reconciles",
            "Passes over a resource, by result: ok, or the name of the error after which it is tried again.",
            ["result"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "kvloop_operator_reconcile_seconds",
            "Time that a pass over a resource took.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.resyncs = Counter(
            "kvloop_operator_resyncs", "How often everything was read anew.", ["result"], registry=self.registry
        )
        for name, text, read in (
            ("resources", "Resources there are.", resources),
            ("queue_length", "Resources that wait for a pass.", waiting),
            ("queue_lag_seconds", "For how long the resource that waits longest has been due.", lag),
            ("api_requests", "Requests to the API server so far, watches left out.", requests),
            ("api_writes", "Requests so far that ask the API server for a change.", writes),
        ):
            Gauge(f"kvloop_operator_{name}", text, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
