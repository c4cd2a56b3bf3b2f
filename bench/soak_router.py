"""The router's command, which on SIGUSR1 writes how many tasks it has: ``bench.soak_router FILE --config …``."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from kvloop_router import __main__ as router

_new_event_loop = uvloop.new_event_loop


def main() -> int:
    """As the router's own, after the name of the file."""
    file = Path(sys.argv.pop(1))

    def telling_loop() -> uvloop.Loop:
        loop = _new_event_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: file.write_text(f"{len(asyncio.all_tasks(loop))}\n"))
        return loop

    uvloop.new_event_loop = telling_loop
    return router.main()


if __name__ == "__main__":
    sys.exit(main())
