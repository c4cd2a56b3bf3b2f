"""Mixed load on a router process for as long as is asked: ``bench/results/soak.json`` and ``soak.png``.

    python -m bench.soak --minutes 60

Router and simulated engines are processes of their own. Conversations go on, streamed and not, with and without ids;
clients leave, ask for several answers, stop at a string and end conversations. Memory, descriptors and tasks of the
router are read all the while. Before and after the load it is left alone until nothing runs: what it has then of
descriptors and tasks has to be the same, and its memory must not grow by more than 5 % after the warm-up; else the
status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
import yaml
from rich.console import Console

from kvloop_connector.settings import KVTransferSettings, Role
from tests.harness.addresses import free_loopback_address
from tests.harness.engines import Engines, EngineSpec, Kind, start
from tests.integration.router_process import MODEL, configuration, write_engines

RESULTS: Final = Path(__file__).parent / "results" / "soak.json"
MOST_GROWTH: Final = 0.05
PORT: Final = 8000
TTL_SECONDS: Final = 60
HANDLE_SECONDS: Final = 30
CONVERSATIONS: Final = 12
PAUSE_SECONDS: Final = 0.5
"""Between two turns of a conversation, in the mean."""

_WARM_UP: Final = 0.25
"""This part of the time, the first; no less than the time in which the store of handles fills."""

_SAMPLE_SECONDS: Final = 2.0
_IDLE_SECONDS: Final = 15.0
"""Longer than idle connections are kept."""

_TURNS: Final = 8
_READY_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """seconds: since the load began. rss_mib, descriptors, tasks: of the router."""

    seconds: float
    rss_mib: float
    descriptors: int
    tasks: int


class RouterProcess:
    """The router, with what can be seen of it from outside."""

    def __init__(self, directory: Path, engines: Engines) -> None:
        host = free_loopback_address(PORT)
        document = configuration(
            directory,
            listen={"host": host, "port": PORT},
            handleTtlSeconds=HANDLE_SECONDS,
            kvTransfer={"decoderKvBlocksTtlSeconds": TTL_SECONDS, "kvRecomputeThreshold": 32},
        )
        write_engines(directory / "engines.json", engines.as_discovery_file())
        (directory / "router.yaml").write_text(yaml.safe_dump(document))
        self.url = f"http://{host}:{PORT}"
        self._tasks = directory / "tasks"
        self.log = directory / "router.log"
        command = [sys.executable, "-m", "bench.soak_router", str(self._tasks)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--config", str(directory / "router.yaml"), "--log-level", "warning"],
                stdout=log,
                stderr=log,
            )

    def sample(self, began: float) -> Sample:
        """What it takes now; its tasks as of the last time."""
        proc = Path(f"/proc/{self.process.pid}")
        status = (proc / "status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        tasks = int(self._tasks.read_text() or 0) if self._tasks.exists() else 0
        self.process.send_signal(signal.SIGUSR1)
        return Sample(
            round(time.monotonic() - began, 1), round(resident / 1024, 2), len(list((proc / "fd").iterdir())), tasks
        )

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until it takes turns."""
        async with asyncio.timeout(_READY_SECONDS):
            while True:
                with suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/readyz") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)


@contextmanager
def routing(directory: Path, engines: Engines) -> Iterator[RouterProcess]:
    """A router that runs."""
    router = RouterProcess(directory, engines)
    try:
        yield router
    finally:
        router.process.terminate()
        router.process.wait(30)


