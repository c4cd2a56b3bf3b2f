"""``kvloop explain``: why a turn took the path that it took."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any
from urllib.parse import quote

from kvloop.watch import access
from kvloop.watch.access import AccessError, NotFound, RouterAdmin
from kvloop.watch.explained import explained, recent


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="say why a turn took its path",
        description="Say which path a recent turn took and why, on which engines, how many tokens it could and did "
        "reuse, and where its history differs from the turn before. Without an id: list the recent turns.",
    )
    parser.add_argument("request_id", nargs="?", help="as in the answer's header X-Request-Id")
    parser.add_argument("--json", action="store_true", help="as JSON")
    access.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        with access.routers(arguments) as routers:
            if arguments.request_id is None:
                told: Any = [turn for router in routers for turn in router.json("/admin/v1/turns")["turns"]]
                told.sort(key=lambda turn: turn["at"], reverse=True)
                text = recent(told)
            else:
                told = _explanation(routers, arguments.request_id)
                text = explained(told)
    except AccessError as error:
        sys.stderr.write(f"kvloop explain: {error}\n")
        return 1
    sys.stdout.write(json.dumps(told, indent=2) + "\n" if arguments.json else text)
    return 0


def _explanation(routers: list[RouterAdmin], request_id: str) -> Any:
    """Of the router that played the turn. Raises AccessError."""
    for router in routers:
        try:
            return router.json(f"/admin/v1/turns/{quote(request_id, safe='')}/explanation")
        except NotFound:
            continue
    asked = ", ".join(router.name for router in routers)
    raise NotFound(
        f"no turn {request_id} among the recent ones of {asked}; the id is the answer's header X-Request-Id, and a "
        "router remembers its last 1,000 turns until it is started anew"
    )
