"""What the workers of a router count, as what the router counts. No I/O.

Counters and histograms are summed. Those of a worker that ended stay in the sum, as they were last told, so that they
never go backwards. A gauge is what its meaning asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""

_CREATED = "_created"
_PREFIX = "kvloop_router_"

GAUGES: Mapping[str, Callable[[Iterable[float]], float]] = {
    "engine_load": sum,
    "running_turns": sum,
    "handle_store_bytes": sum,
    # Of what is shared each worker tells the whole.
    "live_handles": max,
    "retained_blocks": max,
    "retained_blocks_limit": max,
    # The worst that one of them sees.
    "handle_store_up": min,
    "engine_healthy": min,
    "engine_serving": min,
    "pair_verified": min,
    "template_append_only": min,
}
"""How each gauge, without its prefix, is made of the workers'."""


@dataclass(slots=True)
class Family:
    """A metric with its samples."""

    name: str
    text: str
    kind: str
    samples: dict[Key, float] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether it only grows."""
        return self.kind in ("counter", "histogram")


Exposition = Mapping[str, Family]
"""By name."""


def parse(text: str) -> dict[str, Family]:
    """A Prometheus text. When a series was created is left out: the sum was not."""
    families = {}
    for metric in text_string_to_metric_families(text):
        if metric.name.endswith(_CREATED):
            continue
        family = Family(metric.name, metric.documentation, metric.type)
        family.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for sample in metric.samples
            if not sample.name.endswith(_CREATED)
        }
        families[metric.name] = family
    return families


def total(expositions: Sequence[Exposition]) -> dict[str, Family]:
    """The expositions as one."""
    found: dict[str, Family] = {}
    values: dict[str, dict[Key, list[float]]] = {}
    for family in (family for exposition in expositions for family in exposition.values()):
        found.setdefault(family.name, Family(family.name, family.text, family.kind))
        of_family = values.setdefault(family.name, {})
        for key, value in family.samples.items():
            of_family.setdefault(key, []).append(value)
    for name, family in found.items():
        merge = sum if family.counts else GAUGES.get(name.removeprefix(_PREFIX), sum)
        family.samples = {key: float(merge(each)) for key, each in values[name].items()}
    return found


def counts(exposition: Exposition) -> dict[str, Family]:
    """Without what ends with the worker that told it."""
    return {name: family for name, family in exposition.items() if family.counts}


class Totals:
    """What workers told last, and what those had told that are gone. ``worker``: never the same for two processes."""

    def __init__(self) -> None:
        self._gone: Exposition = {}
        self._told: dict[int, Exposition] = {}

    def tell(self, worker: int, text: str) -> None:
        """What a worker exposes now."""
        self._told[worker] = parse(text)

    def miss(self, worker: int) -> None:
        """A worker that is there says nothing now."""
        if worker in self._told:
            self._told[worker] = counts(self._told[worker])

    def end(self, worker: int) -> None:
        """A worker has ended."""
        told = self._told.pop(worker, None)
        if told is not None:
            self._gone = total([self._gone, counts(told)])

    def expose(self, *, workers: int, restarts: int) -> bytes:
        """The Prometheus text of all, and of the parent's own: workers that serve, and that were started anew."""
        merged = total([self._gone, *self._told.values()]).values()
        own = (
            GaugeMetricFamily(_PREFIX + "workers", "Workers that serve.", value=workers),
            CounterMetricFamily(
                _PREFIX + "worker_restarts", "Workers that ended and were started anew.", value=restarts
            ),
        )
        return generate_latest(_Fixed([*map(_metric, merged), *own]))


class _Fixed(Collector):
    """Looks like a registry to whoever writes it as text."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _metric(family: Family) -> Metric:
    metric = Metric(family.name, family.text, family.kind)
    for (name, labels), value in family.samples.items():
        metric.add_sample(name, dict(labels), value)
    return metric
