"""What kept handles take: memory, and the time of a take and a put. Writes ``bench/results/handles.json``.

20,000 conversations of 24,000 tokens, on 40 decode engines with a block size of 16. Each has 1,500 blocks, in runs as a
vLLM engine that has been busy allocates them: a few long ones, up or down, and single ones of the answers. The store is
filled, then every conversation takes its turns, each time in another order: find, take, spend, and put of the next
handle. Engines and prompts are made up; the stores, the records and the server are the real ones.

*In memory*, resident bytes are what the process grew by from before the first handle to after the last turn, what is
remembered of spent handles included; a time is the processor's for one call, of the round of turns in which it was
shortest, since what else runs on a machine lengthens any.

*On the server* (the distribution's own, on this machine, with fewer conversations) a time is that which a turn waits
for a call, of the best round too; bytes are those that the server says it uses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, thread_time
from typing import Any, TypeVar

from redis.asyncio import Redis

from kvloop_connector.digest import DigestKey, Retained
from kvloop_connector.handle import to_ranges
from kvloop_router import garbage
from kvloop_router.background import Background
from kvloop_router.history import trail
from kvloop_router.kept import HandleStore, Kept, Query
from kvloop_router.leases import Pace
from kvloop_router.request import Api, Request
from kvloop_router.shared_store import SCRIPT, SharedStore
from kvloop_router.store import MemoryStore
from kvloop_router.store_link import StoreLink
from tests.harness.store_server import store_server

RESULTS = Path(__file__).parent / "results" / "handles.json"
CONVERSATIONS = 20_000
ON_SERVER = 2_000
ROUNDS = 3
ENGINES = 40
TOKENS = 24_000
BLOCK_SIZE = 16
BLOCKS = TOKENS // BLOCK_SIZE
MESSAGES = 12
MOST_BLOCKS = BLOCKS * CONVERSATIONS
LONG_RUNS = 4
SINGLE_BLOCKS = 20
SCOPE = b"s" * 16
KEY = DigestKey(b"k" * 32, SCOPE)

T = TypeVar("T")


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--on-server", type=int, default=ON_SERVER, help="conversations there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    result = {
        "python": platform.python_version(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "conversations": arguments.conversations,
        "engines": ENGINES,
        "tokens": TOKENS,
        "block_size": BLOCK_SIZE,
        "messages": MESSAGES,
        "runs_of_blocks": LONG_RUNS + SINGLE_BLOCKS,
        "load_average_before": round(os.getloadavg()[0], 1),
        "memory": asyncio.run(in_memory(arguments.conversations)),
        "server": asyncio.run(on_server(arguments.on_server)),
    }
    arguments.results.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


async def in_memory(conversations: int) -> dict[str, Any]:
    """The store in the router's own memory."""
    # What the first handles of all load and cache is no part of what they take.
    await turns(MemoryStore(max_handles=10, clock=monotonic), Handles(Random(1)), 20, Times(thread_time))
    # As in a router.
    garbage.look_seldom()
    made, times = Handles(Random(7)), Times(thread_time)
    before = _resident()
    store = MemoryStore(max_handles=conversations, max_bytes=400 * 2**20, clock=monotonic)
    for number in range(conversations):
        await store.put(made.kept(number, turn=0), max_blocks=MOST_BLOCKS)
    filled = _resident()
    rounds = []
    for turn in range(1, ROUNDS + 1):
        times = Times(thread_time)
        await turns(store, made, conversations, times, turn=turn)
        rounds.append(times.summary())
    after = _resident()
    assert len(store) == conversations
    return {
        "resident_mb": round((after - before) / 1e6, 1),
        "resident_mb_when_filled": round((filled - before) / 1e6, 1),
        "resident_kib_a_handle": round((after - before) / conversations / 1024, 2),
        "counted_mb": round(store.size / 1e6, 1),
        "processor_us": _best(rounds),
    }


async def on_server(conversations: int) -> dict[str, Any]:
    """The store in a server on this machine."""
    background = Background()
    with TemporaryDirectory() as directory, store_server(Path(directory)) as server:
        link = StoreLink(server.url, script=SCRIPT, seconds=30, random=Random(7))
        client = Redis(host=server.address)
        store = SharedStore(
            link,
            name="bench",
            max_handles=conversations,
            max_bytes=2**33,
            keep_seconds=900,
            background=background,
            clock=monotonic,
        )
        try:
            assert await store.connect()
            made, rounds = Handles(Random(7)), []
            before = int((await client.info("memory"))["used_memory"])
            for number in range(conversations):
                await store.put(made.kept(number, turn=0), max_blocks=MOST_BLOCKS)
            for turn in range(1, ROUNDS + 1):
                times = Times(perf_counter)
                await turns(store, made, conversations, times, turn=turn)
                rounds.append(times.summary())
            told = await client.info()
            assert sum(each.handles for each in (await store.retained()).values()) == conversations
            return {
                "server": f"{told.get('server_name', 'redis')} {told['redis_version']}",
                "conversations": conversations,
                "server_kib_a_handle": round((int(told["used_memory"]) - before) / conversations / 1024, 2),
                "us": _best(rounds),
            }
        finally:
            await client.aclose()
            await background.close()
            await link.close()


