"""Runs a script of this directory in the engine's environment, with kvloop's plug-in and without an engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from kvloop.engine_plugin import make_plugin_directory
from tests.harness.engines import engine_environment

_ROOT = Path(__file__).parents[2]


def answer_of(script: str, directory: Path) -> dict[str, Any]:
    """The JSON object that ``script`` prints. Its first argument is a file with a seal key."""
    python = engine_environment() / "bin" / "python"
    key = directory / "key"
    key.write_bytes(os.urandom(32).hex().encode() + b"\n")
    plugin = make_plugin_directory(directory / "plugin")
    # Logs go to the error output, which leaves the standard one to the answer.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(plugin), str(_ROOT)]),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [str(python), "-P", str(Path(__file__).with_name(script)), str(key)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return dict(json.loads(ran.stdout))
