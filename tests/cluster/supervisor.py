"""Runs one cluster for as long as its owner lives: `python -m tests.cluster.supervisor SIZE STATE [--detached]`.

It prints `ready` once the cluster is. It ends the cluster when standard input ends (or, with `--detached`, on SIGTERM),
so that an owner that was killed leaves nothing running; if it is killed itself, the kernel ends its children, and the
next cluster to start sweeps up the empty cgroups and the folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import cgroups, control_plane, node
from tests.cluster.errors import ClusterFailedError, ClusterUnavailableError, CommandFailedError
from tests.cluster.services import Owner, Services, StoppedError
from tests.cluster.state import Size, State, all_states, write_ready


def sweep() -> None:
    """Remove what clusters left whose supervisor was killed."""
    for state in all_states():
        if lock := state.lock():
            with lock:
                remove(state)


def remove(state: State) -> None:
    """Remove the cgroups and the folder of a cluster that does not run."""
    if state.cgroups.exists():
        listed = [Path(line) for line in state.cgroups.read_text().splitlines()]
        if left := cgroups.remove(listed):
            raise ClusterFailedError(f"cgroups still in use: {', '.join(map(str, left))}")
    shutil.rmtree(state.root, ignore_errors=True)


def serve(size: Size, state: State, *, owner: Owner) -> None:
    """Start the cluster, say so, and keep it until the owner wants its end."""
    services = Services(logs=state.logs, owner=owner)
    try:
        start = node.start if size == "node" else control_plane.start
        write_ready(state, start(state, services))
        print("ready", flush=True)
        services.watch()
    except StoppedError:
        pass
    finally:
        services.stop()
        remove(state)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=["control-plane", "node"])
    parser.add_argument("state", type=Path)
    parser.add_argument("--detached", action="store_true", help="run until SIGTERM, whoever started it")
    options = parser.parse_args(arguments)

    state = State(options.state)
    state.create()
    with state.lock() or sys.exit(f"cluster: {state.root} is in use"):
        state.supervisor.write_text(str(os.getpid()))
        try:
            sweep()
            serve(options.size, state, owner=Owner(detached=options.detached))
        except (ClusterFailedError, ClusterUnavailableError, CommandFailedError) as error:
            print(f"cluster: {error}", file=sys.stderr, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
