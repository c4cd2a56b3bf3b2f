"""Argo CD's judgement of a resource: the shipped script, run as Argo CD runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lupa.lua51 import LuaError, LuaRuntime  # type: ignore[import-untyped]

from tests.cluster.paths import REPOSITORY

__all__ = ["FOLDER", "SCRIPT", "Health", "LuaError", "health"]

FOLDER: Final = REPOSITORY / "examples/gitops/argocd/resource_customizations/kvloop.io/DisaggregatedInference"
SCRIPT: Final = FOLDER / "health.lua"

# Argo CD opens the base, table and package libraries and a part of `os`, unless it is told to open all of them.
_CLOSED: Final = """
debug.setmetatable("", nil)
for _, library in ipairs({"coroutine", "debug", "io", "math", "os", "string"}) do
  _G[library] = nil
end
"""
_STATUSES: Final = frozenset({"Healthy", "Progressing", "Degraded", "Suspended", "Missing", "Unknown"})


@dataclass(frozen=True, slots=True)
class Health:
    """What Argo CD shows."""

    status: str
    message: str


def health(resource: Mapping[str, Any], script: Path = SCRIPT) -> Health:
    """The health of an object as the API server gives it."""
    runtime = LuaRuntime(unpack_returned_tuples=True, register_eval=False, register_builtins=False)
    runtime.execute(_CLOSED)
    runtime.globals().obj = runtime.table_from(resource, recursive=True)
    result = runtime.execute(script.read_text(encoding="utf-8"))
    found = Health(result.status, result.message)
    assert found.status in _STATUSES, found
    return found
