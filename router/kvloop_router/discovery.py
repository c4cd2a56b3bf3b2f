"""Engines from a file that is watched: a JSON list, replaced by a rename whenever it changes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvloop_connector.settings import Role
from kvloop_router.engine_spec import EngineSpec

_log = logging.getLogger(__name__)

_KINDS = {str: "string", bool: "boolean"}


class InvalidEngines(ValueError):
    """The engines file cannot be used. The message names the entry and the field."""


def parse_engines(text: str) -> tuple[EngineSpec, ...]:
    """The engines in the file's text. Raises InvalidEngines."""
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidEngines(f"not JSON: {error}") from error
    if not isinstance(entries, list):
        raise InvalidEngines("not a list of engines")
    specs = tuple(_spec(index, entry) for index, entry in enumerate(entries))
    if len({spec.name for spec in specs}) != len(specs):
        raise InvalidEngines("two engines have the same name")
    return specs


async def watch(
    path: Path,
    update: Callable[[tuple[EngineSpec, ...]], Awaitable[None]],
    *,
    interval: float,
) -> None:
    """Give ``update`` the engines in the file, now and after each change. Looks every ``interval`` seconds.

    A file that is missing or malformed leaves the engines as they were, with one line in the log.
    """
    seen: object = None
    while True:
        seen, specs = _look(path, seen)
        if specs is not None:
            await update(specs)
        await asyncio.sleep(interval)


def _look(path: Path, seen: object) -> tuple[object, tuple[EngineSpec, ...] | None]:
    """What the file looks like now, and its engines where that is not as ``seen``. The file is small and local."""
    try:
        stat = path.stat()
        now: object = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if now == seen:
            return seen, None
        return now, parse_engines(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        now, fault = "missing", "it is missing"
    except InvalidEngines as error:
        fault = str(error)
    except OSError as error:
        now, fault = "unreadable", str(error)
    if now != seen:
        _log.warning("the engines file %s is left unused: %s", path, fault)
    return now, None


def _spec(index: int, entry: Any) -> EngineSpec:
    if not isinstance(entry, dict):
        raise InvalidEngines(f"entry {index}: not an object")
    for field in ("name", "role", "url", "podUID", "kvRevision"):
        if not isinstance(entry.get(field), str) or not entry[field]:
            raise InvalidEngines(f"entry {index}: {field}: missing or not a string")
    for field, kind in (("process", str), ("model", str), ("draining", bool), ("ending", bool)):
        if not isinstance(entry.get(field, kind()), kind):
            raise InvalidEngines(f"entry {index}: {field}: not a {_KINDS[kind]}")
    try:
        role = Role(entry["role"])
    except ValueError:
        raise InvalidEngines(f"entry {index}: role: neither prefill nor decode") from None
    return EngineSpec(
        name=entry["name"],
        role=role,
        url=entry["url"].rstrip("/"),
        pod_uid=entry["podUID"],
        # Whoever writes the file without it gives each process a podUID of its own.
        process=entry.get("process") or entry["podUID"],
        kv_revision=entry["kvRevision"],
        zone=str(entry.get("zone") or ""),
        model=entry.get("model", ""),
        draining=entry.get("draining", False) or entry.get("ending", False),
        ending=entry.get("ending", False),
    )
