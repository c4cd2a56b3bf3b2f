"""Merging the user's pod-template overlay, last, without letting it change what kvloop owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from kvloop_operator import names

# Lists whose entries are told apart by a field, as in core/v1's merge keys.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
}

_OWN_POD_FIELDS = frozenset(
    {
        "restartPolicy",
        "serviceAccountName",
        "terminationGracePeriodSeconds",
        "hostname",
        "subdomain",
        "shareProcessNamespace",
    }
)
_OWN_CONTAINER_FIELDS = frozenset({"image", "command", "args", "ports", "lifecycle", "workingDir"})
_OWN_VOLUME_PREFIX = "kvloop-"


def conflicts(overlay: Mapping[str, Any], container: str, env: frozenset[str]) -> Iterator[str]:
    """Paths, below the pod template, at which ``overlay`` touches what kvloop owns.

    container: name of kvloop's own container in the pod.
    env: names of the variables that kvloop sets in it.
    """
    meta, spec = overlay.get("metadata") or {}, overlay.get("spec") or {}
    for label in meta.get("labels") or {}:
        if _own_label(label):
            yield f"metadata.labels.{label}"
    for field in spec:
        if field in _OWN_POD_FIELDS:
            yield f"spec.{field}"
    for index, entry in enumerate(_entries(spec, "containers")):
        if entry.get("name") == container:
            yield from _container_conflicts(entry, f"spec.containers[{index}]", env)
    for index, entry in enumerate(_entries(spec, "volumes")):
        if str(entry.get("name", "")).startswith(_OWN_VOLUME_PREFIX):
            yield f"spec.volumes[{index}].name"


def merged(template: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """``template`` with ``overlay`` merged into it; neither is changed. Maps are merged, lists of named entries are
    merged by name, everything else is replaced."""
    result = _merge(template, overlay)
    return result if isinstance(result, dict) else dict(template)


def _container_conflicts(entry: Mapping[str, Any], path: str, env: frozenset[str]) -> Iterator[str]:
    for field in entry:
        if field in _OWN_CONTAINER_FIELDS:
            yield f"{path}.{field}"
    for index, variable in enumerate(_entries(entry, "env")):
        if variable.get("name") in env:
            yield f"{path}.env[{index}].name"
    for index, mount in enumerate(_entries(entry, "volumeMounts")):
        if str(mount.get("name", "")).startswith(_OWN_VOLUME_PREFIX):
            yield f"{path}.volumeMounts[{index}].name"


def _own_label(label: str) -> bool:
    return label.startswith(names.OWN_PREFIX) or label in names.OWN_LABELS


def _entries(parent: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    found = parent.get(field)
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []


def _merge(base: Any, over: Any, field: str = "") -> Any:
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        result = {key: deepcopy(value) for key, value in base.items()}
        for key, value in over.items():
            result[key] = _merge(base[key], value, key) if key in base else deepcopy(value)
        return result
    key = _MERGE_KEYS.get(field)
    if key is not None and isinstance(base, list) and isinstance(over, list):
        return _merge_named(base, over, key)
    return deepcopy(over)


def _merge_named(base: list[Any], over: list[Any], key: str) -> list[Any]:
    result = deepcopy(base)
    position = {entry.get(key): index for index, entry in enumerate(result)}
    for entry in over:
        index = position.get(entry.get(key)) if isinstance(entry, Mapping) else None
        if index is None:
            result.append(deepcopy(entry))
        else:
            result[index] = _merge(result[index], entry)
    return result
