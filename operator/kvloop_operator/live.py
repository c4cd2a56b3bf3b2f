"""What is there of one resource in the cluster, as the API server gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Object = Mapping[str, Any]
"""An object of the API server, as JSON."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An event that says why a pod is not made, or does not start.

    kind, name: of the object that the event is about: a StatefulSet or a ReplicaSet (reason ``FailedCreate``), or a
        pod (``FailedMount``, ``FailedAttachVolume``, ``FailedCreatePodSandBox``).
    message: as the event has it.
    """

    kind: str
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Live:
    """Live objects of one resource.

    children: by kind and name, of every kind that ``desired`` renders; only those that the resource owns.
    pods: engine and router pods, by their label ``kvloop.io/deployment``; terminating ones too.
    refusals: read only while a pod is missing or not starting.
    """

    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    pods: tuple[Object, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def part(value: object, *path: str) -> Mapping[str, Any]:
    """The object below ``value`` at ``path``; empty where there is none."""
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def entries(value: object, *path: str) -> list[Mapping[str, Any]]:
    """The objects in the list below ``value`` at ``path``; none where there is no list."""
    found = part(value, *path[:-1]).get(path[-1])
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list | tuple) else []


def text(value: object, *path: str) -> str:
    """The text below ``value`` at ``path``; empty where there is none."""
    found = part(value, *path[:-1]).get(path[-1])
    return found if isinstance(found, str) else ""


def count(value: object, *path: str) -> int:
    """The whole number below ``value`` at ``path``; 0 where there is none."""
    found = part(value, *path[:-1]).get(path[-1])
    return found if isinstance(found, int) and not isinstance(found, bool) else 0
