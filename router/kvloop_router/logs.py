"""Log lines as JSON, one a line, with the fields that were passed as ``extra``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "fields"}
_NOWHERE = {"process": 0, "processName": "", "thread": 0, "threadName": ""}
_BLANK = vars(logging.makeLogRecord({"levelno": logging.INFO, "levelname": "INFO", **_NOWHERE}))


class Fields(logging.LogRecord):
    """A line at level INFO with fields of its own, made without asking which thread, process and line it comes from:
    that costs more than all else of a line that is written for each turn.
    """

    fields: Mapping[str, Any]

    def __init__(self, name: str, message: str, at: float, fields: Mapping[str, Any]) -> None:
        """at: Unix time."""
        self.__dict__ = {**_BLANK, **fields, "name": name, "msg": message, "created": at, "fields": fields}


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
        if isinstance(record, Fields):
            line.update(record.fields)
        else:
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
