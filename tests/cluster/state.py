"""The folder that one running cluster keeps its files in, and what its owner is told once it is ready."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final, Literal

Size = Literal["control-plane", "node"]

PREFIX: Final = "kvloop-cluster-"


@dataclass(frozen=True, slots=True)
class State:
    """Paths below the folder of one cluster. Short, for unix sockets' sake."""

    root: Path

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def audit_log(self) -> Path:
        return self.root / "audit.jsonl"

    @property
    def api_socket(self) -> Path:
        return self.root / "api.sock"

    @property
    def containerd_socket(self) -> Path:
        return self.root / "containerd.sock"

    @property
    def cgroups(self) -> Path:
        """A file that lists the cgroups made for this cluster."""
        return self.root / "cgroups"

    @property
    def supervisor(self) -> Path:
        """A file with the supervisor's process id."""
        return self.root / "supervisor.pid"

    @property
    def ready(self) -> Path:
        return self.root / "ready.json"

    def kubeconfig(self, identity: str) -> Path:
        return self.root / "kubeconfig" / identity

    def create(self) -> None:
        for folder in (self.root, self.keys, self.logs, self.root / "kubeconfig"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def lock(self) -> IO[str] | None:
        """Hold the folder for as long as the returned file is open; None if somebody else does."""
        lock = (self.root / "lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        return lock

    def is_held(self) -> bool:
        """Whether the cluster of this folder runs."""
        if not self.supervisor.exists():
            return False
        lock = self.lock()
        if lock is not None:
            lock.close()
        return lock is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a ready cluster tells its owner."""

    server: str
    """The API server's address on this machine."""
    init_pid: int | None
    """Process 1 of the node's namespaces, as this machine counts; None without a node."""


def write_ready(state: State, ready: Ready) -> None:
    growing = state.ready.with_suffix(".part")
    growing.write_text(json.dumps(asdict(ready)))
    growing.rename(state.ready)


def read_ready(state: State) -> Ready:
    return Ready(**json.loads(state.ready.read_text()))


def new_state() -> State:
    return State(Path(tempfile.mkdtemp(prefix=PREFIX)))


def all_states() -> list[State]:
    """Of every cluster of this user on this machine that was started, whether it still runs or not."""
    folders = (State(folder) for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"))
    return [state for state in folders if state.supervisor.exists() and state.root.stat().st_uid == os.geteuid()]
