"""What the documentation says of measured costs is what was measured last."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_regrets_of_paths_are_those_that_were_played_last() -> None:
    bench = runpy.run_path(str(ROOT / "bench" / "paths.py"))
    result = json.loads(bench["RESULTS"].read_text(encoding="utf-8"))

    assert bench["table"](result) in (ROOT / "docs" / "router.md").read_text(encoding="utf-8"), "run `make bench-paths`"
    assert "simulated" in result


def test_costs_of_proving_are_those_that_were_measured() -> None:
    bench = runpy.run_path(str(ROOT / "bench" / "proof.py"))
    result = json.loads(bench["RESULTS"].read_text(encoding="utf-8"))
    told = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")

    assert bench["table"](result) in told, "copy what `make bench-proof` prints"
    assert result["machine"] in told
