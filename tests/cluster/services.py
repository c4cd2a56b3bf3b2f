"""Long-running child processes of the supervisor, and whom it runs for."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from tests.cluster import debian
from tests.cluster.errors import ClusterFailedError

READY_SECONDS: Final = 240
"""Bound on the start of a cluster: some fifty times what a quiet machine takes."""

_POLL_SECONDS: Final = 0.05


class StoppedError(Exception):
    """The owner wants the cluster to end, or has gone."""


class Owner:
    """Whom the cluster runs for: the other end of standard input, or with `detached` whoever sends SIGTERM."""

    def __init__(self, *, detached: bool) -> None:
        signalled, self._signal = os.pipe()
        self._watched = [signalled] if detached else [signalled, sys.stdin.fileno()]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        os.write(self._signal, b".")

    def wait(self, seconds: float) -> None:
        """Wait. Raises StoppedError as soon as the owner wants the end."""
        if select.select(self._watched, [], [], seconds)[0]:
            raise StoppedError


class Services:
    """Child processes that end with the supervisor, however that ends."""

    def __init__(self, *, logs: Path, owner: Owner) -> None:
        self._logs = logs
        self._owner = owner
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def start(self, name: str, command: Sequence[str], *, before: Callable[[], None] | None = None) -> int:
        """Start a process with its output in `NAME.log`; `before` runs in the child. Returns its process id."""
        setpriv = debian.find("setpriv") or "setpriv"
        with self.log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                [setpriv, "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=before,  # the supervisor has one thread
            )
        return self._running[name].pid

    def check(self) -> None:
        """Raise ClusterFailedError if a process has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise ClusterFailedError(f"{name} ended with {process.returncode}:\n{self.tail(name)}")

    def tail(self, name: str, *, characters: int = 4000) -> str:
        log = self.log(name)
        return log.read_text(errors="replace")[-characters:] if log.exists() else ""

    def wait_until(self, condition: Callable[[], bool], *, what: str) -> None:
        """Wait for a state. Raises ClusterFailedError if a process ends or READY_SECONDS pass before."""
        deadline = time.monotonic() + READY_SECONDS
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {log.stem}\n{self.tail(log.stem, characters=1000)}" for log in self._all_logs())
                raise ClusterFailedError(f"not within {READY_SECONDS} s: {what}\n{logs}")
            self._owner.wait(_POLL_SECONDS)

    def _all_logs(self) -> list[Path]:
        return sorted(self._logs.glob("*.log"))

    def watch(self) -> None:
        """Wait until the owner wants the end (StoppedError) or a process ends (ClusterFailedError)."""
        while True:
            self.check()
            self._owner.wait(1)

    def stop(self) -> None:
        """End every process at once: nothing that they hold outlives the cluster."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        self._running.clear()
