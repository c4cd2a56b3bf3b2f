"""What the router's proof costs a turn: digests of a prompt, the comparison, and the splicing of a streamed chunk.

Writes ``bench/results/proof.json``. Times are medians of several runs on this machine, in microseconds.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

from kvloop_connector.digest import DigestKey, retain, reusable_tokens
from kvloop_router import splice

RESULTS = Path(__file__).parent / "results" / "proof.json"
BLOCK_SIZE = 16
PROMPT_TOKENS = (1_000, 8_000, 24_000, 100_000)
RUNS = 15


def main() -> None:
    """Measure, print a table and write the results."""
    key = DigestKey(b"k" * 32, b"tenant, model, revision")
    rows = [measure(key, tokens) for tokens in PROMPT_TOKENS]
    chunks = {name: microseconds(partial(splice.strip, data, keep_token_ids=False)) for name, data in CHUNKS}
    print(f"{'prompt tokens':>14} {'digest bytes':>13} {'retain µs':>10} {'prove µs':>10} {'prove µs/1k':>12}")
    for row in rows:
        print(
            "{prompt_tokens:>14} {digest_bytes:>13} {retain_us:>10} {prove_us:>10} {prove_us_per_1k:>12}".format(**row)
        )
    for name, cost in chunks.items():
        print(f"splice of {name}: {cost} µs")
    result = {"python": platform.python_version(), "block_size": BLOCK_SIZE, "proof": rows, "splice_us": chunks}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


def measure(key: DigestKey, tokens: int) -> dict[str, float]:
    """The cost for a history of ``tokens`` tokens and a new prompt that extends it by a hundred."""
    random = Random(tokens)
    history = [random.randrange(150_000) for _ in range(tokens)]
    prompt = [*history, *(random.randrange(150_000) for _ in range(100))]
    retained = retain(key, history, tokens - 1, BLOCK_SIZE)

    def prove() -> int:
        return reusable_tokens(
            retained,
            prompt,
            key=key,
            block_size=BLOCK_SIZE,
            remote_num_tokens=tokens - 1,
            blocks_per_group=[-(-tokens // BLOCK_SIZE)],
        )

    assert prove() == (tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    cost = microseconds(prove)
    return {
        "prompt_tokens": tokens,
        "digest_bytes": len(retained.digests),
        "retain_us": microseconds(lambda: retain(key, history, tokens - 1, BLOCK_SIZE)),
        "prove_us": cost,
        "prove_us_per_1k": round(cost * 1_000 / tokens, 1),
    }


def microseconds(action: Callable[[], object]) -> float:
    """Median time of ``action``."""
    times = []
    for _ in range(RUNS):
        started = perf_counter()
        action()
        times.append(perf_counter() - started)
    return round(median(times) * 1e6, 1)


def _chunk(*, others: Mapping[str, object] | None = None, **choice: object) -> bytes:
    event = {
        "id": "chatcmpl-9f2c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "qwen",
        "choices": [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None, **choice}],
        **(others or {}),
    }
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


CHUNKS = (
    ("a chunk without token ids", _chunk()),
    ("a chunk with token ids", _chunk(token_ids=[4711])),
    ("a chunk of vLLM 0.33", _chunk(token_ids=[4711], others={"kv_transfer_params": None})),
)

if __name__ == "__main__":
    main()
