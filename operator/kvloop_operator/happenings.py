"""Kubernetes Events: what people see with ``kubectl describe``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

from kvloop_operator import names
from kvloop_operator.live import Object
from kvloop_operator.status import Transition

_COMPONENT: Final = "kvloop-operator"
_MESSAGE_LENGTH: Final = 1024
"""The API server refuses a longer one."""


def event(resource: Object, transition: Transition, now: float) -> dict[str, Any]:
    """The Event for a transition of ``resource``."""
    meta = resource["metadata"]
    moment = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    message = transition.message
    if len(message) > _MESSAGE_LENGTH:
        message = message[: _MESSAGE_LENGTH - 1] + "…"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{meta['name']}.{uuid4().hex[:16]}", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
            "resourceVersion": meta["resourceVersion"],
        },
        "type": transition.type,
        "reason": transition.reason,
        "message": message,
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }
