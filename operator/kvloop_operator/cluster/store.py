"""What is known of the cluster: the newest version of every object that watches, lists and the operator's own writes
have given.

An own write is known at once, before its event arrives, and an older event changes nothing any more. What a watch
missed is put right by the next whole list.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvloop_operator import names
from kvloop_operator.cluster.kinds import POD, RESOURCE, Kind
from kvloop_operator.live import Live, Object

_TOMBSTONES: Final = 20_000


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """A resource."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


_Place = tuple[str, str, str]
"""kind, namespace, name"""


class Store:
    """Objects by kind, namespace and name, and by the resource that they belong to."""

    def __init__(self) -> None:
        self._objects: dict[_Place, Object] = {}
        self._members: dict[Key, set[_Place]] = {}
        # Versions at which objects were deleted: what was on its way then must not bring them back.
        self._gone: OrderedDict[_Place, int] = OrderedDict()

    def resources(self) -> list[Key]:
        """Every resource there is."""
        return [Key(namespace, name) for kind, namespace, name in self._objects if kind == names.KIND]

    def resource(self, key: Key) -> Object | None:
        """The resource itself."""
        return self._objects.get((names.KIND, key.namespace, key.name))

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """One object."""
        return self._objects.get((kind.kind, namespace, name))

    def live(self, key: Key, uid: str) -> Live:
        """The objects that the resource of that UID owns, and its pods."""
        children: dict[tuple[str, str], Object] = {}
        pods: list[Object] = []
        for kind, namespace, name in sorted(self._members.get(key, ())):
            found = self._objects[kind, namespace, name]
            if kind == POD.kind:
                pods.append(found)
            elif owned_by(found, uid):
                children[kind, name] = found
        return Live(children=children, pods=tuple(pods))

    def put(self, found: Object) -> Key | None:
        """Take over an object unless a newer version of it is known; gives the resource that is concerned."""
        place, key = _place(found), _key(found)
        version = version_of(found)
        known = self._objects.get(place)
        if version <= self._gone.get(place, -1) or (known is not None and version < version_of(known)):
            return key
        self._forget(place)
        self._objects[place] = found
        if key is not None and place[0] != names.KIND:
            self._members.setdefault(key, set()).add(place)
        return key

    def remove(self, found: Object) -> Key | None:
        """Forget an object that was deleted, unless its name was given anew since; gives the resource concerned."""
        place, version = _place(found), version_of(found)
        known = self._objects.get(place)
        if known is not None and version_of(known) > version:
            return _key(found)
        self._forget(place)
        self._gone[place] = max(version, self._gone.pop(place, -1))
        while len(self._gone) > _TOMBSTONES:
            self._gone.popitem(last=False)
        return _key(found)

    def replace(self, kind: Kind, namespace: str | None, objects: Iterable[Object], version: int) -> None:
        """Take over a whole list, and forget what is not in it and is not newer than it.

        namespace: that the list is of; None: of all. version: of the list.
        """
        listed = set()
        for found in objects:
            listed.add(_place(found))
            self.put(found)
        for place, known in list(self._objects.items()):
            of_list = place[0] == kind.kind and namespace in (None, place[1])
            if of_list and place not in listed and version_of(known) <= version:
                self._forget(place)

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self._objects.values()))

    def _forget(self, place: _Place) -> None:
        known = self._objects.pop(place, None)
        key = _key(known) if known is not None else None
        if key is not None and key in self._members:
            self._members[key].discard(place)
            if not self._members[key]:
                del self._members[key]


def owned_by(found: Object, uid: str) -> bool:
    """Whether the resource of that UID is the object's controller."""
    owners = found["metadata"].get("ownerReferences", ())
    return any(owner.get("uid") == uid and owner.get("controller") for owner in owners)


def version_of(found: Object) -> int:
    """An object's version. Versions of one kind can be compared (Kubernetes API concepts, "Resource versions")."""
    text = str(found["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def _place(found: Object) -> _Place:
    meta = found["metadata"]
    return found["kind"], meta["namespace"], meta["name"]


def _key(found: Object) -> Key | None:
    meta = found["metadata"]
    if found["kind"] == RESOURCE.kind:
        return Key(meta["namespace"], meta["name"])
    name = meta.get("labels", {}).get(names.LABEL_DEPLOYMENT)
    return Key(meta["namespace"], name) if name else None
