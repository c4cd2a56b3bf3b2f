"""The distribution's Valkey or Redis server, for handles that routers share.

``python -m tests.harness.store_server`` installs it where it is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.cluster import debian
from tests.cluster.errors import ClusterUnavailableError
from tests.harness.addresses import free_loopback_address

SERVERS: Final = ("valkey-server", "redis-server")
"""Commands, each with the name of its Debian package; newer Debians have the first."""

PORT: Final = 6379
_START_SECONDS: Final = 30.0
_SUPERVISE: Final = Path(__file__).parent / "supervise.py"


def find() -> str:
    """The server's path. Where there is none, the test is skipped, and fails under CI."""
    for command in SERVERS:
        path = shutil.which(command)
        if path is not None:
            return path
    reason = "no valkey-server and no redis-server: run `make store-server` as root on Debian, or install one"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


class StoreServer:
    """A server that keeps nothing on disk, on an address of its own."""

    def __init__(self, directory: Path, *arguments: str, address: str = "") -> None:
        self._directory = directory
        self._arguments = arguments
        self.address = address or free_loopback_address(PORT)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"valkey://{self.address}:{PORT}"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        port = "0" if "--tls-port" in self._arguments else str(PORT)
        own = ("--bind", self.address, "--port", port, "--save", "", "--appendonly", "no")
        # A file of settings has to come first.
        command = (find(), *self._arguments, *own)
        with (self._directory / "store-server.log").open("ab") as log:
            self._process = subprocess.Popen(
                (sys.executable, str(_SUPERVISE), "1", *command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection((self.address, PORT), timeout=1).close()
            except OSError:
                assert time.monotonic() < deadline, (self._directory / "store-server.log").read_text()
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """End it at once, with all that it holds."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None

    def freeze(self) -> None:
        """Have it answer nothing, with its connections open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Have it go on, with all that it was asked meanwhile."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self.kill()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)


@contextmanager
def store_server(directory: Path, *arguments: str, address: str = "") -> Iterator[StoreServer]:
    """A server that runs. arguments: more of its own."""
    server = StoreServer(directory, *arguments, address=address)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def main(commands: Sequence[str] = SERVERS) -> int:
    """Install the first of the servers that the distribution has."""
    if any(shutil.which(command) for command in commands):
        return 0
    failures = []
    for command in commands:
        try:
            debian.install({command: command})
        except ClusterUnavailableError as error:
            failures.append(str(error))
        else:
            return 0
    print("store-server: " + "\n".join(failures), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
