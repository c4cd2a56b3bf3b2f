"""The health script says of every state what Argo CD's users expect of it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.api.v1alpha1.status import DisaggregatedInferenceStatus
from kvloop_operator.check import check
from kvloop_operator.facts import OperatorSettings, resolve
from kvloop_operator.status import ConditionType, Reason
from tests.charts.argo import FOLDER, SCRIPT, Health, LuaError, health
from tests.charts.generated import assert_generated
from tests.charts.kstatus import kstatus

_TESTDATA: Final = sorted((FOLDER / "testdata").glob("*.yaml"))
_EXPECTED: Final[dict[str, Any]] = {
    test["inputPath"]: test["healthStatus"]
    for test in yaml.safe_load((FOLDER / "health_test.yaml").read_text(encoding="utf-8"))["tests"]
}


def _read(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return document


def _conditions(resource: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["type"]: each for each in resource.get("status", {}).get("conditions", ())}


def test_every_recorded_resource_has_its_expected_health() -> None:
    assert {f"testdata/{file.name}" for file in _TESTDATA} == _EXPECTED.keys()


@pytest.mark.parametrize("file", _TESTDATA, ids=lambda file: file.stem)
def test_a_recorded_resource_is_judged_as_expected(file: Path) -> None:
    assert health(_read(file)) == Health(**_EXPECTED[f"testdata/{file.name}"])


@pytest.mark.parametrize("file", _TESTDATA, ids=lambda file: file.stem)
def test_a_recorded_resource_is_one_that_the_operator_writes(file: Path) -> None:
    resource = _read(file)
    status = resource.pop("status", {})
    del resource["metadata"]["generation"]
    parsed = DisaggregatedInference.parse(resource)
    faults = check(parsed, resolve(parsed, OperatorSettings()))
    DisaggregatedInferenceStatus.model_validate_json(json.dumps(status))

    conditions = _conditions({"status": status})
    assert conditions.keys() <= set(ConditionType)
    assert {each["reason"] for each in conditions.values()} <= set(Reason)
    assert {each["observedGeneration"] for each in conditions.values()} <= {status.get("observedGeneration")}
    if "Ready" in conditions:
        assert (conditions["Ready"]["status"] == "False") == ("Stalled" in conditions)
        assert (conditions["Ready"]["reason"] == Reason.INVALID_SPEC) == bool(faults)
    for fault in faults:
        assert str(fault) in conditions["Ready"]["message"]


@pytest.mark.parametrize("file", _TESTDATA, ids=lambda file: file.stem)
def test_flux_and_helm_judge_a_recorded_resource_alike(file: Path) -> None:
    resource = _read(file)
    expected = {
        "Healthy": "Current",
        "Progressing": "InProgress",
        "Degraded": "Failed",
        # Flux waits for one that was paused before it was as it should be; Argo CD shows that it is paused.
        "Suspended": "InProgress" if file.stem == "suspended_paused_unfinished" else "Current",
    }
    if "status" not in resource:
        # kstatus takes a resource without conditions for current; the schema's default of the status is for that.
        resource["status"] = {"observedGeneration": -1}
    assert kstatus(resource) == expected[health(resource).status]


@pytest.mark.parametrize(
    ("kind", "expected"), [("Ready", "Degraded"), ("Stalled", "Degraded"), ("Reconciling", "Progressing")]
)
def test_a_message_that_is_missing_is_no_failure(kind: str, expected: str) -> None:
    bare = {"type": kind, "status": "False" if kind == "Ready" else "True", "reason": "Why"}
    resource = {"metadata": {"generation": 1}, "status": {"observedGeneration": 1, "conditions": [bare]}}
    assert health(resource) == Health(expected, "Why")


def test_conditions_of_no_interest_alone_do_not_make_it_healthy() -> None:
    status = {"observedGeneration": 1, "conditions": [{"type": "PrefillReady", "status": "True", "reason": "AllReady"}]}
    assert health({"metadata": {"generation": 1}, "status": status}).status == "Progressing"


def test_the_interpreter_has_no_more_than_argo_cd_gives(tmp_path: Path) -> None:
    for code in ("string.format('x')", "math.max(1)", "io.read()", "('x'):upper()"):
        script = tmp_path / "health.lua"
        script.write_text(f"return {{status = 'Healthy', message = {code}}}", encoding="utf-8")
        with pytest.raises(LuaError, match="attempt to index"):
            health({}, script)


def test_the_config_map_carries_the_script_as_it_is() -> None:
    head = """\
# What Argo CD has to be told about DisaggregatedInference: its health, by the script in resource_customizations/.
# `make generate` writes it. Patch Argo CD's own ConfigMap with it, or put `data` among the values of its chart.
apiVersion: v1
kind: ConfigMap
metadata:
  name: argocd-cm
  labels:
    app.kubernetes.io/part-of: argocd
data:
  resource.customizations.health.kvloop.io_DisaggregatedInference: |
"""
    script = SCRIPT.read_text(encoding="utf-8")
    text = head + textwrap.indent(script, "    ")
    assert yaml.safe_load(text)["data"] == {"resource.customizations.health.kvloop.io_DisaggregatedInference": script}
    assert_generated(FOLDER.parents[2] / "argocd-cm.yaml", text)