async def turns(store: HandleStore, made: Handles, conversations: int, times: Times, *, turn: int = 1) -> None:
    """A turn of each conversation; those that the store does not know get their first handle."""
    order = list(range(conversations))
    Random(turn).shuffle(order)
    for number in order:
        found = await times.of("find", store.find(made.query(number, turn=turn)))
        for match in found.matches[:1]:
            grant = await times.of("take", store.take(match.kept.ident))
            assert grant is not None
            await times.of("spend", store.spend(match.kept.ident, grant))
        await times.of("put", store.put(made.kept(number, turn=turn), max_blocks=MOST_BLOCKS))


class Handles:
    """The handles of made-up conversations."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._next_block = [0] * ENGINES
        self._number = 0

    def kept(self, conversation: int, *, turn: int) -> Kept:
        """The handle that a conversation's turn leaves. Fresh objects each time, as from an engine's answer."""
        self._number += 1
        engine = conversation % ENGINES
        now = monotonic()
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"6f1c0f3e-7f0a-4d3f-9f5e-{engine:012d}",
            "remote_request_id": f"chatcmpl-{self._random.randbytes(16).hex()}-{self._number}",
            "remote_host": f"10.0.3.{engine}",
            "remote_port": 5600,
            "tp_size": 8,
            "remote_num_tokens": TOKENS,
            "remote_blocks_expiry_time": now + 480,
        }
        return Kept(
            tenant_scope=bytes(bytearray(SCOPE)),
            decode=f"qwen3-32b-decode-{engine}",
            process=f"0b1d6f0c-8a55-4d0e-a5a5-{engine:012d}/0",
            kv_revision="8f14e45fce",
            params=json.loads(json.dumps(params)),
            blocks=(to_ranges(self._blocks(engine)),),
            retained=Retained(digests=self._random.randbytes(8 * BLOCKS), tokens=TOKENS, exact=b""),
            block_size=BLOCK_SIZE,
            trail=trail(KEY, _request(conversation, MESSAGES + 2 * turn)),
            conversation=None,
            deadline=now + 450,
            since=now,
            ends=now + 3600,
            pace=Pace(turn, 30.0 * turn, 30.0),
        )

    def query(self, conversation: int, *, turn: int) -> Query:
        """The search of a conversation's turn."""
        return Query(SCOPE, None, trail(KEY, _request(conversation, MESSAGES + 2 * turn)))

    def _blocks(self, engine: int) -> Iterator[int]:
        """Block ids that no other live handle of the engine has, but for the handle of the turn before."""
        long = (BLOCKS - SINGLE_BLOCKS) // LONG_RUNS
        for number in range(LONG_RUNS):
            first = self._next_block[engine]
            self._next_block[engine] += long + 1
            yield from range(first, first + long) if number % 2 else range(first + long - 1, first - 1, -1)
        for _ in range(BLOCKS - LONG_RUNS * long):
            self._next_block[engine] += 2
            yield self._next_block[engine]
        self._next_block[engine] += 2


class Times:
    """How long calls took, by ``clock``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, list[float]] = {}

    async def of(self, name: str, call: Awaitable[T]) -> T:
        """Await a call, and note its time."""
        started = self._clock()
        result = await call
        self._seconds.setdefault(name, []).append(self._clock() - started)
        return result

    def summary(self) -> dict[str, dict[str, float]]:
        """Microseconds."""
        return {name: _quantiles(sorted(seconds)) for name, seconds in self._seconds.items()}


def _best(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each call the round with the lowest p99."""
    return {name: min((each[name] for each in rounds), key=lambda found: found["p99"]) for name in rounds[0]}


def _quantiles(ordered: list[float]) -> dict[str, float]:
    def at(part: float) -> float:
        return round(1e6 * ordered[min(len(ordered) - 1, int(part * len(ordered)))], 1)

    return {"p50": at(0.5), "p99": at(0.99), "p999": at(0.999)}


def _request(conversation: int, messages: int) -> Request:
    contents = [
        {"role": "assistant" if index % 2 else "user", "content": f"message {index} of conversation {conversation}"}
        for index in range(messages - 1)
    ]
    return Request(Api.CHAT, {"messages": [{"role": "system", "content": "Be brief."}, *contents]}, "m", None, False)


def _resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
