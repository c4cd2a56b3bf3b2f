"""``kvloop render`` and ``kvloop crd``."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvloop.__main__ import main
from kvloop_operator.api.crd import crd
from tests.unit.operator.documents import EXAMPLES, RESOURCES

MINIMAL = EXAMPLES / "minimal.yaml"


def test_it_prints_a_stream_that_can_be_applied(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", str(MINIMAL)]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {each["kind"] for each in documents} >= {"StatefulSet", "Deployment", "Service", "ConfigMap"}
    assert all(each["metadata"]["name"].startswith("qwen3-32b-") for each in documents)


def test_the_same_file_gives_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["render", "-f", str(MINIMAL)])
    first = capsys.readouterr().out
    main(["render", "-f", str(MINIMAL)])
    assert capsys.readouterr().out == first


def test_the_routers_configuration_can_be_read_in_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    main(["render", "-f", str(MINIMAL)])
    assert "  router.yaml: |\n    listen:\n" in capsys.readouterr().out


def test_several_files_and_documents_make_one_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = tmp_path / "two.yaml"
    text = MINIMAL.read_text(encoding="utf-8")
    second.write_text(f"{text}---\n{text.replace('name: qwen3-32b', 'name: other')}", encoding="utf-8")
    main(["render", "-f", str(second)])
    names = {each["metadata"]["name"] for each in yaml.safe_load_all(capsys.readouterr().out)}
    assert {"qwen3-32b-prefill", "other-prefill"} <= names


@pytest.mark.parametrize("file", ["bad/name-with-dot.yaml", "stalled/unknown-instance-type.yaml"])
def test_it_refuses_with_the_lines_of_validate_and_prints_no_manifest(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(RESOURCES / file)
    assert main(["validate", "-f", path]) == 1
    lines = capsys.readouterr().out
    assert main(["render", "-f", str(MINIMAL), path]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == lines


def test_the_crd_is_printed_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == crd()
