"""Whether applying a manifest would change anything, without asking the API server.

A server-side apply that changes nothing is a mutating request too, so that only what this module finds is applied. It
knows what the API server does with what it is given: it fills in defaults, writes quantities in its own way, drops
empty values and turns a Secret's text into base64; and, by ``metadata.managedFields``, what an apply would take away or
take over.

Only an operator that sees its own writes can rely on it: a live object that is older than the last apply gives a
difference that is there no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvloop_operator.keeping import Path, as_stored, equal, key_of, key_shown, list_keys, says_nothing
from kvloop_operator.live import Object
from kvloop_operator.ownership import not_owned, owners, unwanted

MANAGER = "kvloop-operator"
"""Field manager of the children."""

TEMPLATE: Path = ("spec", "template")
_PLANNED: tuple[Path, ...] = (TEMPLATE, ("spec", "replicas"), ("spec", "updateStrategy", "rollingUpdate", "partition"))


def covers(live: Object, desired: Object) -> bool:
    """Whether ``live`` has everything that ``desired`` has; it may have more."""
    return next(_missing(live, as_stored(desired), ()), None) is None


def differences(live: Object, desired: Object) -> list[str]:
    """Where ``live`` does not have what ``desired`` has."""
    return [_shown(path) for path in _missing(live, as_stored(desired), ())]


def owned_but_unwanted(live: Object, desired: Object, manager: str = MANAGER) -> list[str]:
    """What ``manager`` applied to ``live`` and ``desired`` no longer has: an apply removes it."""
    owned, others = owners(live, manager)
    return [_shown(path) for path in unwanted(owned, others, live, as_stored(desired), ())]


def wanted_but_not_owned(live: Object, desired: Object, manager: str = MANAGER) -> list[str]:
    """What ``desired`` has and ``manager`` does not own: somebody else has written it since the last apply."""
    return [_shown(path) for path in not_owned(owners(live, manager)[0], as_stored(desired), ())]


def needs_apply(live: Object, desired: Object, manager: str = MANAGER) -> list[str]:
    """What a forced server-side apply of ``desired`` by ``manager`` would change; empty where it is not needed."""
    return [_shown(path) for path in _changes(live, desired, manager)]


def template_wanted(live: Object, desired: Object, manager: str = MANAGER) -> bool:
    """Whether a StatefulSet's pod template is the desired one."""
    return not template_differences(live, desired, manager)


def template_differences(live: Object, desired: Object, manager: str = MANAGER) -> list[str]:
    """What an apply would change in a StatefulSet's pod template."""
    return [_shown(path) for path in _changes(live, desired, manager) if _within(path, TEMPLATE)]


def statefulset_needs_apply(live: Object, desired: Object, manager: str = MANAGER) -> list[str]:
    """The same as ``needs_apply`` without what the rollout planner decides: template, replicas and partition."""
    changes = _changes(live, desired, manager)
    return [_shown(path) for path in changes if not any(_within(path, planned) for planned in _PLANNED)]


def _changes(live: Object, desired: Object, manager: str) -> list[Path]:
    owned, others = owners(live, manager)
    stored = as_stored(desired)
    found = [*_missing(live, stored, ()), *unwanted(owned, others, live, stored, ()), *not_owned(owned, stored, ())]
    return list(dict.fromkeys(found))


def _within(path: Path, parent: Path) -> bool:
    return path[: len(parent)] == parent


def _missing(live: Any, desired: Any, path: Path) -> Iterator[Path]:
    if live is None and says_nothing(desired, path):
        return
    if isinstance(desired, dict):
        if not isinstance(live, dict):
            yield path
            return
        for key, value in desired.items():
            yield from _missing(live.get(key), value, (*path, key))
    elif isinstance(desired, list):
        yield from _missing_entries(live, desired, path)
    elif not equal(live, desired, path):
        yield path


def _missing_entries(live: Any, desired: Sequence[Any], path: Path) -> Iterator[Path]:
    if live == desired:
        return
    if not isinstance(live, list):
        yield path
        return
    keys = list_keys(path, desired)
    if keys is None:
        if len(live) != len(desired):
            yield path
            return
        for index, (one, other) in enumerate(zip(live, desired, strict=True)):
            yield from _missing(one, other, (*path, str(index)))
        return
    position = {key_of(entry, keys): index for index, entry in enumerate(live)}
    positions = []
    for entry in desired:
        key = key_of(entry, keys)
        step = (*path, key_shown(key or ()))
        if key not in position:
            yield step
        else:
            positions.append(position[key])
            yield from _missing(live[position[key]], entry, step)
    if positions != sorted(positions):
        yield path


def _shown(path: Path) -> str:
    shown = ""
    for step in path:
        if step.startswith("["):
            shown += step
        elif step.isdecimal():
            shown += f"[{step}]"
        elif "." in step or "/" in step:
            shown += f'["{step}"]'
        else:
            shown += f".{step}" if shown else step
    return shown
