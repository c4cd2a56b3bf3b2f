"""Whether applying a manifest would change anything, without asking the API server.

A server-side apply that changes nothing is a mutating request too, so that only what this module finds is applied. It
knows what the API server does with what it is given: it fills in defaults, writes quantities in its own way, drops
empty values and turns a Secret's text into base64; and, by ``metadata.managedFields``, what an apply would take away or
take over.

Only an operator that sees its own writes can rely on it: a live object that is older than the last apply gives a
difference that is there no more.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvloop_operator.live import Object, entries, part
from kvloop_operator.quantity import amount

MANAGER = "kvloop-operator"
"""Field manager of the children."""

Path = tuple[str, ...]

TEMPLATE: Path = ("spec", "template")
_PLANNED: tuple[Path, ...] = (TEMPLATE, ("spec", "replicas"), ("spec", "updateStrategy", "rollingUpdate", "partition"))

# The keys by which server-side apply tells the entries of a list apart; other lists are replaced as a whole.
_LIST_KEYS: Mapping[str, tuple[str, ...]] = {
    "claims": ("name",),
    "conditions": ("type",),
    "containers": ("name",),
    "env": ("name",),
    "ephemeralContainers": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
_CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")
_KEY_DEFAULTS = {"protocol": "TCP"}

_QUANTITY_MAPS = ("requests", "limits", "overhead")
_QUANTITY_FIELDS = ("sizeLimit", "divisor")
_FREE_MAPS = ("annotations", "data", "labels", "matchLabels", "nodeSelector", "selector", "stringData")

# What everybody who writes an object says, and nobody owns.
_NOBODYS: frozenset[Path] = frozenset({("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")})

# Empty objects that say something. The API server drops or fills in all others.
_MEANT_EMPTY = ("emptyDir", "namespaceSelector", "podSelector")


def covers(live: Object, desired: Object) -> bool:
    """Whether ``live`` has everything that ``desired`` has; it may have more."""
    return next(_missing(live, _as_stored(desired), ()), None) is None


def differences(live: Object, desired: Object) -> list[str]:
    """Where ``live`` does not have what ``desired`` has."""
    return [_shown(path) for path in _missing(live, _as_stored(desired), ())]


def owned_but_unwanted(live: Object, desired: Object, manager: str = MANAGER) -> list[str]:
    """What ``manager`` applied to ``live`` and ``desired`` no longer has: an apply removes it."""
    return [_shown(path) for path in _unwanted(_owned(live, manager), desired, ())]


def wanted_but_not_owned(live: Object, desired: Object, manager: str = MANAGER) -> list[str]:
    """What ``desired`` has and ``manager`` does not own: somebody else has written it since the last apply."""
    return [_shown(path) for path in _not_owned(_owned(live, manager), desired, ())]


def needs_apply(live: Object, desired: Object, manager: str = MANAGER) -> list[str]:
    """What a forced server-side apply of ``desired`` by ``manager`` would change; empty where it is not needed."""
    return [_shown(path) for path in _changes(live, desired, manager)]


def template_wanted(live: Object, desired: Object, manager: str = MANAGER) -> bool:
    """Whether a StatefulSet's pod template is the desired one."""
    return not any(_within(path, TEMPLATE) for path in _changes(live, desired, manager))


def statefulset_needs_apply(live: Object, desired: Object, manager: str = MANAGER) -> list[str]:
    """The same as ``needs_apply`` without what the rollout planner decides: template, replicas and partition."""
    changes = _changes(live, desired, manager)
    return [_shown(path) for path in changes if not any(_within(path, planned) for planned in _PLANNED)]


def _changes(live: Object, desired: Object, manager: str) -> list[Path]:
    owned = _owned(live, manager)
    found = [*_missing(live, _as_stored(desired), ()), *_unwanted(owned, desired, ()), *_not_owned(owned, desired, ())]
    return list(dict.fromkeys(found))


def _within(path: Path, parent: Path) -> bool:
    return path[: len(parent)] == parent


def _as_stored(desired: Object) -> Object:
    """``desired`` without its type, which objects in lists do not tell, and with a Secret's text as it is kept."""
    stored = {key: value for key, value in desired.items() if key not in ("apiVersion", "kind", "stringData")}
    if desired.get("kind") == "Secret" and "stringData" in desired:
        encoded = {key: b64encode(value.encode()).decode() for key, value in desired["stringData"].items()}
        stored["data"] = {**desired.get("data", {}), **encoded}
    return stored


def _missing(live: Any, desired: Any, path: Path) -> Iterator[Path]:
    if live is None and _says_nothing(desired, path):
        return
    if isinstance(desired, Mapping):
        if not isinstance(live, Mapping):
            yield path
            return
        for key, value in desired.items():
            yield from _missing(live.get(key), value, (*path, key))
    elif isinstance(desired, list | tuple):
        yield from _missing_entries(live, desired, path)
    elif not _equal(live, desired, path):
        yield path


