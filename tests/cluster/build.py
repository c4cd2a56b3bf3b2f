"""Builds the parts of the test cluster into the cache: `python -m tests.cluster.build tools|control-plane|node`.

Each part lies in `${KVLOOP_CACHE:-$HOME/.cache/kvloop}/cluster-NAME-HASH`, where HASH covers its pins, its sources and
its recipe. It is built in a folder beside that and renamed when whole, under a lock, so that any number of builders may
run and none sees half a part. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.cluster import debian, parts, paths
from tests.cluster.errors import ClusterUnavailableError, CommandFailedError
from tests.cluster.parts import CONTROL_PLANE_PARTS, GO, KUBECTL, NODE_PARTS, Part

_WANTED: Final[Mapping[str, tuple[Mapping[str, str], Sequence[Part]]]] = {
    "tools": ({}, (KUBECTL,)),
    "control-plane": (debian.CONTROL_PLANE_TOOLS, CONTROL_PLANE_PARTS),
    "node": (debian.NODE_TOOLS, NODE_PARTS),
}
"""By what is asked for: the machine's tools and the parts."""


def location(part: Part) -> Path:
    """The folder of the cache where a part is, once built."""
    digest = hashlib.sha256()
    for content in (
        part.name.encode(),
        part.salt.encode(),
        part.recipe.encode(),
        *(source.name.encode() + b"\0" + source.read_bytes() for source in part.sources),
    ):
        digest.update(len(content).to_bytes(8, "big") + content)
    return paths.cache() / f"cluster-{part.name}-{digest.hexdigest()[:12]}"


def require(wanted: Iterable[Part]) -> None:
    """Raise ClusterUnavailableError unless every part is built."""
    if absent := [part.name for part in wanted if not location(part).is_dir()]:
        raise ClusterUnavailableError(f"not built: {', '.join(absent)}; run `make cluster-parts`")


def ensure(part: Part) -> Path:
    """Build a part unless it is there; returns its folder. Who comes second waits for the first."""
    final = location(part)
    if final.is_dir():
        return final
    with _locked(final.with_name(final.name + ".lock"), part):
        if final.is_dir():
            return final
        growing = final.with_name(final.name + ".part")
        shutil.rmtree(growing, ignore_errors=True)
        growing.mkdir()
        started = time.monotonic()
        _say(f"building {part.name}")
        part.build(growing, _go)
        growing.rename(final)
        _say(f"built {part.name} in {time.monotonic() - started:.0f} s")
    return final


def _go() -> Path:
    machine = shutil.which("go")
    needed = parts.needed_go([module.read_text() for module in paths.MODULES.glob("*/go.mod")])
    if machine is not None and parts.go_is_suitable(parts.run(machine, "version"), needed=needed):
        return Path(machine)
    return ensure(GO) / "go" / "bin" / "go"


@contextlib.contextmanager
def _locked(path: Path, part: Part) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another build of {part.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(message: str) -> None:
    print(f"cluster: {message}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Install the machine's tools and build what one of the two sizes needs; or get kubectl and helm alone."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("what", choices=_WANTED)
    packages, wanted = _WANTED[parser.parse_args(arguments).what]
    try:
        debian.install(packages)
        for part in wanted:
            ensure(part)
    except (ClusterUnavailableError, CommandFailedError) as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
