"""The KV of a request's tokens, written into its blocks."""

from __future__ import annotations

from kvloop_sim import generation, tokenizer
from kvloop_sim.blocks import BlockPool
from kvloop_sim.records import EngineRequest


def blocks_of(tokens: int, size: int) -> int:
    """How many blocks of ``size`` tokens hold so many tokens."""
    return -(-tokens // size)


def write(pool: BlockPool, request: EngineRequest, size: int) -> None:
    """Compute what is missing of the KV of all tokens of a request, whose blocks, of ``size`` tokens, have room for
    it, and have it attend to all of it."""
    tokens, start = request.tokens, request.computed
    if request.attended > start:
        request.attention, request.attended = 0, 0
    for index in range(request.attended // size, blocks_of(start, size)):
        values = pool.read(request.blocks[index])[: min(size, start - index * size)]
        skip = max(0, request.attended - index * size)
        request.attention = generation.attend(request.attention, values[skip:])
    previous = request.seed if start == 0 else pool.read(request.blocks[(start - 1) // size])[(start - 1) % size]
    fresh: list[int] = []
    for position in range(start, len(tokens)):
        previous = generation.kv_value(previous, tokens[position])
        pool.write(request.blocks[position // size], position % size, previous)
        fresh.append(previous)
    request.attention = generation.attend(request.attention, fresh)
    request.computed = request.attended = len(tokens)


def overshoot(pool: BlockPool, request: EngineRequest, size: int, more: int) -> None:
    """Claim so many more tokens than exist, where blocks are left for them: the first is the last token's own, the
    others those of rejected drafts."""
    total = request.computed + more
    missing = blocks_of(total, size) - len(request.blocks)
    if missing > pool.free:
        return
    request.blocks += pool.take(max(0, missing))
    last = request.computed - 1
    previous = pool.read(request.blocks[last // size])[last % size]
    for position in range(request.computed, total):
        draft = request.tokens[-1] if position == request.computed else tokenizer.END_OF_TEXT
        previous = generation.kv_value(previous, draft)
        pool.write(request.blocks[position // size], position % size, previous)
    request.computed = total
