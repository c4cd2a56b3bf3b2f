"""KV-transfer settings, and the ``--kv-transfer-config`` argument of each role.

Field names are vLLM's (``vllm/config/kv_transfer.py``, ``.../kv_connector/v1/nixl/base_scheduler.py``, 0.32.0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvloop_connector.errors import InvalidSettings

READ_MARGIN_SECONDS = 5
"""A prefill engine declines a read that starts later than this before the deadline (``nixl/pull_worker.py:31``)."""

HANDLE_TTL_MARGIN_SECONDS = 30
"""How much earlier than the decode engine the router lets a handle go: the read margin, the prefill queue and the
read itself, with slack for clocks."""

MINIMUM_DECODER_TTL_SECONDS = HANDLE_TTL_MARGIN_SECONDS + 1
"""The shortest retention that leaves the router any time to use a handle."""


class Role(StrEnum):
    """What an engine does in a prefill/decode pair."""

    PREFILL = "prefill"
    DECODE = "decode"


class Connector(StrEnum):
    """How KV handles are proven to fit."""

    NIXL = "NixlConnector"
    KVLOOP = "KvloopConnector"


KEY_FILE = "kvloop_key_file"
"""Key of ``kv_connector_extra_config``, for KvloopConnector: the file that holds the deployment's seal key."""

REVISION = "kvloop_revision"
"""Key of ``kv_connector_extra_config``, for KvloopConnector: the engine's KV revision."""

LONGEST_LEASE = "kvloop_longest_lease_seconds"
"""Key of ``kv_connector_extra_config``, for engines with leases: how long blocks are retained at most, with all
renewals. An hour if absent, or ``decoder_kv_blocks_ttl`` if that is longer."""

RETAINED_SHARE = "kvloop_retained_share_limit"
"""Key of ``kv_connector_extra_config``, for KvloopConnector: the share (0 to 1) of a decode engine's KV blocks that may
be retained; a turn that would pass it has no handle. No limit if absent."""

OWN_EXTRA_KEYS = frozenset(
    {
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "kv_recompute_threshold",
        "backends",
        KEY_FILE,
        REVISION,
        LONGEST_LEASE,
        RETAINED_SHARE,
    }
)
"""Keys of ``kv_connector_extra_config`` that kvloop sets itself."""

HASH_ALGORITHM = "sha256_cbor"
"""The one algorithm of vLLM's that gives equal block hashes for equal content in every process and is collision
resistant; KvloopConnector compares them between engines."""

VERIFIED_ARGUMENTS = ("--prefix-caching-hash-algo", HASH_ALGORITHM)
"""What the command line of engines of both roles has for KvloopConnector, beside ``--kv-transfer-config``."""

# vLLM decides several things by this name, so that KvloopConnector's class is found under it too, in its own module.
_CONNECTOR_NAME = "NixlConnector"
_CONNECTOR_MODULE = "kvloop_connector.engine.connector"
_KV_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
# A prefill engine that recomputes after a failed read hangs the request for ever; a decode engine that recomputes
# answers correctly, only later.
_LOAD_FAILURE_POLICY = {Role.PREFILL: "fail", Role.DECODE: "recompute"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferSettings:
    """The settings that must be equal on both roles of a deployment.

    decoder_kv_blocks_ttl: seconds that a decode engine retains the blocks of a finished turn.
    kv_recompute_threshold: tokens; a prefill engine that misses fewer computes them instead of pulling.
    backends: NIXL plug-ins in order of preference; empty leaves vLLM's default (UCX).
    extra: further keys of ``kv_connector_extra_config``; none that kvloop sets itself.
    """

    bidirectional_kv_xfer: bool = True
    decoder_kv_blocks_ttl: int = 480
    kv_recompute_threshold: int = 64
    backends: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.decoder_kv_blocks_ttl < MINIMUM_DECODER_TTL_SECONDS:
            raise InvalidSettings(
                "decoderKvBlocksTtlSeconds",
                f"{self.decoder_kv_blocks_ttl} leaves no time to read a handle back",
                f"use {MINIMUM_DECODER_TTL_SECONDS} or more",
            )
        if self.kv_recompute_threshold < 0:
            raise InvalidSettings("kvRecomputeThreshold", f"{self.kv_recompute_threshold} is negative", "use 0 or more")
        taken = sorted(OWN_EXTRA_KEYS & self.extra.keys())
        if taken:
            raise InvalidSettings(
                f"extraConfig.{taken[0]}", "kvloop sets this key itself", "use the resource's own field for it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What KvloopConnector is told beside the settings; equal on both roles of a deployment.

    key_file: where the engine finds the secret that the deployment's engines share.
    revision: the engines' KV revision.
    """

    key_file: str
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long, and how much, decode engines with kvloop's package retain beyond what the settings say. Of no account
    for whether two engines may exchange KV.

    longest_lease_seconds: LONGEST_LEASE.
    share_limit: RETAINED_SHARE.
    """

    longest_lease_seconds: int | None = None
    share_limit: float | None = None


def transfer_config(
    settings: KVTransferSettings,
    role: Role,
    *,
    verification: Verification | None = None,
    retention: Retention | None = None,
) -> dict[str, Any]:
    """The value of ``--kv-transfer-config`` for engines of ``role``: with KvloopConnector where ``verification`` is
    given, and then VERIFIED_ARGUMENTS have to be on the command line too; with NixlConnector where it is not.

    Never holds ``engine_id`` (a shared or kept one makes prefill read another process's memory), ``kv_rank`` or
    ``kv_parallel_size`` (refused by vLLM 0.32 and later).
    """
    extra: dict[str, Any] = {
        "bidirectional_kv_xfer": settings.bidirectional_kv_xfer,
        "decoder_kv_blocks_ttl": settings.decoder_kv_blocks_ttl,
        "kv_recompute_threshold": settings.kv_recompute_threshold,
    }
    if settings.backends:
        extra["backends"] = list(settings.backends)
    extra.update(settings.extra)
    if verification is not None:
        extra |= {KEY_FILE: verification.key_file, REVISION: verification.revision}
    if retention is not None:
        limits = {LONGEST_LEASE: retention.longest_lease_seconds, RETAINED_SHARE: retention.share_limit}
        extra |= {key: limit for key, limit in limits.items() if limit is not None}
    return {
        "kv_connector": _CONNECTOR_NAME,
        **({} if verification is None else {"kv_connector_module_path": _CONNECTOR_MODULE}),
        "kv_role": _KV_ROLE[role],
        "kv_load_failure_policy": _LOAD_FAILURE_POLICY[role],
        "kv_connector_extra_config": extra,
    }


def transfer_config_argument(
    settings: KVTransferSettings,
    role: Role,
    *,
    verification: Verification | None = None,
    retention: Retention | None = None,
) -> str:
    """``transfer_config`` as the compact JSON that goes on the command line; equal settings give equal bytes."""
    config = transfer_config(settings, role, verification=verification, retention=retention)
    return json.dumps(config, separators=(",", ":"), sort_keys=True)
