"""Runs a command and ends it, and all it started, as soon as standard input closes.

A process that holds the other end of a pipe cannot die without closing it, whatever kills it; so nothing that a test
starts through this outlives the test run. Started as the leader of a new session; SIGTERM is passed on to the command.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main(command: list[str]) -> None:
    """Never returns: kills its own process group in the end."""
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
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
