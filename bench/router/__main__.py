"""Measure routers against the same engine that only pretends: ``bench/results/router.json``.

``make bench-router`` runs it. Processor time a turn and a chunk is what the routers are compared by: it hardly depends
on what else the machine does, while times that pass on a clock do, since routers, engines and clients share its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import uvloop

from bench.router import processes, routers
from bench.router.measure import measure, measure_direct
from bench.router.routers import Engines, Router
from tests.harness.store_server import SERVERS, store_server

RESULTS = Path(__file__).parents[1] / "results" / "router.json"
BASELINE = "vllm-router"
_START_SECONDS = 60.0


def main() -> None:
    """The command."""
    arguments = _arguments()
    seconds: float = arguments.seconds
    began = monotonic()
    with TemporaryDirectory() as directory, ExitStack() as stack:
        found = _routers(arguments, _store(stack, Path(directory)))
        wanted = [router for router in found if not arguments.only or router.name in arguments.only]
        engines = {retains: _engines(stack, Path(directory), retains=retains) for retains in (True, False)}
        direct = _run(measure_direct(engines[False], seconds))
        measured: dict[str, Any] = {}
        for router in wanted:
            try:
                measured[router.name] = _measured(router, engines[router.retains], Path(directory), seconds, direct)
            except Exception as error:  # noqa: BLE001  one router's failure is a result, the others' are wanted too
                measured[router.name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            print(router.name, json.dumps(measured[router.name]), file=sys.stderr, flush=True)
    compare(measured)
    result = {
        "python": platform.python_version(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, shared by routers, engines and clients",
        "load": "streams of 17 chunks, 12 messages (3 KB) or a body of 1 MB; engines that compute nothing (simulated)",
        "minutes": round((monotonic() - began) / 60, 1),
        "direct_ms": direct,
        "routers": measured,
    }
    print(table(result))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def compare(measured: Mapping[str, Any]) -> None:
    """Enter what each router does beside the baseline, where that was measured."""
    base = measured.get(BASELINE)
    for one in measured.values():
        if base is None or "failed" in base or "failed" in one:
            continue
        one["ratio_to_vllm_router"] = {
            name: round(one[name] / base[name], 2)
            for name in ("turns_per_s_per_core", "turns_of_1mb_per_s_per_core", "chunks_per_s_per_core")
            if one[name] and base[name]
        }


def table(result: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| router | turns/s and core | of 1 MB | chunks/s and core | KiB an open stream | added ms at 50/s, p50 / p99"
        " | at 500/s | 1 MB at 50/s |",
        "|--|--|--|--|--|--|--|--|",
    ]
    for name, one in result["routers"].items():
        if "failed" in one:
            lines.append(f"| {name} | {one['failed']} |")
            continue
        cells = [
            name,
            *(
                f"{one[key]:,.0f}"
                for key in ("turns_per_s_per_core", "turns_of_1mb_per_s_per_core", "chunks_per_s_per_core")
            ),
            f"{one['kib_per_open_stream']:.0f}",
            *(_added(one["added_ms"][key]) for key in ("short_50", "short_500", "1mb_50")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _added(times: Mapping[str, float] | None) -> str:
    return "cannot keep up" if times is None else f"{times['p50']:.2f} / {times['p99']:.2f}"


def _measured(
    router: Router, engines: Engines, directory: Path, seconds: float, direct: Mapping[str, Any]
) -> dict[str, Any]:
    port = _free_port()
    with TemporaryDirectory(dir=directory) as own:
        start = router.start(Path(own), port, engines)
        log = Path(own) / "log"
        with processes.running(start.command, log, environment=start.environment) as process:
            try:
                measured: dict[str, Any] = _run(measure(("127.0.0.1", port), process.pid, seconds, direct))
            except Exception:
                print(router.name, log.read_text(encoding="utf-8", errors="replace")[-3000:], file=sys.stderr)
                raise
    return measured


def _engines(stack: ExitStack, directory: Path, *, retains: bool) -> Engines:
    command = [sys.executable, "-m", "bench.router.engine", *(["--retains"] if retains else [])]
    process = stack.enter_context(processes.running(command, directory / f"engines-{retains}", says=True))
    assert process.stdout is not None
    prefill, decode = map(int, process.stdout.readline().split())
    return Engines(("127.0.0.1", prefill), ("127.0.0.1", decode))


def _run(work: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _store(stack: ExitStack, directory: Path) -> str | None:
    """The URL of a server of handles; None where this machine has none."""
    if not any(shutil.which(command) for command in SERVERS):
        return None
    return stack.enter_context(store_server(directory)).url


def _routers(arguments: argparse.Namespace, store: str | None) -> Sequence[Router]:
    found = [
        routers.kvloop("kvloop", connector="KvloopConnector", reuse=True),
        routers.kvloop("kvloop stock", connector="NixlConnector", reuse=True),
        routers.kvloop("kvloop one-way", connector="NixlConnector", reuse=False),
    ]
    if store is not None:
        found += [
            routers.kvloop(name, connector="KvloopConnector", reuse=True, store=store, workers=workers)
            for name, workers in (("kvloop, shared handles", 1), ("kvloop, 2 workers", 2))
        ]
    if arguments.vllm_router:
        found.append(routers.vllm_router(arguments.vllm_router))
    if arguments.xpyd:
        found.append(routers.xpyd_proxy(arguments.xpyd))
    if arguments.xpyd and arguments.multi_turn_proxy:
        found.append(routers.multi_turn_proxy(arguments.xpyd, arguments.multi_turn_proxy))
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=__doc__)
    parser.add_argument("--vllm-router", type=Path, metavar="ENVIRONMENT", help="where vllm-router is installed")
    parser.add_argument("--xpyd", type=Path, metavar="ENVIRONMENT", help="where xpyd-proxy is installed")
    parser.add_argument(
        "--multi-turn-proxy", type=Path, metavar="FILE", help="vLLM's disagg_proxy_multiturn.py; runs where xpyd does"
    )
    parser.add_argument("--only", action="append", metavar="ROUTER", help="measure only this router; may be repeated")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each of the measurements of a router")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the results are written")
    return parser.parse_args()


def _free_port() -> int:
    """A port that is free, and the one after it too."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


if __name__ == "__main__":
    main()
