"""What is measured of a router, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from bench.router import processes, wire
from bench.router.load import Address, Direct, Routed, Target, Turn, WrongAnswer, closed, opened
from bench.router.routers import Engines

SHORT, LARGE = 3_000, 1_000_000
CHUNKS = 17
_STEP_MS = 2
_LONG_CHUNKS, _LONG_STREAMS, _LONG_STEP_MS = 2_000, 100, 10
_OPEN_STREAMS, _OPEN_STEP_MS = (100, 600), 1_000
_RATES = (50, 500)
_BESIDE = 5
_REST_SECONDS = 0.5
_MOST = {SHORT: 300, LARGE: 40}
"""So many turns at once are more than a target has that keeps up."""
_READY_SECONDS = 60.0

Times = dict[str, float]


async def measure(address: Address, process: int, seconds: float, direct: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of the router that ``process`` is and that listens at ``address``.

    direct: what ``measure_direct`` gave.
    """
    target = Routed(address)
    await _ready(target)
    # First, while no other load has left memory that could be used again.
    memory = await _memory(target, process)
    short = await _turns(target, process, SHORT, 64, seconds)
    large = await _turns(target, process, LARGE, 4, seconds)
    chunks = await _chunks(target, process, seconds)
    latencies = await _latencies(target, seconds)
    target.close()
    return {
        "turns_per_s_per_core": short["per_core"],
        "turns_of_1mb_per_s_per_core": large["per_core"],
        "chunks_per_s_per_core": chunks,
        "added_ms": {name: _added(times, direct[name]) for name, times in latencies.items()},
        "kib_per_open_stream": memory,
        "turns_per_s_seen": short["seen"],
    }


async def measure_direct(engines: Engines, seconds: float) -> dict[str, Times | None]:
    """The times of turns without a router."""
    target = Direct(engines.prefill, engines.decode)
    try:
        return await _latencies(target, seconds)
    finally:
        target.close()


async def _ready(target: Target) -> None:
    conversation = wire.Conversation(0, size=SHORT, chunks=CHUNKS, step_ms=_STEP_MS)
    began = perf_counter()
    while True:
        try:
            await target.play(conversation.next_turn(), CHUNKS, Turn(perf_counter()))
        except (WrongAnswer, OSError):
            if perf_counter() - began > _READY_SECONDS:
                raise
            await asyncio.sleep(0.2)
        else:
            return


async def _turns(target: Target, process: int, size: int, at_once: int, seconds: float) -> dict[str, float]:
    """Turns a second and core, and those a second that were seen."""
    stop, count = asyncio.Event(), [0]
    conversations = _conversations(size, at_once)
    async with asyncio.TaskGroup() as group:
        group.create_task(closed(target, conversations, CHUNKS, stop, count))
        await asyncio.sleep(1)
        used, begun, counted = processes.processor_seconds(process), perf_counter(), count[0]
        await asyncio.sleep(seconds)
        used, counted = processes.processor_seconds(process) - used, count[0] - counted
        passed = perf_counter() - begun
        stop.set()
    return {"per_core": round(counted / used, 1), "seen": round(counted / passed, 1)}


async def _chunks(target: Target, process: int, seconds: float) -> float:
    """Chunks a second and core, of streams that all go on."""
    per_second = _LONG_STREAMS * 1000 / _LONG_STEP_MS
    streams = _Streams(target, _LONG_STEP_MS)
    await streams.open(_LONG_STREAMS)
    used, begun = processes.processor_seconds(process), perf_counter()
    await asyncio.sleep(seconds)
    used, passed = processes.processor_seconds(process) - used, perf_counter() - begun
    await streams.close()
    return round(per_second * passed / used, 1)


async def _memory(target: Target, process: int) -> float:
    """KiB that each of many open streams takes."""
    streams = _Streams(target, _OPEN_STEP_MS)
    resident = []
    for count in _OPEN_STREAMS:
        await streams.open(count)
        resident.append(processes.resident_kib(process))
    await streams.close()
    return round((resident[1] - resident[0]) / (_OPEN_STREAMS[1] - _OPEN_STREAMS[0]), 1)


class _Streams:
    """Streams that are longer than what is measured."""

    def __init__(self, target: Target, step_ms: int) -> None:
        self._target = target
        self._step_ms = step_ms
        self._turns: list[Turn] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, count: int) -> None:
        """Have so many, and wait until text comes on each."""
        for number in range(len(self._turns), count):
            conversation = wire.Conversation(number, size=SHORT, chunks=_LONG_CHUNKS, step_ms=self._step_ms)
            turn = Turn(perf_counter())
            play = self._target.play(conversation.next_turn(), _LONG_CHUNKS, turn)
            self._turns.append(turn)
            self._tasks.append(asyncio.get_running_loop().create_task(play))
            # One after the other, as clients come.
            await asyncio.sleep(0.002)
        while not all(turn.ttft for turn in self._turns):  # noqa: ASYNC110  nothing tells that would cost nothing
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)

    async def close(self) -> None:
        """End them all. Raises what ended one before."""
        for task in self._tasks:
            if not task.cancel():
                task.result()
                raise AssertionError("a stream that should have gone on has ended")
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _latencies(target: Target, seconds: float) -> dict[str, Times | None]:
    """Times to the first text, in milliseconds; None where the target cannot keep up."""
    found: dict[str, Times | None] = {}
    for name, size in (("short", SHORT), ("1mb", LARGE)):
        for rate in _RATES:
            found[f"{name}_{rate}"] = await _latency(target, size, rate, seconds)
            await asyncio.sleep(_REST_SECONDS)
    async with asyncio.TaskGroup() as group:
        group.create_task(_latency(target, LARGE, _BESIDE, seconds))
        short = group.create_task(_latency(target, SHORT, _RATES[0], seconds))
    return {**found, f"short_{_RATES[0]}_beside_1mb_{_BESIDE}": short.result()}


async def _latency(target: Target, size: int, rate: float, seconds: float) -> Times | None:
    conversations = _conversations(size, 64 if size == SHORT else 8)
    turns = await opened(target, conversations, CHUNKS, rate=rate, seconds=2 * seconds, most=_MOST[size])
    return None if turns is None else _times(turns)


def _conversations(size: int, count: int) -> Sequence[wire.Conversation]:
    return [wire.Conversation(number, size=size, chunks=CHUNKS, step_ms=_STEP_MS) for number in range(count)]


def _times(turns: Sequence[Turn]) -> Times:
    ordered = sorted(turn.ttft * 1000 for turn in turns)
    return {
        "p50": round(ordered[len(ordered) // 2], 3),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
    }


def _added(times: Times | None, direct: Times | None) -> Times | None:
    if times is None or direct is None:
        return None
    return {name: round(times[name] - direct[name], 3) for name in times}
