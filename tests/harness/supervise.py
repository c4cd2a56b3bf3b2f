"""``supervise.py GRACE COMMAND…`` runs a command and ends it, and all it started, once standard input closes.

A process that holds the other end of a pipe cannot die without closing it, whatever kills it; so nothing that a test
starts through this outlives the test run. Started as the leader of a new session; SIGTERM is passed on to the command.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(grace: float, command: list[str]) -> None:
    """Never returns: kills its own process group in the end.

    grace: seconds that the command and what it started have to tidy up (shared memory, semaphores).
    """
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    ended = os.pidfd_open(child.pid)
    standard_input = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([standard_input, ended], [], [])
        if ended in ready:
            sys.stderr.write(f"{command[0]} ended with status {child.wait()}\n")
            sys.stderr.flush()
            break
        if not os.read(standard_input, 1024):
            child.terminate()
            break
    _wait_until_alone(child, grace)
    os.killpg(0, signal.SIGKILL)


def _wait_until_alone(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until no other process is in this process's group, or the time is over."""
    group, deadline = os.getpgid(0), time.monotonic() + seconds
    while time.monotonic() < deadline:
        child.poll()  # an ended child counts until it is reaped
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        if not any(_group_of(pid) == group for pid in pids if pid != os.getpid()):
            return
        time.sleep(0.05)


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
