"""Runs in the engine's environment: the connector's scheduler sides on vLLM's own classes, without an engine.

Requests, block hashes, KV cache configuration and connector are vLLM's; in place of the scheduler's block pool stand
block ids counted up. The first argument of the program is the file with the seal key.
"""

from __future__ import annotations

import importlib
import json
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

BLOCK = 32
ALGORITHM = "sha256_cbor"
HASH = get_hash_fn_by_name(ALGORITHM)
HASHER = get_request_block_hasher(BLOCK, HASH)
KEY_FILE = Path(sys.argv[1])
NUMBERS = count()
HISTORY = [i % 251 for i in range(300)]


def connector(kv_role: str, *, hybrid: bool = False, **changes: Any) -> Any:
    """The scheduler's side of the connector, as an engine makes it."""
    transfer = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_connector_module_path="kvloop_connector.engine.connector",
        kv_role=kv_role,
        kv_buffer_device="cpu",
        kv_connector_extra_config={
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 64,
            "kvloop_key_file": str(KEY_FILE),
            "kvloop_revision": "0123456789",
            **changes,
        },
    )
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": importlib.import_module("torch").float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if hybrid:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=64)))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
        ),
        cache_config=SimpleNamespace(block_size=BLOCK, prefix_caching_hash_algo=ALGORITHM),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        kv_transfer_config=transfer,
        num_prefill_lookahead_tokens=0,
    )
    cache = KVCacheConfig(num_blocks=256, kv_cache_tensors=[], kv_cache_groups=groups)
    made = KVConnectorFactory.get_connector_class(transfer)(config, KVConnectorRole.SCHEDULER, cache)
    # As the engine core does: after the connector was made.
    cache.hash_block_size = BLOCK
    init_none_hash(HASH)
    return made


def request(name: str, tokens: list[int], params: dict[str, Any] | None, salt: str | None = None) -> Request:
    sampling = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": params})
    return Request(name, list(tokens), sampling, None, cache_salt=salt, block_hasher=HASHER)


def blocks(number: int, groups: int = 1) -> Any:
    fresh = [[SimpleNamespace(block_hash=None, is_null=False) for _ in range(number)] for _ in range(groups)]
    ids = tuple(list(range(500, 500 + number)) for _ in range(groups))
    return SimpleNamespace(blocks=fresh, get_unhashed_block_ids_all_groups=lambda: ids)


PREFILLS_ANSWER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1]],
    "remote_engine_id": "prefill",
    "remote_request_id": "leg",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 32,
}


def ended(
    decode: Any, tokens: list[int] = HISTORY, *, groups: int = 1, salt: str | None = None, first_block: int = 0
) -> tuple[str, bool, dict[str, Any] | None]:
    """A turn that ended with ``tokens``: its request id, whether its blocks are retained, and what is returned."""
    done = request(f"turn-{next(NUMBERS)}", tokens[:-8], {**PREFILLS_ANSWER, "remote_block_ids": [[1]] * groups}, salt)
    decode.on_new_request(done)
    decode.update_state_after_alloc(done, blocks(1, groups), 1)
    done.append_output_token_ids(tokens[-8:])
    done.num_computed_tokens = len(tokens) - 1
    done.status = RequestStatus.FINISHED_LENGTH_CAPPED
    held = -(-done.num_computed_tokens // BLOCK)
    ids = [list(range(first_block + offset, first_block + offset + held)) for offset in (0, 100)]
    delay, handle = decode.request_finished_all_groups(done, tuple(ids[:groups]))
    return done.request_id, delay, handle


def turn(decode: Any, tokens: list[int] = HISTORY, **how: Any) -> dict[str, Any]:
    """The handle of a turn that ended with ``tokens``, as it comes out of JSON."""
    _, delay, handle = ended(decode, tokens, **how)
    assert delay
    return dict(json.loads(json.dumps(handle)))


def leg(
    prefill: Any, tokens: list[int], params: dict[str, Any] | None, *, cached: int = 0, groups: int = 1, **how: Any
) -> dict[str, Any]:
    """A prefill leg up to what the worker is told, and its answer."""
    asked = request("leg", tokens, params, how.get("salt"))
    prefill.on_new_request(asked)
    matched, waits = 0, False
    if how.get("scheduled", True):
        matched, waits = prefill.get_num_new_matched_tokens(asked, cached)
        prefill.update_state_after_alloc(asked, blocks(-(-matched // BLOCK), groups), matched)
    asked.num_computed_tokens = len(tokens)
    asked.status = (
        RequestStatus.FINISHED_LENGTH_CAPPED if how.get("scheduled", True) else RequestStatus.FINISHED_ABORTED
    )
    _, answer = prefill.request_finished_all_groups(asked, tuple([[500]] * groups))
    told = prefill.build_connector_meta(SimpleNamespace()).reqs_to_recv.get("leg")
    return {
        "matched": matched,
        "waits": waits,
        "contacted": None if told is None else told.remote.host,
        "told": None if told is None else [told.remote.num_tokens, list(map(list, told.remote.block_ids))],
        "local": None if told is None else [len(group) for group in told.local_block_ids],
        "reuse": None if answer is None else answer.get("kvloop_reuse"),
    }
