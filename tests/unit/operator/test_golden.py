"""Whole manifests, case by case: ``golden/<case>/resource.yaml`` gives ``expected.yaml``.

After a wanted change: ``UPDATE_GOLDEN=1 pytest tests/unit/operator/test_golden.py``, and read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvloop.commands.render import stream
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.check import check
from kvloop_operator.desired import desired
from tests.unit.operator.documents import facts_of, read

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir())


def test_the_cases_that_people_deploy_are_there() -> None:
    assert {"minimal", "efa-p5en", "no-efa", "trainium", "pvc-model", "tp-8-4", "cpu-demo"} <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_manifests_are_the_golden_ones(case: str) -> None:
    parsed = DisaggregatedInference.parse(read(GOLDEN / case / "resource.yaml"))
    facts = facts_of(parsed)
    assert check(parsed, facts) == []
    rendered = stream(desired(parsed, facts))
    expected = GOLDEN / case / "expected.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        assert not os.environ.get("CI"), "golden files are not written in CI"
        expected.write_text(rendered, encoding="utf-8")
    assert rendered == expected.read_text(encoding="utf-8")
