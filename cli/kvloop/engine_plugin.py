"""The directory that, laid on an engine's PYTHONPATH, brings kvloop's plug-in into it.

The engine's environment is shared between checkouts and holds nothing of kvloop; so the plug-in is brought by whoever
starts the engine: a link to the connector package, and the metadata by which vLLM finds its entry points.
"""

from __future__ import annotations

from pathlib import Path

from kvloop import patience
from kvloop_connector.delivery import PACKAGE, write_metadata


def make_plugin_directory(target: Path, *, patient: bool = False) -> Path:
    """Fill ``target`` (made if missing, may exist from before) and return it; put it on the engine's PYTHONPATH.

    patient: what waits sleeps instead of spinning (``kvloop.patience``). A decode engine that retains a handle never
        goes idle, nor do NIXL's progress threads, and on few cores they starve prefill; timings are worth nothing then.
    """
    target.mkdir(parents=True, exist_ok=True)
    link = target / PACKAGE.name
    if not link.is_symlink() or link.resolve() != PACKAGE:
        link.unlink(missing_ok=True)
        link.symlink_to(PACKAGE)
    write_metadata(target)
    site = target / "sitecustomize.py"
    if patient:
        site.write_text(Path(patience.__file__).read_text())
    else:
        site.unlink(missing_ok=True)
    return target
