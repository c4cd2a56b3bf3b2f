"""Pods -> the engines file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from kvloop.node.engines_file import EnginePod, engine_entries, write

DECODE = EnginePod(
    name="demo-decode-0",
    uid="uid",
    address="127.20.30.2",
    labels={"kvloop.io/role": "decode", "kvloop.io/kv-revision": "0123456789"},
    ports={"http": 8000},
    restarts=0,
    ready=True,
)


def test_a_ready_engine_is_listed_with_all_that_a_router_needs() -> None:
    assert engine_entries([DECODE]) == [
        {
            "name": "demo-decode-0",
            "role": "decode",
            "url": "http://127.20.30.2:8000",
            "podUID": "uid",
            "kvRevision": "0123456789",
            "zone": "",
        }
    ]


def test_only_ready_engines_are_listed_in_a_stable_order() -> None:
    pods = [
        replace(DECODE, name="c"),
        replace(DECODE, name="a"),
        replace(DECODE, name="b", ready=False),
        replace(DECODE, name="router", labels={"kvloop.io/role": "router"}),
        replace(DECODE, name="other", labels={}),
    ]

    assert [entry["name"] for entry in engine_entries(pods)] == ["a", "c"]


def test_a_restarted_container_is_another_engine() -> None:
    identities = {engine_entries([replace(DECODE, restarts=number)])[0]["podUID"] for number in range(3)}

    assert len(identities) == 3


def test_the_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    write(path, [])
    with path.open() as before:
        write(path, engine_entries([DECODE]))

        assert json.load(before) == []
    assert json.loads(path.read_text()) == engine_entries([DECODE])
    assert list(tmp_path.iterdir()) == [path]
