"""Who owns what of an object, by ``metadata.managedFields``, and what an apply would take away or take over."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvloop_operator.keeping import (
    NOBODYS,
    SELECTORS,
    Path,
    entry_of,
    has_key,
    is_filled_in,
    key_of,
    key_shown,
    list_keys,
    says_nothing,
)
from kvloop_operator.live import Object, entries, part

Tree = Mapping[str, Any]
"""Fields as in ``managedFields``: ``f:`` fields, ``k:`` entries of lists, ``v:`` values of sets; what has nothing below
it is owned as a whole."""


def owners(live: Object, manager: str) -> tuple[Tree, list[Tree]]:
    """What ``manager`` has applied, and what everybody else has written."""
    owned: Tree = {}
    others = []
    for entry in entries(live, "metadata", "managedFields"):
        if entry.get("manager") == manager and entry.get("operation") == "Apply":
            owned = _with_text_as_stored(part(entry, "fieldsV1"))
        else:
            others.append(part(entry, "fieldsV1"))
    return owned, others


def unwanted(owned: Tree, others: list[Tree], live: Any, desired: Any, path: Path) -> Iterator[Path]:
    """What is owned and not wanted, the parts of what is replaced as a whole among it."""
    for name, below in owned.items():
        kind, _, rest = name.partition(":")
        theirs = [tree[name] for tree in others if tree.get(name)]
        if kind == "f":
            if not isinstance(desired, dict) or rest not in desired:
                yield (*path, rest)
                continue
            lived, wanted, step = _get(live, rest), desired[rest], (*path, rest)
            if below:
                yield from unwanted(below, theirs, lived, wanted, step)
            elif not theirs and (wanted or rest in SELECTORS):
                # Owned as a whole, and by nobody in part. Of other empty maps the API server may fill in every field.
                yield from _extra(lived, wanted, step)
        elif kind == "k":
            key = _parsed(rest)
            wanted = entry_of(desired, key)
            step = (*path, key_shown(tuple(key.values())))
            if wanted is None:
                yield step
            else:
                yield from unwanted(below, theirs, entry_of(live, key), wanted, step)
        elif kind == "v" and (not isinstance(desired, list) or _parsed(rest) not in desired):
            yield (*path, f"[{rest}]")


def not_owned(owned: Tree, desired: Mapping[str, Any], path: Path) -> Iterator[Path]:
    """What is wanted and not owned: somebody else has written it, or nobody yet."""
    for name, value in desired.items():
        step = (*path, name)
        if step in NOBODYS:
            continue
        below = owned.get(f"f:{name}")
        if below is None:
            if step == ("metadata",):
                yield from not_owned({}, value, step)
            elif not says_nothing(value, step):
                yield step
        elif below and isinstance(value, dict):
            yield from not_owned(below, value, step)
        elif below and isinstance(value, list):
            yield from _not_owned_entries(below, value, step)


def _with_text_as_stored(owned: Tree) -> Tree:
    """A Secret's text is owned under the name by which it was applied."""
    if "f:stringData" not in owned:
        return owned
    data = {**owned.get("f:data", {}), **owned["f:stringData"]}
    return {**{name: below for name, below in owned.items() if name != "f:stringData"}, "f:data": data}


def _extra(live: Any, desired: Any, path: Path) -> Iterator[Path]:
    """What ``live`` has beyond ``desired``; None is nothing."""
    if isinstance(live, dict) and isinstance(desired, dict):
        holder = path[-2] if path[-1].isdecimal() else path[-1]
        for key, value in live.items():
            step = (*path, key)
            if key in desired:
                yield from _extra(value, desired[key], step)
            elif not says_nothing(value, step) and not is_filled_in(holder, key, value):
                yield step
    elif isinstance(live, list) and isinstance(desired, list):
        if len(live) != len(desired):
            yield path
            return
        for index, (one, other) in enumerate(zip(live, desired, strict=True)):
            yield from _extra(one, other, (*path, str(index)))


def _not_owned_entries(owned: Tree, desired: Sequence[Any], path: Path) -> Iterator[Path]:
    keyed = [(_parsed(name[2:]), below) for name, below in owned.items() if name.startswith("k:")]
    for entry in desired:
        if not isinstance(entry, dict):
            if f"v:{json.dumps(entry)}" not in owned:
                yield (*path, f"[{json.dumps(entry)}]")
            continue
        found = next((below for key, below in keyed if has_key(entry, key)), None)
        keys = list_keys(path, desired)
        step = (*path, key_shown(key_of(entry, keys) or ()) if keys else "[]")
        if found is None:
            yield step
        elif found:
            yield from not_owned(found, entry, step)


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    """The key of an entry, or a value; all objects have the same few."""
    return json.loads(text)


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
