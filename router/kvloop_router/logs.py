"""Log lines as JSON, one a line, with the fields that were passed as ``extra``."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

import orjson

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """``time``, ``level``, ``logger``, ``message``, then the extra fields. ``worker``: one of them, where there is
    any."""

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._own = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._own,
        }
        line.update((name, value) for name, value in vars(record).items() if name not in _STANDARD)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=str).decode()
        except orjson.JSONEncodeError:
            # It refuses what some texts hold: half a surrogate pair.
            return json.dumps(line, default=str)


def configure(level: str, *, worker: int | None = None) -> None:
    """Send everything from ``level`` on to standard error. worker: the number of this process; None: it has none."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(worker))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
