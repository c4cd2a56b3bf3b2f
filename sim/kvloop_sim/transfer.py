"""What vLLM's NIXL connector does with ``kv_transfer_params``, as pure functions.

Follows ``nixl/pull_scheduler.py`` and ``pull_worker.py`` of vLLM 0.32.0, its hazards included: no token is ever
compared, a list of blocks is trimmed from its end, and parameters that no router should send end the engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

READ_MARGIN_SECONDS: Final = 5.0
"""A read that starts later than this before the blocks expire is declined (``pull_worker.py:33``)."""

_LOCATION: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class EngineFatal(Exception):
    """The engine core dies, as a vLLM engine does on a failed assertion or an uncaught error in its scheduler."""


class Policy(StrEnum):
    """``kv_load_failure_policy``."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """What the engine was told by ``--kv-transfer-config`` and its environment.

    decoder_ttl, lease: seconds that blocks are kept for a reader after a decode and after a prefill request.
    registration_generation: whether handles have vLLM 0.33's field of that name.
    """

    engine_id: str
    role: str
    bidirectional: bool = False
    recompute_threshold: int = 64
    decoder_ttl: float = 480.0
    lease: float = 30.0
    policy: Policy = Policy.FAIL
    backends: tuple[str, ...] = ("UCX",)
    enforce_compatibility: bool = True
    host: str = "localhost"
    port: int = 5600
    registration_generation: bool = True

    @property
    def lease_extension(self) -> float:
        """Seconds that a heartbeat keeps a lease alive from its arrival."""
        return self.lease * 2 // 3

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between the heartbeats that a waiting reader sends."""
        return self.lease // 6


