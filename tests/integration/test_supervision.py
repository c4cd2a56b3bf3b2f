"""Nothing that the tests start outlives them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.harness import supervise
from tests.harness.engines import wait_until

SUPERVISE = str(Path(supervise.__file__))
CHILD_OF_A_CHILD = "sleep 600 & echo $! > {file}; wait"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def started(file: Path) -> int:
    assert wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def test_all_ends_when_the_test_run_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    command = [sys.executable, SUPERVISE, "0.1", "sh", "-c", CHILD_OF_A_CHILD.format(file=file)]
    starter = f"import subprocess; subprocess.Popen({command!r}, stdin=subprocess.PIPE, start_new_session=True).wait()"
    run = subprocess.Popen([sys.executable, "-c", starter])
    pid = started(file)

    run.kill()
    run.wait()

    assert wait_until(lambda: not alive(pid))


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    command = [sys.executable, SUPERVISE, "0.1", "sh", "-c", CHILD_OF_A_CHILD.format(file=file).removesuffix("; wait")]

    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as run:
        assert run.stderr is not None
        said = run.stderr.read()

    pid = started(file)
    assert wait_until(lambda: not alive(pid))
    assert b"ended with status 0" in said