class Load:
    """Clients. ``counts``: turns by what came of them."""

    def __init__(self, router: RouterProcess, seed: int) -> None:
        self._router = router
        self._chance = Random(seed)
        self.counts: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Keep conversations going for so long."""
        until = time.monotonic() + seconds
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as clients:
            for number in range(CONVERSATIONS):
                clients.create_task(self._client(session, number, until))

    async def _client(self, session: aiohttp.ClientSession, number: int, until: float) -> None:
        talked = 0
        while time.monotonic() < until:
            talked += 1
            name = f"talk-{number}-{talked}" if self._chance.random() < 0.5 else None
            messages = [self._said("user", 80)]
            for _ in range(self._chance.randint(1, _TURNS)):
                answer = await self._turn(session, messages, name)
                if time.monotonic() > until:
                    return
                messages += [{"role": "assistant", "content": answer}, self._said("user", 15)]
                await asyncio.sleep(self._chance.uniform(0, 2 * PAUSE_SECONDS))
            if name is not None and self._chance.random() < 0.3:
                async with session.delete(f"{self._router.url}/kvloop/v1/conversations/{name}") as response:
                    self.counts[f"ended {response.status}"] += 1

    async def _turn(self, session: aiohttp.ClientSession, messages: list[Any], name: str | None) -> str:
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": self._chance.randint(4, 24)}
        body |= {"stream": self._chance.random() < 0.6} | ({"conversation_id": name} if name else {})
        unusual = self._chance.random()
        if unusual < 0.05:
            body |= {"n": 2, "temperature": 1.0}
        elif unusual < 0.1:
            body |= {"stop": ["a"]}
        patience = self._chance.uniform(0, 0.2) if 0.1 < unusual < 0.2 else None
        try:
            async with asyncio.timeout(patience):
                async with session.post(f"{self._router.url}/v1/chat/completions", json=body) as response:
                    text = await response.text()
                    path = response.headers.get("X-Kvloop-Path", "")
                    self.counts[path if response.status == 200 else f"status {response.status}"] += 1
        except TimeoutError:
            self.counts["left"] += 1
            return "nothing that was waited for"
        except aiohttp.ClientError as error:
            self.counts[type(error).__name__] += 1
            return "nothing that came"
        return _content(text) or "nothing"

    def _said(self, role: str, words: int) -> dict[str, str]:
        picked = self._chance.choices(("river", "stone", "old", "quiet", "carry", "letter", "window"), k=words)
        return {"role": role, "content": " ".join(picked)}


async def soak(router: RouterProcess, seconds: float, seed: int) -> dict[str, Any]:
    """Load for so long, and what the router took."""
    async with aiohttp.ClientSession() as session:
        await router.ready(session)
    await Load(router, seed).run(10)
    before = await _at_rest(router)
    load, samples, began = Load(router, seed + 1), list[Sample](), time.monotonic()

    async def watch() -> None:
        while True:
            samples.append(router.sample(began))
            await asyncio.sleep(_SAMPLE_SECONDS)

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch())
        await load.run(seconds)
        watcher.cancel()
    after = await _at_rest(router)
    warm = [each for each in samples if each.seconds >= max(_WARM_UP * seconds, min(HANDLE_SECONDS, seconds / 2))]
    third = max(1, len(warm) // 3)
    first, last = (statistics.median(each.rss_mib for each in part) for part in (warm[:third], warm[-third:]))
    return {
        "turns": sum(load.counts.values()),
        "counts": dict(load.counts.most_common()),
        "rss_mib_after_warm_up": first,
        "rss_mib_in_the_end": last,
        "growth": round(last / first - 1, 4),
        "descriptors_at_rest": [before.descriptors, after.descriptors],
        "tasks_at_rest": [before.tasks, after.tasks],
        "samples": [[each.seconds, each.rss_mib, each.descriptors, each.tasks] for each in samples],
    }


async def _at_rest(router: RouterProcess) -> Sample:
    await asyncio.sleep(_IDLE_SECONDS)
    router.sample(time.monotonic())
    await asyncio.sleep(1)
    return router.sample(time.monotonic())


def faults(told: dict[str, Any]) -> list[str]:
    """What is wrong; empty where nothing is."""
    found = []
    if told["growth"] > MOST_GROWTH:
        found.append(f"memory grew by {told['growth']:.1%}")
    for what in ("descriptors_at_rest", "tasks_at_rest"):
        before, after = told[what]
        if after > before:
            found.append(f"{what}: {before} before, {after} after")
    failed = sum(count for what, count in told["counts"].items() if what.startswith("status 5") or "Error" in what)
    if failed:
        found.append(f"{failed} turns failed")
    return found


def main() -> int:
    """Run, write the results and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    settings = KVTransferSettings(decoder_kv_blocks_ttl=TTL_SECONDS, kv_recompute_threshold=32)
    specs = [
        EngineSpec(role=role, settings=settings, kv_blocks=2048, arguments=("--sim-time-scale", "0.2"))
        for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        start(Kind.SIM, Path(folder), specs) as engines,
        routing(Path(folder), engines) as router,
    ):
        told = asyncio.run(soak(router, 60 * given.minutes, given.seed))
    result = {
        "engines": "simulated, as processes on this machine, as the clients are",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "minutes": given.minutes,
        **told,
    }
    RESULTS.write_text(json.dumps(result) + "\n")
    _plot(result)
    found = faults(result)
    Console().print({key: value for key, value in result.items() if key != "samples"}, found or "nothing is wrong")
    return int(bool(found))


def _plot(result: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(8, 7))
    minutes = [row[0] / 60 for row in result["samples"]]
    for index, label in enumerate(("RSS, MiB", "descriptors", "tasks"), start=1):
        axes[index - 1].plot(minutes, [row[index] for row in result["samples"]], linewidth=0.8)
        axes[index - 1].set_ylabel(label)
        axes[index - 1].set_ylim(bottom=0)
    axes[0].set_title(f"A router under mixed load, {result['turns']:,} turns (simulated engines)")
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(RESULTS.with_suffix(".png"), dpi=110)


def _content(text: str) -> str:
    if not text.startswith("data:"):
        with suppress(ValueError, KeyError, IndexError):
            return str(json.loads(text)["choices"][0]["message"]["content"])
        return ""
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ()))


if __name__ == "__main__":
    raise SystemExit(main())