@dataclass(frozen=True, slots=True)
class Location:
    """Where retained blocks are, as a handle says."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    expires: float | None

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Location:
        """The location in ``params``. Raises EngineFatal where a field is missing or malformed."""
        try:
            groups = params["remote_block_ids"]
            blocks = tuple(int(block) for block in groups[0]) if groups else ()
            expires = params.get("remote_blocks_expiry_time")
            return cls(
                engine_id=str(params["remote_engine_id"]),
                request_id=str(params["remote_request_id"]),
                host=str(params["remote_host"]),
                port=int(params["remote_port"]),
                block_ids=blocks,
                expires=None if expires is None else float(expires),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineFatal(f"{type(error).__name__}: {error}") from error


def external_tokens(
    params: Mapping[str, Any] | None, *, prompt_tokens: int, local_tokens: int, settings: ConnectorSettings
) -> int:
    """How many tokens beyond the local prefix hit are taken from the remote engine; 0 for none."""
    if not params:
        return 0
    if params.get("do_remote_prefill"):
        count = prompt_tokens - local_tokens
        if count > 0:
            return count
    if params.get("do_remote_decode") and params.get("remote_block_ids") and _located(params):
        count = min(int(params.get("remote_num_tokens") or 0), prompt_tokens) - local_tokens
        if count >= max(1, settings.recompute_threshold):
            return count
    return 0


class Start(StrEnum):
    """How a request that was just given blocks goes on."""

    COMPUTE = "compute"
    READ = "read"
    NOTIFY = "notify"
    """Nothing to read, but the remote engine is told that it can free its blocks."""
    HANG = "hang"
    """The request waits for a read that nobody starts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from parameters at allocation. ``tracked``: whether a retention timer will ever be started."""

    start: Start
    tracked: bool
    location: Location | None = None


def on_allocated(params: Mapping[str, Any] | None, external: int, settings: ConnectorSettings) -> Plan:
    """The connector's decision at allocation. Raises EngineFatal where vLLM's scheduler or worker fails."""
    if not params:
        return Plan(Start.COMPUTE, tracked=False)
    prefill, decode = bool(params.get("do_remote_prefill")), bool(params.get("do_remote_decode"))
    tracked = decode or (prefill and settings.bidirectional)
    idle = Start.HANG if external else Start.COMPUTE
    if not (prefill or (decode and settings.bidirectional)):
        return Plan(idle, tracked)
    if not params.get("remote_block_ids"):
        if external:
            raise EngineFatal("AssertionError: num_external_tokens == 0")
        return Plan(Start.COMPUTE, tracked)
    if not _located(params):
        return Plan(idle, tracked)
    location = Location.of(params)
    if location.engine_id == settings.engine_id:
        raise EngineFatal("AssertionError: remote_engine_id != self.engine_id")
    return Plan(Start.READ if external else Start.NOTIFY, tracked, location)


def on_rejected(params: Mapping[str, Any] | None) -> Location | None:
    """Whom to tell when a request ends before it was ever scheduled. Raises EngineFatal on a partial location."""
    if not params or not params.get("do_remote_prefill"):
        return None
    return Location.of(params)


def trim(remote: Sequence[int], needed: int) -> list[int]:
    """The remote blocks that go with ``needed`` local ones: the *last* ones. Raises EngineFatal if there are fewer."""
    if needed > len(remote):
        raise EngineFatal("AssertionError: num_decode_blocks <= len(prefill_group)")
    return list(remote[len(remote) - needed :])


def is_declined(location: Location, *, peer_clock_ahead: float, now: float, settings: ConnectorSettings) -> bool:
    """Whether a read is declined because the remote blocks (nearly) expired.

    peer_clock_ahead: the peer's clock less one's own, from the handshake; ``now``: one's own clock.
    """
    if not settings.bidirectional or location.expires is None:
        return False
    return now + READ_MARGIN_SECONDS >= location.expires - peer_clock_ahead


@dataclass(frozen=True, slots=True)
class Retention:
    """What becomes of a finished request's blocks.

    seconds: how long they are kept; None frees them at once. leaked: kept for the life of the process, since no
    timer is ever started for them.
    """

    seconds: float | None
    leaked: bool = False
    for_decode: bool = False


_FREED: Final = Retention(None)


def on_finished(params: Mapping[str, Any] | None, plan: Plan, settings: ConnectorSettings) -> Retention:
    """The connector's decision when a request ended by length, end token or stop token."""
    if not params:
        return _FREED
    if params.get("do_remote_decode"):
        return Retention(settings.lease, leaked=not plan.tracked, for_decode=True)
    if not settings.bidirectional:
        return _FREED
    return Retention(settings.decoder_ttl, leaked=not plan.tracked)


def handle(
    retention: Retention,
    settings: ConnectorSettings,
    *,
    request_id: str,
    block_ids: Sequence[int],
    tokens: int,
    deadline: float,
    cached_tokens: int,
) -> dict[str, Any]:
    """The ``kv_transfer_params`` that say where a finished request's blocks are (``pull_scheduler.py:278``)."""
    fields: dict[str, Any] = {
        "do_remote_prefill": retention.for_decode,
        "do_remote_decode": not retention.for_decode,
        "remote_block_ids": [list(block_ids)],
        "remote_engine_id": settings.engine_id,
        "remote_request_id": request_id,
        "remote_host": settings.host,
        "remote_port": settings.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None if retention.for_decode else deadline,
        "transfer_mode": "pull",
    }
    if retention.for_decode:
        fields["remote_prefill_cached_tokens"] = cached_tokens
    if settings.registration_generation:
        fields["remote_registration_generation"] = 0
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Compatibility:
    """What two engines must share to exchange KV: the factors of vLLM's compatibility hash, and those of NIXL."""

    version: str
    model: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    backends: tuple[str, ...]
    speculative: str = ""
    revision: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 over the factors, as text."""
        factors = [
            self.version,
            self.model,
            self.dtype,
            self.kv_cache_dtype,
            self.block_size,
            sorted(self.backends),
            self.speculative,
            self.revision,
        ]
        return hashlib.sha256(json.dumps(factors).encode()).hexdigest()


def _located(params: Mapping[str, Any]) -> bool:
    return all(name in params for name in _LOCATION)
