"""Whether watches still deliver: what a whole list shows and no watch delivers within a while. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvloop_operator.cluster.store import version_of
from kvloop_operator.live import Object

GRACE_SECONDS: Final = 90.0
"""A silent watch is opened anew after 70 s (kopf's inactivity timeout); one that is silent for longer is dead."""

_Place = tuple[str, str, str]


@dataclass(slots=True)
class WatchLag:
    """The versions that watches have delivered, and those that they owe."""

    _delivered: dict[_Place, int] = field(default_factory=dict)
    _owed: dict[_Place, tuple[int, float]] = field(default_factory=dict)

    def delivered(self, found: Object, *, deleted: bool = False) -> None:
        """A watch has given this object."""
        place, version = _place(found), version_of(found)
        if deleted:
            self._delivered.pop(place, None)
        else:
            self._delivered[place] = max(version, self._delivered.get(place, 0))
        owed = self._owed.get(place)
        if owed is not None and owed[0] <= version:
            del self._owed[place]

    def listed(self, kind: str, objects: Iterable[Object], now: float) -> None:
        """A whole list of a watched kind has given these objects."""
        there = set()
        for found in objects:
            place, version = _place(found), version_of(found)
            there.add(place)
            if version > self._delivered.get(place, 0) and place not in self._owed:
                self._owed[place] = (version, now)
        for place in [place for place in self._owed if place[0] == kind and place not in there]:
            del self._owed[place]

    def dead(self, now: float, *, grace: float = GRACE_SECONDS) -> list[str]:
        """The kinds whose watch owes something for too long."""
        return sorted({place[0] for place, (_, since) in self._owed.items() if now - since > grace})


def _place(found: Object) -> _Place:
    meta = found["metadata"]
    return found["kind"], meta["namespace"], meta["name"]
