"""What stands in for a container image on the local node: where its commands are found, and what it sets."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessImage:
    """An image whose containers run as processes of this machine.

    path: directories in which the first word of a command is looked up, before the system's.
    entrypoint: runs where a container has no ``command``.
    environment: what the image's own ENV would set; a container's ``env`` comes on top.
    when_ready: called with the ids of all processes of a container each time it becomes ready.
    """

    path: tuple[Path, ...] = ()
    entrypoint: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    when_ready: Callable[[Sequence[int]], None] | None = None

    @property
    def search_path(self) -> str:
        return ":".join([*(str(directory) for directory in self.path), SYSTEM_PATH])

    def find(self, word: str) -> str | None:
        """The program that the first word of a command names; None when there is none."""
        return shutil.which(word, path=self.search_path)
