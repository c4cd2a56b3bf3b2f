"""Runs one container's process, and takes everything below it along when that process, or the node, ends.

Started by ``process`` as ``python -I -S shim.py LOG PROGRAM ARGUMENT…`` with the container's environment; it imports
nothing of kvloop. Standard output carries one line, ``started PID`` or ``failed REASON``. Standard input carries
orders: ``T`` sends SIGTERM to the process (and only to it, as to a container's process 1), ``K`` kills all; its end
means that the node is gone, which also kills all. The exit status is the process's own, 128 + N after signal N.

A pod's /dev/shm goes with the pod; here it is the machine's, so that what killed processes had mapped of it is removed.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NOT_STARTED = 127
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - looked for, not written to


def main(log: str, command: list[str]) -> int:
    """Run ``command`` to its end and return its exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphans of the container come to this process instead of to init, so that none can get away.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    error_read, error_write = os.pipe()
    shim = os.getpid()
    child = os.fork()
    if child == 0:
        _become(log, command, libc=libc, shim=shim, errors=error_write)
    os.close(error_write)
    error = os.read(error_read, 4096).decode()
    os.close(error_read)
    os.write(1, f"failed {error}\n".encode() if error else f"started {child}\n".encode())
    return _watch(child, wake_read)


def _become(log: str, command: list[str], *, libc: ctypes.CDLL, shim: int, errors: int) -> None:
    """Turn the forked child into the container's process; never returns."""
    try:
        os.setsid()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != shim:
            os._exit(_NOT_STARTED)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execv(command[0], command)  # noqa: S606 - running the command it is given is what it is for
    except OSError as error:
        os.write(errors, f"{command[0]}: {error.strerror}".encode())
    finally:
        os._exit(_NOT_STARTED)


def _watch(child: int, wake: int) -> int:
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(wake, select.POLLIN)
    shared: set[str] = set()
    while True:
        status = _reap(child)
        if status is not None:
            _kill_rest(shared)
            for name in shared:
                Path(name).unlink(missing_ok=True)
            return status
        for descriptor, _ in poll.poll():
            order = os.read(descriptor, 4096)
            if descriptor == wake:
                continue
            if not order:
                poll.unregister(0)
            shared |= _shared_memory()
            if not order or b"K" in order:
                _kill(child)
            elif b"T" in order:
                os.kill(child, signal.SIGTERM)


def _reap(child: int) -> int | None:
    """Collect what ended; the exit status of ``child`` once it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else 128 - code


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _kill_rest(shared: set[str]) -> None:
    """Kill what the process left behind. Each death hands its children to this process, until none is left.

    Adds the shared memory of what had to be killed to ``shared``.
    """
    while True:
        shared |= _shared_memory()
        for pid in _children(_parents()):
            _kill(pid)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children(parents: dict[int, int]) -> list[int]:
    return [pid for pid, parent in parents.items() if parent == os.getpid()]


def _shared_memory() -> set[str]:
    """Files in /dev/shm that descendants of this process have mapped."""
    parents = _parents()
    found: set[str] = set()
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid() and pid != ancestor:
            try:
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            except OSError:
                continue
            found |= {_SHARED_MEMORY + line.partition(_SHARED_MEMORY)[2] for line in lines if _SHARED_MEMORY in line}
    return found


def _parents() -> dict[int, int]:
    """Each process of the machine and its parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            # The second field is the name in parentheses, which may hold anything; the parent is the second behind it.
            found[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
