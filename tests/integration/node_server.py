"""A container for the node's tests: ``node_server.py ADDRESS [FILE]`` serves ``/``, ``/ready`` and ``/live``."""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType

PORT = 8000


class Handler(BaseHTTPRequestHandler):
    """Ready while ``READY_FILE`` is there (or not asked for), alive while ``SICK_FILE`` is not."""

    def do_GET(self) -> None:
        environment = os.environ
        ready = "READY_FILE" not in environment or Path(environment["READY_FILE"]).exists()
        sick = "SICK_FILE" in environment and Path(environment["SICK_FILE"]).exists()
        failed = (self.path == "/ready" and not ready) or (self.path == "/live" and sick)
        file = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else None
        body = json.dumps({"pid": os.getpid(), "environment": dict(environment), "file": file}).encode()
        self.send_response(503 if failed else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def on_sigterm(_number: int, _frame: FrameType | None) -> None:
    if "EVENTS_FILE" in os.environ:
        with Path(os.environ["EVENTS_FILE"]).open("a") as events:
            events.write("SIGTERM\n")
    if "STUBBORN" not in os.environ:
        sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, on_sigterm)
    ThreadingHTTPServer((sys.argv[1], PORT), Handler).serve_forever()
