"""A typed view of an engine's ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """What the tests read of an engine's metrics, summed over label values; 0 where the engine has not counted yet.

    The reader of a transfer counts it: KV that comes back from decode shows on prefill.
    """

    reads: float
    bytes_read: float
    failed_transfers: float
    failed_notifications: float
    expired: float
    notifications_after_expiry: float
    external_hits: float
    local_hits: float
    local_queries: float
    computed: float
    running: float
    waiting: float
    waiting_for_memory: float
    waiting_for_transfer: float
    kv_usage: float

    def __sub__(self, earlier: EngineMetrics) -> EngineMetrics:
        """What was counted since ``earlier``."""
        return EngineMetrics(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    def __add__(self, other: EngineMetrics) -> EngineMetrics:
        """What two engines counted together."""
        return EngineMetrics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


_WAITING = "vllm:num_requests_waiting_by_reason"

_SAMPLES: dict[str, tuple[str, Callable[[dict[str, str]], bool]]] = {
    "reads": ("vllm:nixl_bytes_transferred_count", lambda _: True),
    "bytes_read": ("vllm:nixl_bytes_transferred_sum", lambda _: True),
    "failed_transfers": ("vllm:nixl_num_failed_transfers_total", lambda _: True),
    "failed_notifications": ("vllm:nixl_num_failed_notifications_total", lambda _: True),
    "expired": ("vllm:nixl_num_kv_expired_reqs_total", lambda _: True),
    "notifications_after_expiry": ("vllm:nixl_num_notifications_after_expiry_total", lambda _: True),
    "external_hits": ("vllm:external_prefix_cache_hits_total", lambda _: True),
    "local_hits": ("vllm:prefix_cache_hits_total", lambda _: True),
    "local_queries": ("vllm:prefix_cache_queries_total", lambda _: True),
    "computed": ("vllm:prompt_tokens_by_source_total", lambda labels: labels.get("source") == "local_compute"),
    "running": ("vllm:num_requests_running", lambda _: True),
    "waiting": ("vllm:num_requests_waiting", lambda _: True),
    "waiting_for_memory": (_WAITING, lambda labels: labels.get("reason") == "capacity"),
    "waiting_for_transfer": (_WAITING, lambda labels: labels.get("reason") == "deferred"),
    "kv_usage": ("vllm:kv_cache_usage_perc", lambda _: True),
}


def parse(text: str) -> EngineMetrics:
    """The typed view of a Prometheus exposition."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return EngineMetrics(
        **{
            field: sum(sample.value for sample in samples if sample.name == name and wanted(sample.labels))
            for field, (name, wanted) in _SAMPLES.items()
        }
    )


def sample_names(text: str) -> set[str]:
    """The names of all samples in a Prometheus exposition."""
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def cache_config(text: str) -> dict[str, str]:
    """The labels of ``vllm:cache_config_info``."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                return dict(sample.labels)
    raise LookupError("vllm:cache_config_info is not exported")
