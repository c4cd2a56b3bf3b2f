"""Reading an engine's Prometheus text: the few figures that the router goes by. Pure."""

from __future__ import annotations

import re

_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?block_size="(\d+)"', re.MULTILINE)
_BLOCKS = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?num_gpu_blocks="(\d+)"', re.MULTILINE)
_RANKS = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?engine="(\d+)"', re.MULTILINE)
_PREFIX_CACHING = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?enable_prefix_caching="(\w+)"', re.MULTILINE)
BYTES_TRANSFERRED = "vllm:nixl_bytes_transferred_sum"
"""Counted by the engine that reads: decode to prefill on prefill, prefill to decode on decode."""
TRANSFER_SECONDS = "vllm:nixl_xfer_time_seconds_sum"
"""Counted where the bytes are."""


def block_size(text: str) -> int | None:
    """Tokens in a KV block, where the engine says."""
    match = _BLOCK_SIZE.search(text)
    return int(match[1]) if match else None


def blocks(text: str) -> int | None:
    """KV blocks that the engine has, each data-parallel rank of it, where it says."""
    match = _BLOCKS.search(text)
    return int(match[1]) if match else None


def ranks(text: str) -> int:
    """Data-parallel ranks that the engine has."""
    return max(1, len(set(_RANKS.findall(text))))


def prefix_caching(text: str) -> bool | None:
    """Whether the engine keeps what it has computed for requests that begin alike, where it says."""
    match = _PREFIX_CACHING.search(text)
    return match[1] == "True" if match else None


def total(text: str, name: str) -> float | None:
    """The sum of the samples of ``name`` over all their labels; None where there is none."""
    found: float | None = None
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            try:
                value = float(line.rsplit(" ", 1)[1])
            except ValueError:
                continue
            found = value + (found or 0.0)
    return found
