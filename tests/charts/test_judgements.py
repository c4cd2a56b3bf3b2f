"""Argo CD, by the shipped script, and Flux and Helm, by kstatus, judge alike whatever the operator says."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from tests.charts.argo import health
from tests.charts.kstatus import kstatus
from tests.unit.operator.test_status_properties import lived, seeds

_ALIKE = {"Healthy": "Current", "Progressing": "InProgress", "Degraded": "Failed"}


@settings(max_examples=200, deadline=None)
@given(seeds)
def test_what_the_operator_says_is_judged_alike(seed: int) -> None:
    situation, assessment = lived(seed)
    resource: dict[str, Any] = {"metadata": {"generation": situation.generation}, "status": assessment.status}
    judged = health(resource)
    found = {each["type"]: each for each in assessment.status["conditions"]}
    if judged.status == "Suspended":
        assert "Paused" in found or found["Ready"]["reason"] == "Suspended"
        assert kstatus(resource) != "Failed"
    else:
        assert kstatus(resource) == _ALIKE[judged.status]
    reason, _, message = judged.message.partition(": ")
    assert any((each["reason"], each["message"]) == (reason, message) for each in found.values())
