"""Files that may change while the router runs, such as a mounted Secret's: read anew, and taken over where they are
good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from kvloop_router.errors import InvalidConfig

_log = logging.getLogger(__name__)

Look = tuple[tuple[int, int, int] | None, ...]


class Reloading:
    """Watches files. ``done``: called with the files' name and ``ok`` or ``failed``, each time that they have changed.

    They are local, and looked at by their size, time and inode: a volume of a Secret is changed by a link that is
    replaced.
    """

    def __init__(self, done: Callable[[str, str], None]) -> None:
        self._done = done
        self._watched: list[tuple[str, Sequence[Path], Callable[[], None]]] = []
        self._seen: list[Look] = []

    def watch(self, name: str, paths: Sequence[Path], load: Callable[[], None]) -> None:
        """Call ``load`` whenever one of ``paths`` has changed. If it raises InvalidConfig, what was read before goes on
        to be used."""
        self._watched.append((name, paths, load))
        self._seen.append(_look(paths))

    async def run(self, *, interval: float) -> None:
        """Look every ``interval`` seconds."""
        while self._watched:
            await asyncio.sleep(interval)
            self.look()

    def look(self) -> None:
        """Look once."""
        for index, (name, paths, load) in enumerate(self._watched):
            now = _look(paths)
            if now == self._seen[index]:
                continue
            self._seen[index] = now
            try:
                load()
            except InvalidConfig as error:
                _log.warning("changed files are left unused", extra={"files": name, "error": str(error)})
                self._done(name, "failed")
            else:
                _log.info("changed files are in use", extra={"files": name})
                self._done(name, "ok")


def _look(paths: Sequence[Path]) -> Look:
    return tuple(_look_at(path) for path in paths)


def _look_at(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
