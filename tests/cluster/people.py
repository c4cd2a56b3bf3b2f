"""`python -m tests.cluster.people up|down`: a node to try things on, that stays until it is taken down."""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.cluster import cluster, parts
from tests.cluster.build import location
from tests.cluster.errors import ClusterFailedError, ClusterUnavailableError
from tests.cluster.paths import REPOSITORY
from tests.cluster.state import PREFIX, State
from tests.cluster.supervisor import sweep

STATE: Final = State(Path(tempfile.gettempdir()) / f"{PREFIX}people")


def up() -> None:
    """Start the node unless it runs, and say how it is reached."""
    cluster.require("node")
    if not STATE.is_held():
        sweep()
        with tempfile.TemporaryFile("w+") as log:
            supervisor = subprocess.Popen(
                cluster.supervisor_command("node", STATE, "--detached"),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
            assert supervisor.stdout is not None
            if supervisor.stdout.readline() != b"ready\n":
                log.seek(0)
                raise ClusterFailedError(log.read())
    print(f"export KUBECONFIG={STATE.kubeconfig('admin')}")
    print(f"export PATH={location(parts.KUBECTL)}:$PATH")


def down() -> None:
    """End the node and wait until nothing of it is left."""
    if STATE.is_held():
        process = int(STATE.supervisor.read_text())
        handle = os.pidfd_open(process)
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        select.select([handle], [], [])
        os.close(handle)
    sweep()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["up", "down"])
    try:
        up() if parser.parse_args(arguments).action == "up" else down()
    except (ClusterUnavailableError, ClusterFailedError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
