"""Data-parallel ranks of one engine: each has KV blocks, a prefix cache and an engine id of its own. Pure.

``X-data-parallel-rank`` names the rank that is to compute a request (vllm: entrypoints/generate/base/serving.py:220,
0.32; a rank that there is not is refused with 400). Without it the engine takes the rank with the least to do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

HEADER = "X-data-parallel-rank"

_SUFFIX = re.compile(r"_dp(\d+)$")
_MOST_AHEAD = 8
"""By how many requests the rank that holds a conversation may be ahead of the least loaded one and still get it."""


def of(engine_id: str) -> int | None:
    """The rank in an engine id; None where there is but one."""
    match = _SUFFIX.search(engine_id)
    return int(match[1]) if match else None


def without(engine_id: str) -> str:
    """The id of the whole engine process."""
    return _SUFFIX.sub("", engine_id)


def choose(loads: Sequence[int], random: Random, home: int | None) -> int:
    """The rank for a decode leg. loads: requests at each rank. home: the one that holds the conversation."""
    least = min(loads)
    if home is not None and home < len(loads) and loads[home] <= 2 * least + _MOST_AHEAD:
        return home
    return random.choice([rank for rank, load in enumerate(loads) if load == least])
