"""Whoever is killed, and however: no process, mount, cgroup or folder of the cluster stays."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.cluster import cluster
from tests.cluster.fixtures import skip_where_unavailable
from tests.cluster.paths import REPOSITORY
from tests.cluster.state import Size, State
from tests.cluster.supervisor import sweep
from tests.cluster.waiting import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.timeout(1200)

_SIZES: Final[tuple[Size, ...]] = ("control-plane", "node")
_OWNER: Final = """
import sys
from tests.cluster import cluster
with cluster.running(sys.argv[1]) as running:
    print(running.state.root, flush=True)
    sys.stdin.read()
"""


@contextmanager
def _owner(size: Size) -> Iterator[tuple[subprocess.Popen[str], State]]:
    """A process that has a cluster, as a run of tests does."""
    with skip_where_unavailable():
        cluster.require(size)
    command = [sys.executable, "-c", _OWNER, size]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, State(Path(process.stdout.readline().strip()))
        finally:
            process.kill()


def _processes(state: State) -> list[int]:
    """Processes that name the cluster's folder, or are in its cgroups: pods too."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(state.root).encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue  # it has just ended
    for cgroup in _cgroups(state):
        for file in cgroup.rglob("cgroup.procs"):
            found |= set(map(int, file.read_text().split()))
    return sorted(found)


def _cgroups(state: State) -> list[Path]:
    if not state.cgroups.exists():
        return []
    return [Path(line) for line in state.cgroups.read_text().splitlines() if Path(line).exists()]


def _mounts(state: State) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(state.root) in line]


def _end(pid: int, number: signal.Signals) -> None:
    handle = os.pidfd_open(pid)
    signal.pidfd_send_signal(handle, number)
    select.select([handle], [], [], DEADLINE_SECONDS)
    os.close(handle)


@pytest.mark.parametrize("size", _SIZES)
def test_nothing_is_left_of_a_cluster_whose_owner_was_killed(size: Size) -> None:
    with _owner(size) as (process, state):
        cgroups = _cgroups(state)
        assert len(_processes(state)) > 3
        assert bool(cgroups) == (size == "node")
        process.kill()
        process.wait()
        # The supervisor removes the folder last, and is then the only process.
        wait_until(lambda: not state.root.exists() and _processes(state) == [], what="end of the cluster")
    assert _mounts(state) == []
    assert [cgroup for cgroup in cgroups if cgroup.exists()] == []


@pytest.mark.parametrize("size", _SIZES)
def test_nothing_runs_on_when_the_supervisor_was_killed_and_the_next_start_sweeps_up(size: Size) -> None:
    with _owner(size) as (_, state):
        cgroups = _cgroups(state)
        _end(int(state.supervisor.read_text()), signal.SIGKILL)
        wait_until(lambda: _processes(state) == [], what="end of every process")
        assert _mounts(state) == []
        sweep()
    assert not state.root.exists()
    assert [cgroup for cgroup in cgroups if cgroup.exists()] == []


def test_a_sweep_leaves_clusters_that_run_alone() -> None:
    with _owner("control-plane") as (process, state):
        sweep()
        assert state.ready.exists()
        assert process.poll() is None
