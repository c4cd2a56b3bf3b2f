"""What an init container leaves for an engine: a package that its Python imports, and a plug-in that vLLM finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SEEN = """
import importlib.metadata, json, kvloop_connector, kvloop_connector.engine.start
found = importlib.metadata.entry_points(group="vllm.general_plugins")
print(json.dumps({
    "entry points": {entry.name: callable(entry.load()) for entry in found},
    "package": kvloop_connector.__file__,
}))
"""

PLUG_INS = {"kvloop_allow_leases": True, "kvloop_stream_handle": True}


def deliver(target: Path) -> None:
    subprocess.run([sys.executable, "-m", "kvloop_connector.delivery", str(target)], check=True)


def seen_by_an_engine(path: str) -> Any:
    # -S: without site-packages, where kvloop itself is installed.
    command = [sys.executable, "-S", "-c", SEEN]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def test_package_and_plug_in_are_found_in_the_directory_alone(tmp_path: Path) -> None:
    deliver(tmp_path / "new")

    found = seen_by_an_engine(str(tmp_path / "new"))

    assert found["entry points"] == PLUG_INS
    assert Path(found["package"]).is_relative_to(tmp_path)


def test_a_second_start_of_the_init_container_changes_nothing(tmp_path: Path) -> None:
    deliver(tmp_path)
    first = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    deliver(tmp_path)

    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == first
    assert not [path for path in first if path.suffix == ".pyc"]


def test_two_directories_on_the_path_give_one_plug_in(tmp_path: Path) -> None:
    deliver(tmp_path / "one")
    deliver(tmp_path / "two")

    found = seen_by_an_engine(f"{tmp_path / 'one'}:{tmp_path / 'two'}")

    assert found["entry points"] == PLUG_INS


def test_any_user_may_read_what_was_delivered(tmp_path: Path) -> None:
    deliver(tmp_path)

    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_mode & 0o044 != 0o044] == []
