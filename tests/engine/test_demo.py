"""``kvloop demo`` as its users run it, on real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.harness.engines import engine_environment
from tests.harness.fixtures import REAL_ENGINES
from tests.integration.test_demo import kvloop

EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.yaml"

pytestmark = [*REAL_ENGINES, pytest.mark.long]


@pytest.mark.parametrize(
    ("settings", "leases"),
    [
        pytest.param({"connector": "NixlConnector"}, False, id="stock"),
        pytest.param({"connector": "NixlConnector", "enginePlugin": "Enabled"}, True, id="stock-with-plugin"),
        pytest.param({"connector": "KvloopConnector"}, True, id="verified"),
    ],
)
def test_the_demonstration_reuses_what_each_turn_left(tmp_path: Path, settings: dict[str, str], leases: bool) -> None:
    environment = str(engine_environment())
    json_file, state = tmp_path / "demo.json", tmp_path / "state"
    resource = tmp_path / "resource.yaml"
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["kvTransfer"] |= settings
    resource.write_text(yaml.safe_dump(document))

    done = kvloop(
        *(
            "demo",
            "--file",
            resource,
            "--engine",
            "vllm",
            "--turns",
            "3",
            "--repeat",
            "1",
            "--answer-tokens",
            "8",
            "--json",
            json_file,
            "--state-dir",
            state,
        ),
        KVLOOP_ENGINE_ENVIRONMENT=environment,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIMULATED" not in done.stdout
    document = json.loads(json_file.read_text())
    assert document["engine"] == "vllm"
    assert [turn["path"] for turn in document["turns"]] == ["cold", "warm", "warm"]
    for turn in document["turns"][1:]:
        assert turn["reused_tokens"] >= 0.9 * turn["left_by_turn_before"]
    # What one of the two routers does not use, it releases: by name where the engine's plug-in was loaded.
    [log] = state.rglob("demo-decode-0/engine.log")
    assert ('"POST /v1/kvloop/release HTTP/1.1" 200 OK' in log.read_text()) is leases
