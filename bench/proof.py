"""What proving costs a turn: to the router with vLLM's own connector, to the engines with KvloopConnector.

Writes ``bench/results/proof.json`` and prints the table of ``docs/conformance.md``. A time is processor time, the
fastest of several runs on this machine, in microseconds, each side's runs alternating with the other's: what else runs
there only makes some of them slower. Neither the engine's own hashing of blocks is in it, which it does for its prefix
cache anyway, nor the requests to ``/tokenize`` and the token ids in streams, without which the router could prove
nothing.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from kvloop_connector.digest import DigestKey, retain, reusable_tokens
from kvloop_connector.handle import KVHandle
from kvloop_connector.proof import HashScheme, SealKey, Term, seal
from kvloop_connector.verdict import Outcome, Prompt, Reader, SpentHandles, judge, leg_params
from kvloop_router import splice

RESULTS = Path(__file__).parent / "results" / "proof.json"
BLOCK_SIZES = (16, 32)
PROMPT_TOKENS = (1_000, 8_000, 24_000, 100_000)
NEW_TOKENS = 100
RUNS = 100
KEY = SealKey(b"k" * 32)
ROUTERS_KEY = DigestKey(b"k" * 32, b"tenant, model, revision")
NOW = 1_000_000.0


def main() -> None:
    """Measure, print the tables and write the results."""
    rows = [measure(tokens, size) for size in BLOCK_SIZES for tokens in PROMPT_TOKENS]
    spliced = fastest({name: partial(splice.strip, data, keep_token_ids=False) for name, data in CHUNKS})
    result = {
        "python": platform.python_version(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "proof": rows,
        "splice_us": spliced,
    }
    print(table(result))
    for name, cost in spliced.items():
        print(f"splice of {name}: {cost} µs")
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


def measure(tokens: int, block_size: int) -> dict[str, float]:
    """Both sides' costs for a history of ``tokens`` tokens and a prompt that extends it by a few."""
    random = Random(tokens)
    history = [random.randrange(150_000) for _ in range(tokens)]
    prompt = [*history, *(random.randrange(150_000) for _ in range(NEW_TOKENS))]
    handle, whole = stock_handle(tokens - 1, block_size), (tokens - 1) // block_size
    retained = retain(ROUTERS_KEY, history, tokens - 1, block_size)

    def prove() -> int:
        return reusable_tokens(
            retained,
            prompt,
            key=ROUTERS_KEY,
            block_size=block_size,
            remote_num_tokens=tokens - 1,
            blocks_per_group=[len(handle["remote_block_ids"][0])],
        )

    scheme = HashScheme.of(KEY, algorithm="sha256_cbor", block_size=block_size, none_hash=bytes(32))
    hashes = block_hashes(prompt, block_size)

    def sealed() -> dict[str, Any]:
        rest = history[whole * block_size : tokens - 1]
        term = Term(NOW + 480, 77.5)
        return seal(
            KEY,
            handle,
            scheme=scheme,
            revision="0123456789",
            tokens=tokens - 1,
            hashes=hashes[:whole],
            rest=rest,
            ends=NOW + 3600,
            term=term,
        )

    issued = json.loads(json.dumps(sealed()))
    reader = Reader(
        key=KEY,
        engine_id="prefill",
        revision="0123456789",
        scheme=scheme,
        block_size=block_size,
        groups=1,
        divisible=True,
    )
    asked = Prompt(hashes, len(prompt), prompt)

    def check() -> int:
        decision = judge(reader, issued, asked, spent=SpentHandles(), now=NOW)
        assert decision.outcome is Outcome.READ
        return KVHandle(leg_params(decision, issued, reader)).num_tokens

    assert prove() == check() == whole * block_size
    costs = fastest(
        {
            "router_retain_us": lambda: retain(ROUTERS_KEY, history, tokens - 1, block_size),
            "router_prove_us": prove,
            "decode_seal_us": sealed,
            "prefill_check_us": check,
        }
    )
    return {
        "block_size": block_size,
        "history_tokens": tokens,
        "handle_bytes": _size(handle),
        "router_digest_bytes": len(retained.digests),
        "engine_proof_bytes": _size(issued) - _size(handle),
        **costs,
        "router_prove_us_per_1k": round(costs["router_prove_us"] * 1_000 / tokens, 1),
        "prefill_check_us_per_1k": round(costs["prefill_check_us"] * 1_000 / tokens, 1),
    }


def stock_handle(tokens: int, block_size: int) -> dict[str, Any]:
    """A handle as vLLM's own connector makes it."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(4_000, 4_000 + -(-tokens // block_size)))],
        "remote_engine_id": "5f3c8a52-7a1d-4c0e-9d8e-0c6f7b1f2a3b",
        "remote_request_id": "chatcmpl-0b7a4c1e9d2f4e6fa8c3b5d7e9f1a2b3-5c1d",
        "remote_host": "10.0.123.45",
        "remote_port": 5600,
        "tp_size": 8,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 123456.789012,
        "transfer_mode": "pull",
    }


def block_hashes(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Chained hashes of whole blocks in the shape of vLLM's ``sha256_cbor``: 32 bytes each."""
    last, made = bytes(32), []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        last = sha256(last + repr(tokens[start : start + block_size]).encode()).digest()
        made.append(last)
    return made


def fastest(actions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The fastest run of each, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(RUNS):
        for name, action in actions.items():
            started = process_time()
            action()
            times[name].append(process_time() - started)
    return {name: round(min(taken) * 1e6, 1) for name, taken in times.items()}


def table(result: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| block | history, tokens | handle | router keeps | engines add | router, µs | µs / 1,000 | prefill, µs"
        " | µs / 1,000 | ratio |",
        "|--|--|--|--|--|--|--|--|--|--|",
    ]
    for row in result["proof"]:
        cells = [
            f"{row['block_size']}",
            f"{row['history_tokens']:,}",
            *(f"{row[name]:,}" for name in ("handle_bytes", "router_digest_bytes", "engine_proof_bytes")),
            f"{row['router_prove_us']:,.0f}",
            f"{row['router_prove_us_per_1k']:.0f}",
            f"{row['prefill_check_us']:,.0f}",
            f"{row['prefill_check_us_per_1k']:.0f}",
            f"{row['prefill_check_us'] / row['router_prove_us']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _size(params: Mapping[str, Any]) -> int:
    return len(json.dumps(params, separators=(",", ":")))


def _processor() -> str:
    names = [line.partition(":")[2] for line in _cpuinfo() if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


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
