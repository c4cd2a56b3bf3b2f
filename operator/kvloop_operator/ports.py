"""Putting ports right that somebody has changed, where an apply alone is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvloop_operator.keeping import CONTAINER_LISTS, Path
from kvloop_operator.live import Object, part


def ports_put_right(live: Object, desired: Object) -> list[dict[str, Any]]:
    """A JSON patch of ``live`` without which an apply of ``desired`` is refused; empty where there is no need.

    A port is told from the others by its number and protocol. Where somebody has changed these, an apply adds a second
    port under the same name, which is not valid: the changed one has to be put right first.
    """
    operations: list[dict[str, Any]] = []
    for path, wanted in _port_lists(desired, ()):
        steps, ports = _followed(live, path)
        for index, port in enumerate(ports):
            for other in wanted:
                if other.get("name") is not None and other["name"] == port.get("name"):
                    pointer = "/" + "/".join([*steps, str(index)])
                    operations += [
                        {"op": "add", "path": f"{pointer}/{field}", "value": other[field]}
                        for field in ("port", "containerPort", "protocol")
                        if field in other and other[field] != port.get(field)
                    ]
    if not operations:
        return []
    version = part(live, "metadata").get("resourceVersion")
    return [{"op": "test", "path": "/metadata/resourceVersion", "value": version}, *operations]


def _port_lists(desired: Any, path: tuple[str, ...]) -> Iterator[tuple[Path, list[Mapping[str, Any]]]]:
    """The lists of ports of Services and containers, by a path in which containers go by their names."""
    for key, value in desired.items():
        if isinstance(value, Mapping):
            yield from _port_lists(value, (*path, key))
        elif key in CONTAINER_LISTS:
            for container in value:
                yield from _port_lists(container, (*path, key, container["name"]))
        elif key == "ports":
            yield (*path, key), value


def _followed(live: Any, path: Path) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Where in ``live`` the list at ``path`` stands, and what is in it."""
    steps: list[str] = []
    for step in path:
        if isinstance(live, list):
            index = next((at for at, entry in enumerate(live) if part(entry).get("name") == step), None)
            live = live[index] if index is not None else None
            steps.append(str(index))
        else:
            live = live.get(step) if isinstance(live, Mapping) else None
            steps.append(step)
    return steps, [part(entry) for entry in live] if isinstance(live, list) else []
