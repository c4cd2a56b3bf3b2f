"""Pure pieces of the build, and what a broken or interrupted build leaves."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster import build, paths, versions
from tests.cluster.errors import ClusterUnavailableError, CommandFailedError
from tests.cluster.parts import NODE_PARTS, GoCommand, Part, go_is_suitable, needed_go, requirement, run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLOOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("version", "suitable"),
    [
        ("go version go1.26.8 linux/amd64", True),
        ("go version go1.26.3 linux/amd64", True),
        ("go version go1.27rc1 linux/amd64", True),
        ("go version go1.26 linux/amd64", False),
        ("go version go1.9.7 linux/amd64", False),
        ("go: command not understood", False),
    ],
)
def test_a_go_is_suitable_if_it_is_as_new_as_every_go_mod_says(version: str, suitable: bool) -> None:
    needed = needed_go(["module a\n\ngo 1.9\n", "module b\n\ngo 1.26.3\n", "module c\n\ngo 1.26\n"])
    assert needed == (1, 26, 3)
    assert go_is_suitable(version, needed=needed) is suitable


def test_the_go_of_the_requirement_file_builds_every_module() -> None:
    pinned = requirement(versions.GO_WHEEL, paths.REQUIREMENTS.read_text()).splitlines()[0].split("==")[1].split()[0]
    needed = needed_go([module.read_text() for module in paths.MODULES.glob("*/go.mod")])
    assert go_is_suitable(f"go version go{pinned} linux/amd64", needed=needed)


def test_one_package_is_taken_out_of_a_requirement_file_with_its_hashes_and_nothing_else() -> None:
    text = (
        "a==1 \\\n    --hash=sha256:aa\n    # via x\na-b==2 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\nc==3\n"
    )
    assert requirement("a-b", text) == "a-b==2 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n"


def test_a_package_that_is_not_pinned_is_named() -> None:
    with pytest.raises(ClusterUnavailableError, match="does not pin missing"):
        requirement("missing", "a==1\n")


def test_a_part_is_built_once_and_then_found(cache: Path) -> None:
    part = Part(name="greeting", sources=(), build=_greet)
    folder = build.ensure(part)
    (folder / "mark").touch()
    assert build.ensure(part) == folder
    assert {file.name for file in folder.iterdir()} == {"greeting", "mark"}


def test_a_part_lies_elsewhere_once_its_source_changes(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("one")
    part = Part(name="greeting", sources=(source,), build=_greet)
    before = build.location(part)
    source.write_text("two")
    assert build.location(part) != before


def test_a_build_that_failed_leaves_nothing_that_counts_as_built(cache: Path) -> None:
    part = Part(name="broken", sources=(), build=_break)
    with pytest.raises(CommandFailedError):
        build.ensure(part)
    with pytest.raises(ClusterUnavailableError, match="not built: broken"):
        build.require([part])


def test_many_builders_at_once_build_a_part_once(cache: Path) -> None:
    part = Part(name="counted", sources=(), build=_count)
    with ThreadPoolExecutor(4) as builders:
        folders = list(builders.map(build.ensure, [part] * 4))
    assert folders == [build.location(part)] * 4
    assert (cache / "count").read_text() == "built\n"


def test_no_two_parts_share_a_name() -> None:
    assert len({part.name for part in NODE_PARTS}) == len(NODE_PARTS)


def test_the_error_of_a_command_holds_its_output() -> None:
    with pytest.raises(CommandFailedError, match=re.compile("exit 3.*no such thing", re.DOTALL)):
        run("sh", "-c", "echo no such thing >&2; exit 3")


def _greet(target: Path, _go: GoCommand) -> None:
    (target / "greeting").write_text(versions.KUBERNETES)


def _break(target: Path, _go: GoCommand) -> None:
    (target / "half").touch()
    run("false")


def _count(_target: Path, _go: GoCommand) -> None:
    with (paths.cache() / "count").open("a") as count:
        count.write("built\n")
