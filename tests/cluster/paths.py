"""Where the parts of the test cluster lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
MODULES: Final = Path(__file__).resolve().parent / "modules"
REQUIREMENTS: Final = REPOSITORY / "requirements" / "cluster.txt"


def cache() -> Path:
    """Folder of built parts, outside the tree and shared between checkouts."""
    return Path(os.environ.get("KVLOOP_CACHE") or Path.home() / ".cache" / "kvloop")
