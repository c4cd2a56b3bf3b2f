"""``kvloop-operator``: reconcile resources until SIGTERM."""

from __future__ import annotations

import asyncio
import sys

from kvloop_operator import logs, settings
from kvloop_operator.cluster.errors import ApiError, ConnectionUnknown
from kvloop_operator.running import run


def main() -> int:
    """The command; gives its exit status: 0 after a signal, 1 where the cluster cannot be worked with."""
    given = settings.parse(None)
    logs.configure(given.log_level)
    faults: list[BaseException] = []
    try:
        asyncio.run(run(given))
    except* (ApiError, ConnectionUnknown) as group:
        faults += group.exceptions
    for fault in faults:
        print(f"kvloop-operator: {fault}", file=sys.stderr)  # noqa: T201
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
