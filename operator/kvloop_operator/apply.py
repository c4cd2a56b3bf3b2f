"""Making a resource's children what they should be: the writes that a difference asks for, and no other."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvloop_operator import names
from kvloop_operator.cluster.api import Api
from kvloop_operator.cluster.errors import ApiError, Forbidden, NotFound, Refused
from kvloop_operator.cluster.kinds import BY_NAME, SECRET, STATEFULSET, Kind
from kvloop_operator.cluster.store import Key, Store, owned_by
from kvloop_operator.compare import needs_apply
from kvloop_operator.live import Live, Object
from kvloop_operator.manifests.common import Manifest
from kvloop_operator.pods import still_needed
from kvloop_operator.ports import ports_put_right
from kvloop_operator.status import Problem, Reason

_log = logging.getLogger(__name__)

_REMEDIES = {
    Reason.FORBIDDEN: "give the operator's account the roles of the chart of its own version",
    Reason.APPLY_FAILED: "change the spec, or what refuses it; it is tried again",
}


class PredecessorRemains(Exception):
    """What belonged to an earlier resource of the same name is still being deleted."""


Place = tuple[str, str]
"""kind, name"""


@dataclass(frozen=True, slots=True)
class Resisted:
    """A write after which the object was not as its manifest wants it: something in the API server, such as an
    admission webhook, has it another way. Writing the same again would change nothing, for ever."""

    manifest: Mapping[str, Any]
    paths: tuple[str, ...]


@dataclass(slots=True)
class Children:
    """The writes for one resource in one pass.

    resisted: what earlier passes could not change; kept by the caller. problems: what the API server refused, for the
    status.
    """

    api: Api
    store: Store
    key: Key
    uid: str
    resisted: dict[Place, Resisted] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    async def apply(self, manifests: Iterable[Manifest], live: Live) -> None:
        """Apply, in order, what is not live yet. Raises PredecessorRemains and ApiError, but not for what was refused:
        that is among the problems, and the rest goes on."""
        for manifest in manifests:
            place = manifest["kind"], manifest["metadata"]["name"]
            await self.apply_one(manifest, live.children.get(place))

    async def apply_one(self, manifest: Manifest, live: Object | None) -> Object | None:
        """Apply one manifest unless ``live`` is as it wants; gives what is live then, None where that was refused."""
        kind = BY_NAME[manifest["kind"]]
        paths: Sequence[str] = ()
        if live is not None:
            paths = needs_apply(live, manifest)
            if not paths or self.resists(manifest, paths):
                return live
        elif not await self.free(kind, manifest["metadata"]["name"]):
            return None
        return await self.write(kind, manifest, paths, live=live)

    async def write(
        self, kind: Kind, manifest: Mapping[str, Any], paths: Sequence[str], *, live: Object | None
    ) -> Object | None:
        """Apply one manifest; ``paths``: why, for the log. ``live``: what is there."""
        name = manifest["metadata"]["name"]
        ports = ports_put_right(live, manifest) if live is not None else []
        try:
            if ports:
                await self.api.patch(kind, self.key.namespace, name, ports)
            written = await self.api.apply(kind, manifest)
        except (Forbidden, Refused) as error:
            self._refused(error, f"{kind.kind} {name}")
            return None
        _log.info("applied", extra={"resource": str(self.key), "child": f"{kind.kind}/{name}", "paths": paths[:5]})
        if kind is not SECRET:
            self.store.put(written)
        self._note_resistance(manifest, needs_apply(written, manifest))
        return written

    def resists(self, manifest: Mapping[str, Any], paths: Sequence[str]) -> bool:
        """Whether the same manifest has left the same differences before."""
        known = self.resisted.get((manifest["kind"], manifest["metadata"]["name"]))
        return known is not None and known.manifest == _essence(manifest) and set(paths) <= set(known.paths)

    def _note_resistance(self, manifest: Mapping[str, Any], paths: Sequence[str]) -> None:
        place = manifest["kind"], manifest["metadata"]["name"]
        if not paths:
            self.resisted.pop(place, None)
            return
        self.resisted[place] = Resisted(_essence(manifest), tuple(paths))
        _log.warning(
            "written, and not as it should be: something in the API server changes it",
            extra={"resource": str(self.key), "child": "/".join(place), "paths": list(paths)},
        )

    async def remove_unwanted(self, manifests: Iterable[Manifest], live: Live) -> None:
        """Delete what the resource owns and does not ask for any more, once no engine needs it."""
        wanted = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
        for place, child in live.children.items():
            if place in wanted or "deletionTimestamp" in child["metadata"] or still_needed(live, *place):
                continue
            kind, meta = BY_NAME[place[0]], child["metadata"]
            try:
                await self.api.delete(kind, meta["namespace"], meta["name"], meta["uid"])
            except NotFound:
                pass
            except (Forbidden, Refused) as error:
                self._refused(error, f"{kind.kind} {meta['name']}")
                continue
            _log.info("deleted", extra={"resource": str(self.key), "child": "/".join(place)})
            self.store.remove(child)

    async def free(self, kind: Kind, name: str) -> bool:
        """Whether a name may be taken: nobody has it, or it is the resource's already."""
        try:
            found = await self.api.get(kind, self.key.namespace, name)
        except NotFound:
            return True
        except Forbidden as error:
            self._refused(error, f"{kind.kind} {name}")
            return False
        if owned_by(found, self.uid) or _is_orphan(found, self.key):
            return True
        if any(_is_predecessor(owner, self.key) for owner in found["metadata"].get("ownerReferences", ())):
            raise PredecessorRemains(f"{kind.kind} {name}")
        message = (
            f"{kind.kind} {name} is there already and belongs to somebody else; delete or rename it, or give this "
            "resource another name"
        )
        self.problems.append(Problem(Reason.NAME_TAKEN, message))
        return False

    def _refused(self, error: ApiError, what: str) -> None:
        if isinstance(error, Forbidden) and error.namespace_ends:
            raise error
        lacks_right = isinstance(error, Forbidden) and error.lacks_right
        reason = Reason.FORBIDDEN if lacks_right else Reason.APPLY_FAILED
        self.problems.append(Problem(reason, f"{what}: {error.message}; {_REMEDIES[reason]}"))


def _is_orphan(found: Object, key: Key) -> bool:
    """Made for a resource of this name that was deleted without its children (``--cascade=orphan``)."""
    labels = found["metadata"].get("labels", {})
    ours = labels.get(names.LABEL_MANAGED_BY) == "kvloop-operator" and labels.get(names.LABEL_DEPLOYMENT) == key.name
    return ours and not any(owner.get("controller") for owner in found["metadata"].get("ownerReferences", ()))


def _is_predecessor(owner: Mapping[str, Any], key: Key) -> bool:
    return bool(owner.get("controller")) and (owner.get("kind"), owner.get("name")) == (names.KIND, key.name)


def _essence(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """A manifest without the numbers that the rollout planner puts in."""
    if manifest["kind"] != STATEFULSET.kind:
        return manifest
    spec = {field: value for field, value in manifest["spec"].items() if field not in ("replicas", "updateStrategy")}
    return {**manifest, "spec": spec}
