"""The directory that, laid on an engine's PYTHONPATH, brings kvloop's plug-in into it.

The engine's environment is shared between checkouts and holds nothing of kvloop; so the plug-in is brought by whoever
starts the engine: a link to the connector package, and the metadata by which vLLM finds its entry points.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, distribution
from pathlib import Path

import kvloop_connector
from kvloop import patience

_DISTRIBUTION = "kvloop-engine-plugin"


def make_plugin_directory(target: Path, *, patient: bool = False) -> Path:
    """Fill ``target`` (made if missing, may exist from before) and return it; put it on the engine's PYTHONPATH.

    patient: what waits sleeps instead of spinning (``kvloop.patience``). A decode engine that retains a handle never
        goes idle, nor do NIXL's progress threads, and on few cores they starve prefill; timings are worth nothing then.
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
    if patient:
        site.write_text(Path(patience.__file__).read_text())
    else:
        site.unlink(missing_ok=True)
    return target


def _entry_points(entry_points: tuple[EntryPoint, ...] | list[EntryPoint]) -> str:
    lines: list[str] = []
    for group in sorted({entry.group for entry in entry_points if entry.group.startswith("vllm.")}):
        lines.append(f"[{group}]")
        lines += [f"{entry.name} = {entry.value}" for entry in entry_points if entry.group == group]
    return "\n".join(lines) + "\n"
