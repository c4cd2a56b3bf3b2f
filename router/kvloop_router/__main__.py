"""``kvloop-router --config FILE``: serve until SIGTERM, then let running turns end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import uvloop

from kvloop_router import config, garbage, logs
from kvloop_router.errors import InvalidConfig
from kvloop_router.serving import serving

_log = logging.getLogger(__name__)


def main() -> int:
    """The command; gives its exit status: 0 after a shutdown, 2 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="kvloop-router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the router's YAML file")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    arguments = parser.parse_args()
    logs.configure(arguments.log_level)
    try:
        settings = config.load(arguments.config, os.environ)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings))
    except InvalidConfig as error:
        print(f"kvloop-router: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


async def _serve(settings: config.Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(settings) as router:
        garbage.look_seldom()
        _log.info("serving", extra={"address": router.address, "admin_address": router.admin_address})
        await stop.wait()
        _log.info("draining", extra={"turns": router.state.turns})
        try:
            async with asyncio.timeout(settings.timeouts.drain_seconds):
                await router.drained()
        except TimeoutError:
            _log.warning("turns were cut off", extra={"turns": router.state.turns})


if __name__ == "__main__":
    sys.exit(main())
