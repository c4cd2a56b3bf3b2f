"""``kvloop validate``: one line a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloop.__main__ import main
from tests.unit.operator.documents import EXAMPLES, RESOURCES, expected_field, fixtures

MINIMAL = EXAMPLES / "minimal.yaml"


def validate(capsys: pytest.CaptureFixture[str], *files: Path) -> tuple[int, list[str]]:
    status = main(["validate", "-f", *(str(file) for file in files)])
    return status, capsys.readouterr().out.splitlines()


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "resource.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_resource_that_can_be_deployed_gets_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(capsys, MINIMAL) == (0, [])


@pytest.mark.parametrize("file", [*fixtures("bad"), *fixtures("stalled")], ids=lambda file: file.stem)
def test_a_fault_is_a_line_with_file_field_value_and_remedy(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = validate(capsys, file)
    assert status == 1
    (line,) = [line for line in lines if line.startswith(f"{file}: {expected_field(file)}: ")]
    assert "; " in line


def test_the_line_of_an_unknown_field_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    file = RESOURCES / "bad" / "unknown-field.yaml"
    assert validate(capsys, file) == (
        1,
        [f"{file}: spec.prefill.replica: 2: unknown field; did you mean replicas?"],
    )


def test_the_line_of_a_check_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    file = RESOURCES / "stalled" / "unknown-instance-type.yaml"
    assert validate(capsys, file) == (
        1,
        [
            f'{file}: spec.prefill.instanceType: "p5en.24xlarge": an instance type that kvloop does not know; '
            "correct it, or set prefill.accelerator and prefill.efaInterfaces"
        ],
    )


def test_all_files_and_documents_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = MINIMAL.read_text(encoding="utf-8"), (RESOURCES / "bad" / "name-with-dot.yaml").read_text("utf-8")
    status, lines = validate(capsys, written(tmp_path, f"{good}---\n{bad}---\n{bad}"), MINIMAL)
    assert status == 1
    assert len(lines) == 2


def test_other_kinds_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n---\n- 1\n---\n{}\n")
    status, lines = validate(capsys, file)
    assert status == 1
    assert [line.split(": ")[1] for line in lines] == ["kind", "-", "kind"]


def test_another_version_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MINIMAL.read_text(encoding="utf-8").replace("v1alpha1", "v2")
    status, lines = validate(capsys, written(tmp_path, text))
    assert status == 1
    assert ": apiVersion: " in lines[0]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no document"),
        ("# only a comment\n", "no document"),
        ("a: [", "not YAML"),
        ("a: !!python/object:os.system {}", "not YAML"),
        ("kind: DisaggregatedInference\nkind: ConfigMap\n", "stands here twice"),
    ],
)
def test_a_file_without_a_resource_is_reported(
    text: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = validate(capsys, written(tmp_path, text))
    assert status == 1
    assert word in lines[0]
    assert len(lines) == 1


def test_a_missing_file_and_one_that_is_no_text_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    status, lines = validate(capsys, tmp_path / "none.yaml", binary)
    assert status == 1
    assert len(lines) == 2
    assert all("cannot be read" in line for line in lines)


def test_a_date_is_text_as_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MINIMAL.read_text(encoding="utf-8").replace("servedName: qwen3-32b", "servedName: 2026-11-29")
    assert validate(capsys, written(tmp_path, text)) == (0, [])


def test_a_resource_without_metadata_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MINIMAL.read_text(encoding="utf-8").replace("metadata:\n  name: qwen3-32b\n", "")
    status, lines = validate(capsys, written(tmp_path, text))
    assert status == 1
    assert ": metadata: (absent): " in lines[0]


def test_what_is_no_fault_is_a_note_beside_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    file = RESOURCES / "good" / "oldest-engine.yaml"
    assert main(["validate", "-f", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{file}: note: spec.engine.image: " in printed.err
