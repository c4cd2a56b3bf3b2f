"""``kvloop up`` and ``kvloop demo`` as their users run them, on simulated engines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.yaml"
KVLOOP = Path(sys.executable).with_name("kvloop")
SHORT = ("--turns", "3", "--repeat", "1", "--answer-tokens", "16", "--time-scale", "0.2")


def kvloop(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVLOOP, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, timeout=1000
    )


@contextmanager
def up(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running ``kvloop up`` and its router's URL. Ended hard if it was not before."""
    command = [KVLOOP, "up", "-f", EXAMPLE, "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            seen = ""
            for line in process.stdout:
                seen += line
                if found := re.match(r"Router: (http\S+)", line):
                    yield process, found[1]
                    break
            else:
                pytest.fail(f"kvloop up ended:\n{seen}")
        finally:
            process.kill()


def processes_of(state_dir: Path) -> list[str]:
    """Command lines of all processes that belong to a node with this state directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"HOME={state_dir}/".encode() in environment:
                found.append(command.replace(b"\0", b" ").decode())
    return found


def chat(url: str) -> tuple[dict[str, Any], Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response), response.headers


def test_the_demonstration_reuses_what_each_turn_left(tmp_path: Path) -> None:
    json_file, png_file = tmp_path / "demo.json", tmp_path / "demo.png"

    done = kvloop("demo", *SHORT, "--json", json_file, "--png", png_file)

    assert done.returncode == 0, done.stderr
    assert "SIMULATED" in done.stdout
    assert "prefill prefix caching, both arms: off" in done.stdout
    document = json.loads(json_file.read_text())
    assert document["engine"] == "sim"
    assert [turn["turn"] for turn in document["turns"]] == [1, 2, 3]
    assert [turn["path"] for turn in document["turns"]] == ["cold", "warm", "warm"]
    for turn in document["turns"][1:]:
        assert turn["reused_tokens"] >= 0.9 * turn["left_by_turn_before"]
        assert turn["left_by_turn_before"] > 1000
    assert all(value > 0 for turn in document["turns"] for value in turn["ttft_ms"].values())
    assert png_file.read_bytes().startswith(b"\x89PNG")


def test_a_demonstration_in_which_nothing_is_reused_fails_with_a_line_a_turn(tmp_path: Path) -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    # No prompt of this length misses so many tokens, so that prefill never pulls.
    document["spec"]["kvTransfer"]["kvRecomputeThreshold"] = 100_000
    document["spec"]["router"]["canary"] = {"enabled": False}
    file = tmp_path / "one-way.yaml"
    file.write_text(yaml.safe_dump(document))

    done = kvloop("demo", "-f", file, *SHORT)

    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "with reuse on" in line]
    assert [line.split(" with")[0] for line in lines] == ["turn 2", "turn 3"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_up_serves_and_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    with up("--state-dir", tmp_path) as (process, url):
        answer, headers = chat(url)
        assert answer["choices"][0]["message"]["content"]
        assert (headers["X-Kvloop-Path"], headers["X-Kvloop-Decode"]) == ("cold", "demo-decode-0")
        assert len(processes_of(tmp_path)) > 2

        process.send_signal(number)
        assert process.wait(timeout=120) == 0

    assert processes_of(tmp_path) == []
    assert {file.name for file in (tmp_path / "logs").rglob("*.log")} == {"engine.log", "router.log"}


def test_a_port_that_is_taken_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with up("--state-dir", tmp_path / "first") as (_, url):
        port = url.rpartition(":")[2]

        done = kvloop("up", "-f", EXAMPLE, "--port", port, "--state-dir", tmp_path / "second")

    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_an_engine_that_does_not_start_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["engine"]["args"] = ["--num-gpu-blocks-override", "2"]
    file = tmp_path / "too-small.yaml"
    file.write_text(yaml.safe_dump(document))

    done = kvloop("up", "-f", file, "--port", "0")

    assert done.returncode == 1
    assert "keeps failing" in done.stderr
    assert "raise --num-gpu-blocks-override" in done.stderr


def test_real_engines_without_an_environment_are_told_with_the_remedy() -> None:
    done = kvloop("up", "-f", EXAMPLE, "--engine", "vllm", KVLOOP_ENGINE_ENVIRONMENT="")

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "make engine-environment" in done.stderr
