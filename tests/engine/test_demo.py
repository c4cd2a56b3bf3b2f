"""``kvloop demo`` as its users run it, on real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvloop_connector.settings import Connector
from tests.harness.engines import engine_environment
from tests.harness.fixtures import REAL_ENGINES
from tests.integration.test_demo import kvloop

EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.yaml"

pytestmark = [*REAL_ENGINES, pytest.mark.long]


@pytest.mark.parametrize("connector", Connector)
def test_the_demonstration_reuses_what_each_turn_left(tmp_path: Path, connector: Connector) -> None:
    environment = str(engine_environment())
    json_file = tmp_path / "demo.json"
    resource = tmp_path / "resource.yaml"
    text = EXAMPLE.read_text()
    resource.write_text(text.replace("  kvTransfer:\n", f"  kvTransfer:\n    connector: {connector.value}\n"))

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
