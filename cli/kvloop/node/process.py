"""Processes of containers, each below a shim of its own (``shim``)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SHIM = Path(__file__).with_name("shim.py")


class StartFailed(Exception):
    """The program could not be executed; the message says why."""


class Process:
    """A running process and all its descendants. ``wait`` must be awaited to the end by whoever started it."""

    def __init__(self, shim: asyncio.subprocess.Process, pid: int) -> None:
        self._shim = shim
        self.pid = pid

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, environment: Mapping[str, str], directory: Path, log: Path = Path(os.devnull)
    ) -> Process:
        """Start ``argv`` (its first word an absolute path) with exactly ``environment``; both outputs go to ``log``."""
        shim = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(SHIM), str(log), *argv,
            env=dict(environment), cwd=directory, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        process = cls(shim, 0)
        try:
            assert shim.stdout is not None  # noqa: S101 - a pipe was asked for
            word, _, rest = (await shim.stdout.readline()).decode().strip().partition(" ")
        except BaseException:
            await process.destroy()
            raise
        if word != "started":
            await process.wait()
            raise StartFailed(rest or "the shim ended before it could start the process")
        process.pid = int(rest)
        return process

    @property
    def exit_code(self) -> int | None:
        """The exit status, 128 + N after signal N; None while it runs."""
        return self._shim.returncode

    async def wait(self) -> int:
        """Wait for the end of the process and of everything below it; gives the exit status."""
        code = await self._shim.wait()
        self._close()
        return code

    def terminate(self) -> None:
        """SIGTERM to the process itself."""
        self._order(b"T")

    def kill(self) -> None:
        """SIGKILL to the process and everything below it."""
        self._order(b"K")

    async def destroy(self) -> None:
        """Kill and wait, even in a task that is being cancelled: the shim kills all when its orders end."""
        self._close()
        await asyncio.shield(self._shim.wait())

    def tree(self) -> list[int]:
        """The process and its descendants at this moment."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    children.setdefault(parent, []).append(int(entry.name))
        found, left = [], [self._shim.pid]
        while left:
            found += (below := children.get(left.pop(), []))
            left += below
        return found

    def _order(self, order: bytes) -> None:
        if self._shim.returncode is None and self._shim.stdin is not None:
            self._shim.stdin.write(order)

    def _close(self) -> None:
        if self._shim.stdin is not None:
            self._shim.stdin.close()
