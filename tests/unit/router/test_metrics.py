"""The metrics and their documentation."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvloop_connector.settings import Role
from kvloop_router.engine import Engine
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.health import Health
from kvloop_router.metrics import Metrics
from kvloop_router.pairs import PairReport
from kvloop_router.turn_log import TurnReport

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "observability.md"
_ROW = re.compile(r"^\| (`[a-z_`, ]+`) \| ([a-z_`, ]*) ?\| .*\|$")
_KINDS = {"counter": "_total"}


def engine(role: Role, name: str) -> Engine:
    spec = EngineSpec(name=name, role=role, url="http://x", pod_uid=name, process=name, kv_revision="a")
    return Engine(spec, health=Health(healthy=True), kv_blocks=100)


def observed() -> Metrics:
    metrics = Metrics()
    engines = (engine(Role.PREFILL, "p"), engine(Role.DECODE, "d"))
    metrics.observe(
        engines=lambda: engines,
        pairs=lambda: (PairReport(engines[0].spec, engines[1].spec),),
        handles=lambda: 0,
        turns=lambda: 0,
        retained_blocks=lambda process: 7,
        retained_share=0.5,
        template=lambda: [("tiny", "answer", True)],
    )
    return metrics


def exposed() -> dict[str, set[str]]:
    """Every metric by its name, without the prefix, and its labels."""
    found = {}
    for family in observed().registry.collect():
        name = family.name.removeprefix("kvloop_router_") + _KINDS.get(family.type, "")
        found[name] = _labels(family.name)
    return found


def _labels(name: str) -> set[str]:
    for collector, names in observed().registry._collector_to_names.items():
        if name in names:
            declared = getattr(collector, "_labelnames", None)
            if declared is not None:
                return set(declared)
    samples = [sample for family in observed().registry.collect() if family.name == name for sample in family.samples]
    return {label for sample in samples for label in sample.labels} if samples else {"path"}


def documented() -> dict[str, set[str]]:
    found = {}
    for line in DOCUMENTATION.read_text(encoding="utf-8").split("## Metrics")[1].split("## ")[0].splitlines():
        row = _ROW.match(line)
        if row is not None:
            for name in re.findall(r"`(\w+)`", row[1]):
                found[name] = set(re.findall(r"`(\w+)`", row[2]))
    return found


def test_every_metric_is_documented_with_its_labels_and_no_other_is() -> None:
    assert documented() == exposed()


def test_the_text_is_one_that_prometheus_reads() -> None:
    metrics = observed()
    report = TurnReport(request_id="one", api="/", at=0.0, clock=lambda: 0.0, path="warm", prompt_tokens=100)
    report.reused_tokens, report.proven_tokens = 64, 80
    for now in (0.0, 0.02, 0.05):
        report.gaps.note(now)
    metrics.turn_ended(report)

    families = {family.name: family for family in text_string_to_metric_families(metrics.expose().decode())}

    def value(family: str, sample: str, **labels: str) -> float:
        (found,) = [
            each.value
            for each in families[f"kvloop_router_{family}"].samples
            if each.name == f"kvloop_router_{sample}" and each.labels == labels
        ]
        return found

    assert value("recomputed_tokens", "recomputed_tokens_total", path="warm") == 36
    assert value("reusable_tokens", "reusable_tokens_total") == 80
    assert value("inter_token_seconds", "inter_token_seconds_count", path="warm") == 2
    assert value("inter_token_seconds", "inter_token_seconds_bucket", path="warm", le="0.02") == 1
    assert value("inter_token_seconds", "inter_token_seconds_bucket", path="warm", le="+Inf") == 2
    assert value("inter_token_seconds", "inter_token_seconds_sum", path="warm") == 0.05
    assert value("retained_blocks_limit", "retained_blocks_limit", engine="d") == 50
