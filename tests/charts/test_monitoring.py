"""The dashboard and the alerts: they ask for metrics that routers have, by labels that these have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from tests.charts.helm import CHART, Helm, find, kinds
from tests.unit.router.test_metrics import exposed

_FILES: Final = CHART / "monitoring"
_METRIC: Final = re.compile(r"kvloop_router_(\w+)(?:\{([^}]*)\})?")
_MATCHER: Final = re.compile(r"(\w+)(?:=~|!~|!=|=)\"")
_BY: Final = re.compile(r"by \(([^)]*)\)")
_OF_HISTOGRAMS: Final = re.compile(r"_(bucket|sum|count)$")
_OF_SCRAPES: Final = {"namespace", "pod"}
_ANNOTATED: Final = re.compile(r"\$labels\.(\w+)")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((_FILES / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((_FILES / "dashboard.json").read_text(encoding="utf-8"))
    return document


def queries() -> Iterator[tuple[str, str]]:
    """Every query, by the alert's name or the panel's title."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def asked(query: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics that a query names, and the labels that it needs of them."""
    found = list(_METRIC.finditer(query))
    grouped = {label.strip() for labels in _BY.findall(query) for label in labels.split(",")}
    for match in found:
        yield match[1], set(_MATCHER.findall(match[2] or "")) | (grouped if len(found) == 1 else set())


@pytest.mark.parametrize(("name", "query"), [pytest.param(*each, id=each[0]) for each in queries()])
def test_a_query_asks_for_metrics_and_labels_that_there_are(name: str, query: str) -> None:
    known = exposed()
    metrics = list(asked(query))
    assert metrics, name
    for metric, labels in metrics:
        plain = _OF_HISTOGRAMS.sub("", metric)
        own = known[metric] if metric in known else known[plain] | {"le"}
        assert labels <= own | _OF_SCRAPES


def test_every_metric_that_counts_turns_or_memory_is_on_the_dashboard() -> None:
    shown = {_OF_HISTOGRAMS.sub("", metric) for _, query in queries() for metric, _ in asked(query)}
    left_out = {"engine_healthy", "truth_distance_nats"}
    assert set(exposed()) - shown == left_out


def test_every_alert_says_what_to_do_of_labels_that_it_has() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        text = " ".join(rule["annotations"].values())
        grouped = {label.strip() for labels in _BY.findall(rule["expr"]) for label in labels.split(",")}
        assert set(_ANNOTATED.findall(text)) <= (grouped or _OF_SCRAPES), rule["alert"]
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)


def test_panels_have_ids_of_their_own_and_do_not_lie_on_one_another() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_both_are_made_only_where_they_are_asked_for(helm: Helm) -> None:
    assert {"ConfigMap", "PrometheusRule"}.isdisjoint(kinds(helm.render(CHART)))
    values = {
        "dashboard": {"enabled": True, "annotations": {"grafana_folder": "Inference"}},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
    }
    rendered = helm.render(CHART, values={"monitoring": values})
    config = find(rendered, "ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["metadata"]["annotations"] == {"grafana_folder": "Inference"}
    assert json.loads(config["data"]["kvloop.json"]) == dashboard()
    rule = find(rendered, "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"]["groups"][0]["rules"] == rules()
