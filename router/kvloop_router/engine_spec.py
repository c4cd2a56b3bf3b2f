"""An engine as discovery names it, whatever the discovery."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvloop_connector.settings import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine process and what is to be done with it.

    pod_uid: of its pod, by which the operator knows it.
    model: the name under which it serves its model; empty where whoever names it does not say.
    process: changes whenever the process does, which it can within a pod; all that the engine held goes with it.
    ready: it may get new turns. One that is not ready, or that drains, stays known: what runs there goes on, and what
        it retains can be pulled.
    checked: whoever names it has just seen it answer its health check.
    draining: it is to get no new turns, since it will be ended.
    ending: it has drained and is being ended. It waits until nobody needs what it retains any more, and nobody does.
    """

    name: str
    role: Role
    url: str
    pod_uid: str
    process: str
    kv_revision: str
    zone: str = ""
    model: str = ""
    ready: bool = True
    checked: bool = False
    draining: bool = False
    ending: bool = False

    def is_same(self, other: EngineSpec) -> bool:
        """Whether both name the same process, reached in the same way, whatever is to be done with it."""
        to_be_done = {field: getattr(other, field) for field in ("zone", "ready", "checked", "draining", "ending")}
        return replace(self, **to_be_done) == other
