"""What a real vLLM engine needs in order to run on a CPU beside others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

BLOCK_SIZE = 32
"""Tokens; CPU attention takes multiples of 32 only, and vLLM's default has no common block size with it."""

EXTRA_TRANSFER_CONFIG: Mapping[str, int] = {"num_threads": 1}
"""Keys for ``kv_connector_extra_config``: NIXL's progress threads spin, so that more of them starve the model."""


def arguments(*, max_model_len: int) -> list[str]:
    """Arguments for ``vllm serve``, beside those that any engine of kvloop's gets."""
    return [
        "--enforce-eager",
        "--dtype",
        "float32",
        "--block-size",
        str(BLOCK_SIZE),
        "--max-model-len",
        str(max_model_len),
        # A seeded request whose prefill is cut in two ends the CPU engine ("CPU Generator does not use offset").
        "--max-num-batched-tokens",
        str(4 * max_model_len),
    ]


def environment(plugin_directory: Path, *, kv_cache_gib: int = 1) -> dict[str, str]:
    """Variables for the engine's process, beside those that any engine of kvloop's gets."""
    return {
        "PYTHONPATH": str(plugin_directory),
        "UCX_TLS": "tcp,self",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def free_affinity(pids: Iterable[int]) -> None:
    """Give every thread of these processes all cores that this process may use.

    Each worker pins itself to the highest core for its KV transfers (``nixl/base_worker.py:702``), so that two engines
    fight for one core while the others idle. Call it once an engine has started; processes that are gone are passed
    over.
    """
    cores = os.sched_getaffinity(0)
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in list(Path(f"/proc/{pid}/task").iterdir()):
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)
