"""Processes that are measured: started, watched through ``/proc``, ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@contextmanager
def running(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None, says: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """The process, until the context is left. ``says``: its standard output is for the caller, not for ``log``."""
    with log.open("w", encoding="utf-8") as written:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE if says else written,
            stderr=written,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def processor_seconds(process: int) -> float:
    """Processor time of a process and of its children, threads that have ended included."""
    fields = [_stat(member) for member in _family(process)]
    return sum(int(one[11]) + int(one[12]) for one in fields if one) / _TICKS


def resident_kib(process: int) -> int:
    """Resident memory of a process and of its children."""
    return sum(
        int(Path(f"/proc/{member}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_KIB
        for member in _family(process)
    )


def _stat(process: int) -> list[str]:
    """The fields after the command's name, which may hold spaces."""
    return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _family(process: int) -> list[int]:
    members = [process]
    for member in members:
        for task in Path(f"/proc/{member}/task").iterdir():
            members += map(int, (task / "children").read_text(encoding="ascii").split())
    return members
