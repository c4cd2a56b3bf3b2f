"""``kvloop top``: engines, paths and retained memory, live."""

from __future__ import annotations

import argparse
import json
import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvloop.watch import access, snapshot
from kvloop.watch.access import AccessError, RouterAdmin
from kvloop.watch.top_screen import screen

_SECONDS = 2.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch engines, paths and retained memory",
        description="Show engines with their load, the paths that turns took and why, times to the first token, and "
        "how much memory decode engines retain, until Ctrl-C.",
    )
    parser.add_argument("--once", action="store_true", help="once, since the routers' start")
    parser.add_argument("--json", action="store_true", help="as JSON, one document a line")
    parser.add_argument("--interval", type=_interval, default=_SECONDS, metavar="SECONDS", help="how often (default 2)")
    access.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    try:
        with access.routers(arguments) as routers:
            if arguments.once or arguments.json:
                _print(routers, arguments, console)
            else:
                _watch(routers, arguments.interval, console)
    except AccessError as error:
        sys.stderr.write(f"kvloop top: {error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _print(routers: list[RouterAdmin], arguments: argparse.Namespace, console: Console) -> None:
    before: snapshot.Snapshot | None = None
    while True:
        now = snapshot.read(routers, time.monotonic())
        shown = snapshot.view(before, now)
        if arguments.json:
            print(json.dumps(snapshot.document(shown)), flush=True)  # noqa: T201
        else:
            console.print(screen(shown))
        if arguments.once:
            return
        before = now
        time.sleep(arguments.interval)


def _watch(routers: list[RouterAdmin], interval: float, console: Console) -> None:
    before = snapshot.read(routers, time.monotonic())
    with Live(screen(snapshot.view(None, before)), console=console, screen=console.is_terminal) as live:
        while True:
            time.sleep(interval)
            try:
                now = snapshot.read(routers, time.monotonic())
            except AccessError as error:
                # It may be started anew just now; what was seen last stays on the screen.
                live.update(Group(screen(snapshot.view(None, before)), Text(str(error), style="red")), refresh=True)
                continue
            live.update(screen(snapshot.view(before, now)), refresh=True)
            before = now


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: not between 0.1 and 3600 seconds")
    return value
