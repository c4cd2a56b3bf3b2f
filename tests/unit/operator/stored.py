"""Objects as an API server keeps them after a server-side apply: what it fills in, rewrites and writes down of owners.

Not a model of the API server: ``tests/control_plane/test_compare.py`` asks the real one. This one is for the cases that
would take too many requests.
"""

from __future__ import annotations

import contextlib
import copy
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any

from kvloop_operator.compare import MANAGER

Path = tuple[str | int, ...]

_FILLED_IN = ("protocol", "apiGroup")
_IDENTITY = (("metadata",), ("metadata", "name"), ("metadata", "namespace"))

_NAMED = (
    "containers",
    "initContainers",
    "env",
    "volumes",
    "resourceClaims",
    "claims",
    "imagePullSecrets",
)
_WHOLE_MAPS = (
    "configMapKeyRef",
    "fieldRef",
    "labelSelector",
    "nodeSelector",
    "podSelector",
    "requiredDuringSchedulingIgnoredDuringExecution",
    "resourceFieldRef",
    "roleRef",
    "secretKeyRef",
    "selector",
)
_KEYS = {
    **dict.fromkeys(_NAMED, ("name",)),
    "conditions": ("type",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeMounts": ("mountPath",),
}


def stored(manifest: Mapping[str, Any], manager: str = MANAGER) -> dict[str, Any]:
    """``manifest`` after an apply by ``manager`` to an empty place."""
    live: dict[str, Any] = copy.deepcopy(dict(manifest))
    for key, value in live.pop("stringData", {}).items():
        live.setdefault("data", {})[key] = b64encode(value.encode()).decode()
    live["metadata"] |= {"uid": "a-uid", "generation": 1, "resourceVersion": "1"}
    live["metadata"]["managedFields"] = [
        {"manager": manager, "operation": "Apply", "fieldsType": "FieldsV1", "fieldsV1": _applied(manifest)},
        {
            "manager": "kube-controller-manager",
            "operation": "Update",
            "subresource": "status",
            "fieldsType": "FieldsV1",
            "fieldsV1": {"f:status": {"f:replicas": {}}},
        },
    ]
    return live


def list_keys(manifest: Mapping[str, Any], path: Path) -> tuple[str, ...] | None:
    """The keys by which server-side apply tells the entries of the list at ``path`` apart; None for any other list."""
    if path[-1] != "ports":
        return _KEYS.get(str(path[-1]))
    if manifest["kind"] == "Service":
        return ("port", "protocol")
    return ("containerPort", "protocol") if "containers" in path or "initContainers" in path else None


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of everything that is neither a map nor a list."""
    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        yield path
    for key, entry in children:
        yield from leaves(entry, (*path, key))


def branches(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of every entry of a map or a list, at any depth."""
    children: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in children:
        yield (*path, key)
        yield from branches(entry, (*path, key))


def removable(manifest: Mapping[str, Any]) -> list[Path]:
    """What a manifest can lose: nothing that says which object, or which entry of a list, it is, and nothing that the
    API server fills in again."""
    paths = []
    for path in branches(manifest):
        identity = path[0] in ("apiVersion", "kind") or path[:2] in _IDENTITY
        keys = list_keys(manifest, path[:-2]) if len(path) > 2 and isinstance(path[-2], int) else None
        if not identity and path[-1] not in _FILLED_IN and (keys is None or path[-1] not in keys):
            paths.append(path)
    return paths


def at(document: Any, path: Path) -> Any:
    """What stands at ``path``."""
    for step in path:
        document = document[step]
    return document


def replaced(document: Any, path: Path, value: Any) -> Any:
    """A copy of ``document`` with another value at ``path``."""
    changed = copy.deepcopy(document)
    at(changed, path[:-1])[path[-1]] = value
    return changed


@contextlib.contextmanager
def changed(document: Any, path: Path, value: Any) -> Iterator[None]:
    """``document`` itself with another value at ``path``, for a while: a copy takes a hundred times as long."""
    holder, kept = at(document, path[:-1]), at(document, path)
    holder[path[-1]] = value
    yield
    holder[path[-1]] = kept


@contextlib.contextmanager
def lost(document: Any, path: Path) -> Iterator[None]:
    """``document`` itself without what stands at ``path``, for a while."""
    holder = at(document, path[:-1])
    kept = copy.copy(holder)
    del holder[path[-1]]
    yield
    if isinstance(holder, list):
        holder[:] = kept
    else:
        holder.clear()
        holder.update(kept)


def another(value: Any) -> Any:
    """A value of the same type that is not equal."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"{value}x"


def _applied(manifest: Mapping[str, Any]) -> dict[str, Any]:
    owned = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "metadata")}
    metadata = {key: value for key, value in manifest["metadata"].items() if key not in ("name", "namespace")}
    return _fields(manifest, {"metadata": metadata, **owned} if metadata else owned, ())


def _fields(manifest: Mapping[str, Any], value: Any, path: Path) -> dict[str, Any]:
    if path and path[-1] in _WHOLE_MAPS:
        return {}
    if isinstance(value, Mapping):
        return {f"f:{key}": _fields(manifest, entry, (*path, key)) for key, entry in value.items()}
    keys = list_keys(manifest, path) if isinstance(value, list) and path else None
    if keys is None:
        return {}
    tree = {}
    for entry in value:
        key = {name: entry.get(name, "TCP") for name in keys}
        below = {".": {}, **_fields(manifest, entry, (*path, "[]"))}
        tree[f"k:{json.dumps(key, separators=(',', ':'))}"] = below if path[-1] != "imagePullSecrets" else {}
    return tree
