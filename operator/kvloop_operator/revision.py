"""The KV revision: which engines may exchange KV."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from kvloop_connector.settings import KVTransferSettings
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.facts import Facts
from kvloop_operator.serving import model_argument, served_name

REVISION_LENGTH = 10


def transfer_settings(resource: DisaggregatedInference, facts: Facts) -> KVTransferSettings:
    """The KV-transfer settings of both roles."""
    transfer = resource.spec.kv_transfer
    return KVTransferSettings(
        bidirectional_kv_xfer=transfer.bidirectional_kv_xfer,
        decoder_kv_blocks_ttl=transfer.decoder_kv_blocks_ttl_seconds,
        kv_recompute_threshold=transfer.kv_recompute_threshold,
        backends=("LIBFABRIC",) if facts.efa else (),
        extra={key: _plain(value) for key, value in sorted(transfer.extra_config.items())},
    )


def kv_revision(resource: DisaggregatedInference, facts: Facts) -> str:
    """Ten hexadecimal digits, equal for engines that may exchange KV and different for all others.

    Covers what vLLM compares in the handshake (``nixl/metadata.py:145-215``: version, model string, dtype, KV layout,
    attention backend, cache dtype, speculative decoding) through what decides it: image, model, engine arguments and
    environment, and the connector's settings. Tensor-parallel sizes and replicas are left out: they may differ.
    """
    spec, engine, source = resource.spec, resource.spec.engine, resource.spec.model.source
    parts: dict[str, Any] = {
        "image": engine.image,
        "version": engine.version,
        "model": model_argument(spec),
        "model_revision": spec.model.revision,
        "served_name": served_name(spec),
        "volume": source.pvc.claim_name if source is not None and source.pvc is not None else None,
        "dtype": engine.dtype,
        "block_size": engine.block_size,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "args": list(engine.args),
        "env": [variable.model_dump(mode="json", exclude_none=True) for variable in engine.env],
        "accelerators": [facts.prefill.accelerator, facts.decode.accelerator],
        "connector": facts.connector,
        "transfer": asdict(transfer_settings(resource, facts)),
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:REVISION_LENGTH]


def _plain(value: int | str) -> int | str | bool:
    """The schema has no type for `boolean or number or text`, so that booleans are written as text."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