def _missing_entries(live: Any, desired: Sequence[Any], path: Path) -> Iterator[Path]:
    if not isinstance(live, list | tuple):
        yield path
        return
    keys = _list_keys(path, desired)
    if keys is None:
        if len(live) != len(desired):
            yield path
            return
        for index, (one, other) in enumerate(zip(live, desired, strict=True)):
            yield from _missing(one, other, (*path, str(index)))
        return
    position = {_key_of(entry, keys): index for index, entry in enumerate(live) if isinstance(entry, Mapping)}
    positions = []
    for entry in desired:
        key = _key_of(entry, keys)
        step = (*path, _key_shown(key))
        if key not in position:
            yield step
        else:
            positions.append(position[key])
            yield from _missing(live[position[key]], entry, step)
    if positions != sorted(positions):
        yield path


def _says_nothing(desired: Any, path: Path) -> bool:
    """Whether the API server may leave this value out of what it stores."""
    if isinstance(desired, Mapping):
        if path and path[-1] in _MEANT_EMPTY:
            return False
        return all(_says_nothing(value, (*path, key)) for key, value in desired.items())
    return desired is None or desired in (False, 0, "") or desired == [] or desired == ()


def _equal(live: Any, desired: Any, path: Path) -> bool:
    if _is_quantity(path):
        wanted = amount(desired)
        if wanted is not None:
            return amount(live) == wanted
    # In Python True is 1; in JSON it is not.
    return isinstance(live, bool) is isinstance(desired, bool) and bool(live == desired)


def _is_quantity(path: Path) -> bool:
    if len(path) < 2 or path[-2] in _FREE_MAPS:
        return False
    return path[-2] in _QUANTITY_MAPS or path[-1] in _QUANTITY_FIELDS


def _list_keys(path: Path, desired: Sequence[Any]) -> tuple[str, ...] | None:
    keys = _LIST_KEYS.get(path[-1]) if path else None
    if path[-1:] == ("ports",):
        if path == ("spec", "ports"):
            keys = ("port", "protocol")
        elif len(path) > 2 and path[-3] in _CONTAINER_LISTS:
            keys = ("containerPort", "protocol")
    if keys is None or not all(isinstance(entry, Mapping) for entry in desired):
        return None
    return keys


def _key_of(entry: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple([entry.get(key, _KEY_DEFAULTS.get(key)) for key in keys])


def _key_shown(key: tuple[Any, ...]) -> str:
    return "[" + ",".join(str(value) for value in key if value not in _KEY_DEFAULTS.values()) + "]"


def _owned(live: Object, manager: str) -> Mapping[str, Any]:
    """The fields that ``manager`` has applied, as the tree in ``managedFields``."""
    for entry in entries(live, "metadata", "managedFields"):
        if entry.get("manager") == manager and entry.get("operation") == "Apply":
            return part(entry, "fieldsV1")
    return {}


def _unwanted(owned: Mapping[str, Any], desired: Any, path: Path) -> Iterator[Path]:
    for name, below in owned.items():
        kind, _, rest = name.partition(":")
        if kind == "f":
            if not isinstance(desired, Mapping) or rest not in desired:
                yield (*path, rest)
            elif below:
                yield from _unwanted(below, desired[rest], (*path, rest))
        elif kind == "k":
            key = json.loads(rest)
            entry = _entry(desired, key)
            step = (*path, _key_shown(tuple(key.values())))
            if entry is None:
                yield step
            elif below:
                yield from _unwanted(below, entry, step)
        elif kind == "v" and json.loads(rest) not in desired:
            yield (*path, f"[{rest}]")


def _not_owned(owned: Mapping[str, Any], desired: Mapping[str, Any], path: Path) -> Iterator[Path]:
    for name, value in desired.items():
        step = (*path, name)
        if step in _NOBODYS:
            continue
        below = owned.get(f"f:{name}")
        if below is None:
            if step == ("metadata",):
                yield from _not_owned({}, value, step)
            elif not _says_nothing(value, step):
                yield step
        elif below and isinstance(value, Mapping):
            yield from _not_owned(below, value, step)
        elif below and isinstance(value, list | tuple):
            yield from _not_owned_entries(below, value, step)


def _not_owned_entries(owned: Mapping[str, Any], desired: Sequence[Any], path: Path) -> Iterator[Path]:
    keyed = [(json.loads(name[2:]), below) for name, below in owned.items() if name.startswith("k:")]
    for entry in desired:
        if not isinstance(entry, Mapping):
            if f"v:{json.dumps(entry)}" not in owned:
                yield (*path, f"[{entry}]")
            continue
        found = next((below for key, below in keyed if _has_key(entry, key)), None)
        keys = _list_keys(path, desired)
        step = (*path, _key_shown(_key_of(entry, keys)) if keys else "[]")
        if found is None:
            yield step
        elif found:
            yield from _not_owned(found, entry, step)


def _entry(desired: Any, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if not isinstance(desired, list | tuple):
        return None
    return next((entry for entry in desired if isinstance(entry, Mapping) and _has_key(entry, key)), None)


def _has_key(entry: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    return all(entry.get(name, _KEY_DEFAULTS.get(name)) == value for name, value in key.items())


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
