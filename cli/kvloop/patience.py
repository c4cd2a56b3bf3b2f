"""Laid on an engine's PYTHONPATH as ``sitecustomize.py``: what waits sleeps, so that several engines share few cores.

Never for timings: on a machine of its own an engine spins because that is faster. Stands by itself, since every Python
process of an engine runs it before anything else is imported.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

YIELD_SECONDS = 0.001
TRANSFER_POLL_MICROSECONDS = 10_000


def _yield_by_sleeping() -> None:
    time.sleep(YIELD_SECONDS)


class _PatientTransfers(MetaPathFinder):
    """Has NIXL's progress threads wait for their sockets: they poll with no timeout (``nixl/_api.py``, pthrDelay)."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("nixl") or not fullname.endswith("._bindings"):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            make_agent = module.nixlAgent

            def patient_agent(name: str, config: Any) -> Any:
                config.pthrDelay = TRANSFER_POLL_MICROSECONDS
                return make_agent(name, config)

            module.nixlAgent = patient_agent  # type: ignore[attr-defined]

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    os.sched_yield = _yield_by_sleeping
    sys.meta_path.insert(0, _PatientTransfers())
