"""Files that are generated and checked in: `UPDATE_GOLDEN=1` writes them, and their diff is read."""

from __future__ import annotations

import os
from pathlib import Path


def assert_generated(file: Path, content: str) -> None:
    """Hold a file to what it should contain."""
    if os.environ.get("UPDATE_GOLDEN"):
        assert not os.environ.get("CI"), "generated files are not written in CI"
        file.write_text(content, encoding="utf-8")
    assert content == file.read_text(encoding="utf-8"), "run `make generate`, and read the diff"
