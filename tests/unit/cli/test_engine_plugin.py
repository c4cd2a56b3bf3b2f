"""The directory that brings kvloop's plug-in into an engine's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvloop_connector
from kvloop.engine_plugin import make_plugin_directory

SEEN = """
import importlib.metadata, json, os, kvloop_connector
found = importlib.metadata.entry_points(group="vllm.general_plugins")
print(json.dumps({
    "entry_points": {entry.name: callable(entry.load()) for entry in found},
    "package": kvloop_connector.__file__,
    "sleeps": os.sched_yield.__name__ == "_yield_by_sleeping",
}))
"""

PLUG_INS = {"kvloop_allow_leases": True, "kvloop_stream_handle": True}


def seen_by_a_process(directory: Path, question: str = SEEN) -> Any:
    """What a Python that knows nothing of this checkout but ``directory`` finds."""
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    # -S: without site-packages, where kvloop itself is installed. site is imported by hand for sitecustomize.
    command = [sys.executable, "-S", "-c", f"import site; site.execsitecustomize()\n{question}"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def test_entry_point_is_found_and_loads_from_this_checkout(tmp_path: Path) -> None:
    found = seen_by_a_process(make_plugin_directory(tmp_path))

    assert found["entry_points"] == PLUG_INS
    assert Path(found["package"]).resolve() == Path(kvloop_connector.__file__).resolve()
    assert not found["sleeps"]


def test_the_paths_for_leases_are_found_under_the_name_that_has_to_be_allowed(tmp_path: Path) -> None:
    question = """
import importlib.metadata, json, pkgutil
from kvloop_connector.lease_requests import PLUGIN, WORKER_EXTENSION
found = importlib.metadata.entry_points(group="vllm.endpoint_plugins")
worker = pkgutil.resolve_name(WORKER_EXTENSION)
print(json.dumps([[entry.name == PLUGIN for entry in found], [name for name in dir(worker) if name[0] != "_"]]))
"""

    allowed, methods = seen_by_a_process(make_plugin_directory(tmp_path), question)

    assert allowed == [True]
    # They become methods of vLLM's worker, which may have none of these names.
    assert methods == ["kvloop_release", "kvloop_renew", "kvloop_set_back"]


def test_waiting_sleeps_where_asked_for(tmp_path: Path) -> None:
    assert seen_by_a_process(make_plugin_directory(tmp_path, patient=True))["sleeps"]


def test_transfers_wait_for_their_sockets_where_asked_for(tmp_path: Path) -> None:
    nixl = tmp_path / "nixl_cu"
    nixl.mkdir()
    (nixl / "__init__.py").touch()
    (nixl / "_bindings.py").write_text("def nixlAgent(name, config):\n    return name, config.pthrDelay\n")
    (tmp_path / "config.py").write_text("pthrDelay = 0\n")
    question = "import json, config; from nixl_cu import _bindings; print(json.dumps(_bindings.nixlAgent('a', config)))"

    assert seen_by_a_process(make_plugin_directory(tmp_path), question) == ["a", 0]
    assert seen_by_a_process(make_plugin_directory(tmp_path, patient=True), question) == ["a", 10_000]


def test_directory_is_made_anew_over_an_old_one(tmp_path: Path) -> None:
    make_plugin_directory(tmp_path, patient=True)
    (tmp_path / "kvloop_connector").unlink()
    (tmp_path / "kvloop_connector").symlink_to(tmp_path / "a checkout that is gone")

    found = seen_by_a_process(make_plugin_directory(tmp_path))

    assert found["entry_points"] == PLUG_INS
    assert not found["sleeps"]
