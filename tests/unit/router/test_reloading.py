"""Files that change while the router runs."""

from __future__ import annotations

from pathlib import Path

from kvloop_router.errors import InvalidConfig
from kvloop_router.reloading import Reloading


def test_a_changed_file_is_read_anew_and_a_bad_one_is_told_once(tmp_path: Path) -> None:
    path, read, done = tmp_path / "file", [], []
    path.write_text("first")

    def load() -> None:
        text = path.read_text() if path.exists() else "bad"
        if text == "bad":
            raise InvalidConfig("bad")
        read.append(text)

    reloading = Reloading(lambda name, outcome: done.append((name, outcome)))
    reloading.watch("keys", (path,), load)

    reloading.look()
    path.write_text("second one")
    reloading.look()
    reloading.look()
    path.unlink()
    reloading.look()
    reloading.look()
    path.write_text("a third")
    reloading.look()

    assert read == ["second one", "a third"]
    assert done == [("keys", "ok"), ("keys", "failed"), ("keys", "ok")]


def test_a_link_that_is_replaced_is_a_change(tmp_path: Path) -> None:
    """As the kubelet changes a volume of a Secret."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(name)
    (tmp_path / "data").symlink_to("one")
    read: list[str] = []
    path = tmp_path / "data" / "key"
    reloading = Reloading(lambda name, outcome: None)
    reloading.watch("keys", (path,), lambda: read.append(path.read_text()))

    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(tmp_path / "data")
    reloading.look()

    assert read == ["two"]
