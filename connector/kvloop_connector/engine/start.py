"""What an engine must be for the connector to start in it; checked before anything is served."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvloop_connector.errors import UnsupportedEngine
from kvloop_connector.lease_ranks import renewable_seconds
from kvloop_connector.proof import SealKey
from kvloop_connector.settings import HASH_ALGORITHM, KEY_FILE, RETAINED_SHARE, REVISION, Role

TRIED_VERSIONS = frozenset({"0.32.0", "0.33.0"})
"""vLLM versions on which the tests of the connector ran; 0.33.0 unofficially: its Python code on 0.32.0's CPU build."""

_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the connector is told at its start.

    renewable: how many seconds all renewals together may add to a deadline.
    retained_share: of the KV blocks, that may be retained; None for any.
    """

    role: Role
    key: SealKey
    revision: str
    algorithm: str
    renewable: float
    retained_share: float | None


def checked_start(
    *,
    version: str,
    kv_role: str | None,
    extra: Mapping[str, Any],
    algorithm: str,
    context_parallel: int,
    read_key: Callable[[str], bytes],
) -> Start:
    """What to start with; raises UnsupportedEngine, with what to do instead, where the connector may not start.

    version: vLLM's, with or without what follows a ``+``.
    context_parallel: the product of the two context-parallel sizes, with which blocks cover other tokens.
    read_key: gives the content of a file, or raises OSError.
    """
    if version.partition("+")[0] not in TRIED_VERSIONS:
        raise UnsupportedEngine(
            f"KvloopConnector was tried with vLLM {', '.join(sorted(TRIED_VERSIONS))}, and this is {version}: "
            "use such an image, or NixlConnector"
        )
    role = _ROLES.get(kv_role or "")
    if role is None:
        raise UnsupportedEngine(f"kv_role is {kv_role}: use kv_producer for prefill and kv_consumer for decode engines")
    if not extra.get("bidirectional_kv_xfer"):
        raise UnsupportedEngine("bidirectional_kv_xfer is off: there is nothing to prove; set it, or use NixlConnector")
    if algorithm != HASH_ALGORITHM:
        raise UnsupportedEngine(
            f"blocks are hashed with {algorithm}, so that two engines cannot compare hashes: "
            f"start both roles with --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    if context_parallel != 1:
        raise UnsupportedEngine("KvloopConnector was not tried with context parallelism: use NixlConnector")
    revision = extra.get(REVISION)
    if not isinstance(revision, str) or not revision:
        raise UnsupportedEngine(f"kv_connector_extra_config.{REVISION} is missing: set it, equal on both roles")
    return Start(
        role=role,
        key=seal_key(extra, read_key),
        revision=revision,
        algorithm=algorithm,
        renewable=renewable_seconds(extra),
        retained_share=_retained_share(extra),
    )


def _retained_share(extra: Mapping[str, Any]) -> float | None:
    share = extra.get(RETAINED_SHARE)
    if share is None:
        return None
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise UnsupportedEngine(f"kv_connector_extra_config.{RETAINED_SHARE} is {share}: use a share from 0 to 1")
    return float(share)


def seal_key(extra: Mapping[str, Any], read_key: Callable[[str], bytes]) -> SealKey:
    """The secret of the deployment's engines; raises UnsupportedEngine where it cannot be had.

    read_key: gives the content of a file, or raises OSError.
    """
    path = extra.get(KEY_FILE)
    if not isinstance(path, str) or not path:
        raise UnsupportedEngine(f"kv_connector_extra_config.{KEY_FILE} is missing: set it, equal content on both roles")
    try:
        # Secrets are often written with a line end that is not meant.
        return SealKey(re.sub(rb"[\r\n]+\Z", b"", read_key(path)))
    except OSError as error:
        raise UnsupportedEngine(f"the seal key cannot be read: {error}") from error
    except ValueError as error:
        raise UnsupportedEngine(f"the seal key in {path} cannot be used: {error}") from error
