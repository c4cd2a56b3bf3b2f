"""The requests by which a router releases and renews blocks that an engine retains, and the answers to them.

::

    POST /v1/kvloop/release   {"remote_request_ids": ["…", …]}
    POST /v1/kvloop/renew     {"remote_request_ids": ["…", …], "seconds": 120}

    200 {"handles": [{"remote_request_id": "…", "outcome": "renewed", "seconds": 31.5}, …]}

Below ``/v1``, so that an engine's API key guards them. A handle is named by its ``remote_request_id``; the answer has
one entry for each, in the order of the request.

**Only a handle that no prefill engine was given may be released.** A pull reads the decode engine's memory past its
processor, so that an engine does not know that its blocks are being read, and frees them on release all the same.
What keeps it safe is the router: it takes the handle out of its store first, atomically and for good, and releases what
it took, or what it was given back unread. For the same reason no engine gives up by itself what others may be reading.

Renewal needs no such care: it only ever moves a deadline onward, and whoever does not learn of it keeps to the old one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvloop_connector.errors import InvalidRequest

RELEASE_PATH = "/v1/kvloop/release"
RENEW_PATH = "/v1/kvloop/renew"

PLUGIN = "kvloop_leases"
"""Name of the entry point that adds the paths. vLLM loads it only where ``VLLM_PLUGINS`` names it, and that variable
then lists what is loaded of *every* group: kvloop's other plug-in and the platform's own have to be named too."""

ALLOW_VARIABLE = "KVLOOP_LEASES"
"""Environment variable of an engine: with ``1`` kvloop's package names them itself (``engine/allow_leases.py``), unless
``VLLM_PLUGINS`` is set."""

WORKER_EXTENSION = "kvloop_connector.engine.lease_worker.LeaseWorker"
"""What ``--worker-extension-cls`` has to be for them to work."""

MOST_HANDLES = 1000
"""How many handles one request may name."""

_IDS = "remote_request_ids"
_SECONDS = "seconds"


class Outcome(StrEnum):
    """What became of one handle's blocks."""

    RELEASED = "released"
    """They are free as soon as the engine has made its next step."""
    RENEWED = "renewed"
    """They are retained until the deadline in the answer."""
    NOT_HELD = "not_held"
    """Nothing is retained: released, read or expired before, or never retained here."""


@dataclass(frozen=True, slots=True)
class Release:
    """Free what is retained for these requests now."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Renew:
    """Retain what is retained for these requests for ``seconds`` from now, and never shorter than before."""

    request_ids: tuple[str, ...]
    seconds: float


def parse_release(body: bytes) -> Release:
    """The request in ``body``; raises InvalidRequest, which names the field at fault."""
    return Release(_ids(_fields(body, {_IDS})))


def parse_renew(body: bytes) -> Renew:
    """The request in ``body``; raises InvalidRequest, which names the field at fault."""
    fields = _fields(body, {_IDS, _SECONDS})
    seconds = fields.get(_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds <= 0:
        raise InvalidRequest(_SECONDS, "missing or not a number above 0")
    return Renew(_ids(fields), float(seconds))


def _fields(body: bytes, known: Collection[str]) -> Mapping[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("", "not JSON") from error
    if not isinstance(fields, Mapping):
        raise InvalidRequest("", "not an object")
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise InvalidRequest(unknown[0], "not a field of this request")
    return fields


def _ids(fields: Mapping[str, Any]) -> tuple[str, ...]:
    ids = fields.get(_IDS)
    if not isinstance(ids, list) or not ids:
        raise InvalidRequest(_IDS, "missing or not a list with something in it")
    if len(ids) > MOST_HANDLES:
        raise InvalidRequest(_IDS, f"{len(ids)} handles; {MOST_HANDLES} at most")
    if not all(isinstance(request_id, str) and request_id for request_id in ids):
        raise InvalidRequest(_IDS, "not all of them are strings with something in them")
    if len(set(ids)) != len(ids):
        raise InvalidRequest(_IDS, "one is named twice")
    return tuple(ids)
