"""What kopf does for the operator: it watches, and hands each event to the store and the queue.

Only event handlers are registered. With any other kind kopf would write to the resource: annotations for handlers of
changes, a finalizer for timers and daemons (kopf 1.45, ``on.py``, ``requires_finalizer``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import Any, Final

import kopf

from kvloop_operator import names
from kvloop_operator.cluster.kinds import CHILDREN, POD, RESOURCE, Kind
from kvloop_operator.live import Object

CHILD_LABELS: Final = f"{names.LABEL_MANAGED_BY}=kvloop-operator"
WATCHED: Final = (RESOURCE, POD, *(kind for kind in CHILDREN if kind.watched))

_SERVER_SECONDS: Final = 300
_CLIENT_SECONDS: Final = 330
_CONNECT_SECONDS: Final = 10
_REQUEST_SECONDS: Final = 30
_FIRST_BACKOFFS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
_LAST_BACKOFF: Final = 15.0


class _Forever:
    """Waits between tries, without an end: a watch that gives up would never be opened again."""

    def __iter__(self) -> Iterator[float]:
        return chain(_FIRST_BACKOFFS, repeat(_LAST_BACKOFF))


class _NoDifferences(kopf.DiffBaseStorage):
    """Nothing to compare events with: kopf would copy every object twice to find changes for handlers of changes."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[kopf.FieldSpec] | None = None) -> kopf.BodyEssence:
        """Nothing of the object."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """What ``build`` gives."""
        return self.build(body=body)

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing: the operator writes no annotation."""


def labels_of(kind: Kind) -> str:
    """The label selector that a kind is listed and watched with."""
    return "" if kind is RESOURCE else CHILD_LABELS


def settings() -> kopf.OperatorSettings:
    """How kopf runs: no writes, no scan of the cluster's kinds and namespaces, watches that are opened anew."""
    result = kopf.OperatorSettings()
    result.posting.enabled = False
    result.scanning.disabled = True
    result.persistence.diffbase_storage = _NoDifferences()
    result.networking.request_timeout = _REQUEST_SECONDS
    result.networking.connect_timeout = _CONNECT_SECONDS
    result.networking.error_backoffs = _Forever()
    result.networking.enforce_retry_after = True
    result.watching.server_timeout = _SERVER_SECONDS
    result.watching.client_timeout = _CLIENT_SECONDS
    result.watching.connect_timeout = _CONNECT_SECONDS
    result.process.ultimate_exiting_timeout = 5
    for kind in WATCHED:
        if labels_of(kind):
            result.watching.label_selectors[kind.group, kind.version, kind.plural] = labels_of(kind)
    return result


def registry(seen: Callable[[Object, bool], None], login: Callable[[], Any]) -> kopf.OperatorRegistry:
    """Handlers that give ``seen`` every object that a watch delivers, and whether it was deleted.

    login: gives kopf's ``ConnectionInfo``.
    """
    handlers = kopf.OperatorRegistry()

    async def logged_in(**_: Any) -> Any:
        return await login()

    kopf.on.login(registry=handlers)(logged_in)
    for kind in WATCHED:
        kopf.on.event(kind.group, kind.version, kind.plural, registry=handlers, id=kind.plural)(_handler(kind, seen))
    return handlers


def _handler(kind: Kind, seen: Callable[[Object, bool], None]) -> Callable[..., Any]:
    async def handler(event: Any, **_: Any) -> None:
        found = {"apiVersion": kind.api_version, "kind": kind.kind, **event["object"]}
        seen(found, event["type"] == "DELETED")

    return handler
