"""Merging the user's pod-template overlay, last, without letting it change what kvloop owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from kvloop_operator import names

Path = tuple[str | int, ...]

# Lists whose entries are told apart by a field, as in core/v1's merge keys.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "resourceClaims": "name",
}

_OWN_POD_FIELDS = (
    # What the StatefulSet or Deployment needs.
    "restartPolicy",
    "hostname",
    "subdomain",
    # What the resource has fields for; a list here would replace kvloop's own.
    "affinity",
    "nodeSelector",
    "tolerations",
    "topologySpreadConstraints",
    "imagePullSecrets",
    "priorityClassName",
    "runtimeClassName",
    "serviceAccount",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
)
_OWN_CONTAINER_FIELDS = ("image", "imagePullPolicy", "command", "args", "ports", "lifecycle", "resources")


def own_paths(template: Mapping[str, Any], overlay: Mapping[str, Any]) -> Iterator[Path]:
    """Where ``overlay`` touches what kvloop owns in ``template``, a pod template with kvloop's container first."""
    for label in _map(_map(overlay, "metadata"), "labels"):
        if label.startswith(names.OWN_PREFIX) or label in names.OWN_LABELS:
            yield "metadata", "labels", label
    spec = _map(overlay, "spec")
    yield from (("spec", field) for field in _OWN_POD_FIELDS if field in spec)
    container = template["spec"]["containers"][0]
    for index, entry in _entries(spec, "containers"):
        if entry.get("name") == container["name"]:
            yield from (("spec", "containers", index, *path) for path in _own_in_container(container, entry))
    for field in ("initContainers", "volumes"):
        own = [each["name"] for each in template["spec"].get(field, ())]
        for index, entry in _entries(spec, field):
            if entry.get("name") in own:
                yield "spec", field, index


def merged(template: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """``template`` with all of ``overlay`` that kvloop does not own merged into it; neither is changed.

    Maps are merged, lists of named entries are merged by name, everything else is replaced.
    """
    free = deepcopy(dict(overlay))
    # Last entries first, so that positions in a list stay what they are.
    for path in sorted(own_paths(template, overlay), key=str, reverse=True):
        _remove(free, path)
    return _merge_maps(template, free)


def _own_in_container(container: Mapping[str, Any], entry: Mapping[str, Any]) -> Iterator[Path]:
    yield from ((field,) for field in _OWN_CONTAINER_FIELDS if field in entry)
    for field, key in (("env", "name"), ("volumeMounts", "mountPath")):
        taken = [own[key] for own in container[field]]
        yield from ((field, index) for index, each in _entries(entry, field) if each.get(key) in taken)


def _map(parent: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    found = parent.get(field)
    return found if isinstance(found, Mapping) else {}


def _entries(parent: Mapping[str, Any], field: str) -> list[tuple[int, Mapping[str, Any]]]:
    found = parent.get(field)
    if not isinstance(found, list):
        return []
    return [(index, entry) for index, entry in enumerate(found) if isinstance(entry, Mapping)]


def _remove(document: Any, path: Sequence[str | int]) -> None:
    for step in path[:-1]:
        document = document[step]
    del document[path[-1]]


def _merge_maps(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = {key: deepcopy(value) for key, value in base.items()}
    for key, value in over.items():
        result[key] = _merge(base[key], value, key) if key in base else deepcopy(value)
    return result


def _merge(base: Any, over: Any, field: str) -> Any:
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return _merge_maps(base, over)
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
            result[index] = _merge(result[index], entry, "")
    return result
