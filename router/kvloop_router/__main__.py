"""``kvloop-router --config FILE``: serve until SIGTERM, then let running turns end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from kvloop_router import config, garbage, logs, parent, place
from kvloop_router.errors import InvalidConfig
from kvloop_router.serving import Router, serving
from kvloop_router.workers import SERVES

_log = logging.getLogger(__name__)


def main() -> int:
    """The command; gives its exit status: 0 after a shutdown, 2 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="kvloop-router", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="the router's YAML file")
    source.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    arguments = parser.parse_args()
    logs.configure(arguments.log_level)
    try:
        if arguments.worker:
            settings, own = place.decode(sys.stdin.buffer.readline())
            logs.configure(arguments.log_level, worker=own.number)
            return _run(_work(settings, own))
        settings = config.load(arguments.config, os.environ)
        return _run(_serve(settings) if settings.workers == 1 else parent.serve(settings, arguments.log_level))
    except InvalidConfig as error:
        print(f"kvloop-router: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _run(work: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _serve(settings: config.Config) -> int:
    stop = _asked_to_stop()
    async with serving(settings) as router:
        garbage.look_seldom()
        _log.info("serving", extra={"address": router.address, "admin_address": router.admin_address})
        await _drained(router, stop)
    return 0


async def _work(settings: config.Config, own: place.Place) -> int:
    """Be one of several workers, until told to stop or until the parent, which holds the other end of standard input,
    has ended."""
    stop = _asked_to_stop()
    loop, parent_end = asyncio.get_running_loop(), sys.stdin.fileno()

    def ended() -> None:
        loop.remove_reader(parent_end)
        stop.set()

    loop.add_reader(parent_end, ended)
    async with serving(settings, place=own) as router:
        garbage.look_seldom()
        sys.stdout.buffer.write(SERVES)
        sys.stdout.buffer.flush()
        await _drained(router, stop)
    return 0


def _asked_to_stop() -> asyncio.Event:
    """Set once somebody wants this process to end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _drained(router: Router, stop: asyncio.Event) -> None:
    """Wait until it is to stop, and then until its turns have ended."""
    await stop.wait()
    _log.info("draining", extra={"turns": router.state.turns})
    try:
        async with asyncio.timeout(router.config.timeouts.drain_seconds):
            await router.drained()
    except TimeoutError:
        _log.warning("turns were cut off", extra={"turns": router.state.turns})


if __name__ == "__main__":
    sys.exit(main())
