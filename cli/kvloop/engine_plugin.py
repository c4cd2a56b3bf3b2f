"""The directory that, laid on an engine's PYTHONPATH, brings kvloop's plug-in into it.

The engine's environment is shared between checkouts and holds nothing of kvloop; so the plug-in is brought by whoever
starts the engine: a link to the connector package, and the metadata by which vLLM finds its entry points.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, distribution
from pathlib import Path

import kvloop_connector

_DISTRIBUTION = "kvloop-engine-plugin"

_YIELD_BY_SLEEPING = '''\
"""Lets an engine that waits sleep instead of spinning, so that several share few cores. Never for timings."""
import os
import time

os.sched_yield = lambda: time.sleep(0.001)
'''


def make_plugin_directory(target: Path, *, yield_by_sleeping: bool = False) -> Path:
    """Fill ``target`` (made if missing, may exist from before) and return it; put it on the engine's PYTHONPATH.

    yield_by_sleeping: a worker that waits sleeps for 1 ms instead of spinning. A decode engine that retains a handle
    never goes idle, and on few cores its spinning starves prefill; timings are worth nothing then.
    """
    target.mkdir(parents=True, exist_ok=True)
    package = Path(kvloop_connector.__file__).resolve().parent
    link = target / package.name
    if not link.is_symlink() or link.resolve() != package:
        link.unlink(missing_ok=True)
        link.symlink_to(package)
    kvloop = distribution("kvloop")
    metadata = target / f"{_DISTRIBUTION.replace('-', '_')}-{kvloop.version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {kvloop.version}\n")
    (metadata / "entry_points.txt").write_text(_entry_points(kvloop.entry_points))
    site = target / "sitecustomize.py"
    if yield_by_sleeping:
        site.write_text(_YIELD_BY_SLEEPING)
    else:
        site.unlink(missing_ok=True)
    return target


def _entry_points(entry_points: tuple[EntryPoint, ...] | list[EntryPoint]) -> str:
    lines: list[str] = []
    for group in sorted({entry.group for entry in entry_points if entry.group.startswith("vllm.")}):
        lines.append(f"[{group}]")
        lines += [f"{entry.name} = {entry.value}" for entry in entry_points if entry.group == group]
    return "\n".join(lines) + "\n"
