"""Brings the connector into an engine whose image does not have it: ``python3 -m kvloop_connector.delivery DIRECTORY``.

The directory, laid on the engine's PYTHONPATH, holds this package and the metadata by which vLLM finds its plug-in. An
init container that runs the router's image fills it in a volume that the engine's container mounts.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import EntryPoint, distribution
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
"""This package, as it lies here."""

_DISTRIBUTION = "kvloop-engine-plugin"


def deliver(target: Path) -> None:
    """Copy the package and its metadata into ``target``, which is made if it is missing and may be filled already."""
    target.mkdir(parents=True, exist_ok=True)
    leave_out = shutil.ignore_patterns("__pycache__")
    # The mode of files only: a volume's file system may refuse to set times.
    shutil.copytree(PACKAGE, target / PACKAGE.name, ignore=leave_out, copy_function=shutil.copy, dirs_exist_ok=True)
    write_metadata(target)


def write_metadata(target: Path) -> None:
    """Write into ``target`` what makes vLLM find the plug-in of the package beside it.

    It is a distribution of its own, and only one, however often and under how many directories of a path it is found.
    """
    kvloop = distribution("kvloop")
    metadata = target / f"{_DISTRIBUTION.replace('-', '_')}-{kvloop.version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {kvloop.version}\n")
    (metadata / "entry_points.txt").write_text(_entry_points(kvloop.entry_points))


def _entry_points(entry_points: tuple[EntryPoint, ...] | list[EntryPoint]) -> str:
    lines: list[str] = []
    for group in sorted({entry.group for entry in entry_points if entry.group.startswith("vllm.")}):
        lines.append(f"[{group}]")
        lines += [f"{entry.name} = {entry.value}" for entry in entry_points if entry.group == group]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    [directory] = sys.argv[1:]
    deliver(Path(directory))
