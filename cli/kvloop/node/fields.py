"""Strict reading of manifests: every key is read, left out with a reason, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvloop.node.errors import UnsupportedManifest

T = TypeVar("T")


@dataclass(slots=True)
class Notices:
    """What the node leaves out, each sentence once, in order of discovery."""

    _seen: dict[str, None] = field(default_factory=dict)

    def add(self, sentence: str) -> None:
        self._seen.setdefault(sentence)

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)


class Fields:
    """One mapping of a manifest, with its path. ``close`` refuses whatever was not accounted for.

    A key whose value is null counts as absent, as in Kubernetes.
    """

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            raise UnsupportedManifest(path, f"expected a mapping, got {type(value).__name__}")
        self.path = path
        self._left: dict[str, Any] = {str(key): item for key, item in value.items() if item is not None}

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        return key in self._left

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The value of ``key``, which must be a ``kind`` (an int passes for a float, a bool never for an int)."""
        if key not in self._left:
            return default
        value = self._left.pop(key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UnsupportedManifest(self.at(key), f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """``get`` for a key that must be there."""
        if key not in self._left:
            raise UnsupportedManifest(self.at(key), "is required")
        return self.get(key, kind, kind())

    def raw(self, key: str) -> Any:
        """The value as it is; None when absent."""
        return self._left.pop(key, None)

    def sub(self, key: str) -> Fields | None:
        """The mapping below ``key``; None when absent."""
        return Fields(self._left.pop(key), self.at(key)) if key in self._left else None

    def subs(self, key: str) -> list[Fields]:
        """The list of mappings below ``key``; empty when absent."""
        items = self.get(key, list, [])
        return [Fields(item, f"{self.at(key)}[{index}]") for index, item in enumerate(items)]

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        items = self.get(key, list, [])
        for index, item in enumerate(items):
            if not isinstance(item, str):
                raise UnsupportedManifest(f"{self.at(key)}[{index}]", f"expected str, got {type(item).__name__}")
        return tuple(items)

    def string_map(self, key: str) -> dict[str, str]:
        """A mapping of strings to strings; empty when absent."""
        items = self.get(key, dict, {})
        for name, item in items.items():
            if not isinstance(item, str):
                raise UnsupportedManifest(f"{self.at(key)}.{name}", f"expected str, got {type(item).__name__}")
        return dict(items)

    def ignore(self, *keys: str) -> bool:
        """Leave ``keys`` out. True when any of them was there with a value that means something."""
        values = [self._left.pop(key, None) for key in keys]
        return any(value not in (None, False, 0, "", [], {}) for value in values)

    def refuse(self, reason: str, *keys: str) -> None:
        """Raise when one of ``keys`` is there with a value that means something."""
        for key in keys:
            if self.ignore(key):
                raise UnsupportedManifest(self.at(key), reason)

    def close(self) -> None:
        """Raise when a key is left that nobody asked for."""
        if self._left:
            raise UnsupportedManifest(self.at(next(iter(self._left))), "the local node does not know this field")
