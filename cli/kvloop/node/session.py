"""A deployment running on a local node, with its router within reach."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from rich.console import Console

from kvloop.node import screen
from kvloop.node.errors import PodsNotReady
from kvloop.node.node import LocalNode, NodeSettings
from kvloop.node.resource import LocalDeployment
from kvloop.node.stand_in import EngineKind
from kvloop_operator import names

PROBE_PERIOD_SECONDS = 1.0
"""A cluster's probes have tens of seconds for a model to load; here nobody wants to wait that long for the next one."""

READY_SECONDS = {EngineKind.SIM: 300.0, EngineKind.VLLM: 1200.0}

_LOG_LINES = 20


@contextmanager
def state_directory(asked: Path | None) -> Iterator[Path]:
    """The directory that was asked for, which stays, or one that goes in the end."""
    if asked is not None:
        asked.mkdir(parents=True, exist_ok=True)
        yield asked.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="kvloop-") as name:
        yield Path(name).resolve()


@asynccontextmanager
async def running(deployment: LocalDeployment, state_dir: Path, console: Console) -> AsyncIterator[LocalNode]:
    """The deployment on a node of its own, everything Ready; its pods are shown meanwhile.

    Raises ``PodsNotReady``, and what ``LocalNode`` raises.
    """
    settings = NodeSettings(probe_period_limit=PROBE_PERIOD_SECONDS, host_paths=deployment.host_paths)
    async with LocalNode(deployment.manifests, deployment.images, state_dir=state_dir, settings=settings) as node:
        for notice in deployment.notices:
            console.print(f"Note: {notice}.", highlight=False, markup=False, style="bold")
        left_out = "; ".join(node.notices)
        console.print(f"Not as in a cluster: {left_out}.", highlight=False, markup=False, style="dim")
        try:
            async with screen.shown(node, console):
                await node.ready(timeout_seconds=READY_SECONDS[deployment.engine])
        except* PodsNotReady as group:
            # The logs may be gone with the state directory when the user reads this.
            raise PodsNotReady(f"{group.exceptions[0]}\n{_log_ends(node)}") from None
        yield node


def _log_ends(node: LocalNode) -> str:
    """The last lines of each log of a pod that is not ready."""
    parts = []
    for pod in node.pods():
        for container in pod.containers if not pod.ready else ():
            if container.log.exists():
                lines = container.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                parts.append("\n".join([f"--- end of the log of {pod.name}, {container.name}", *lines]))
    return "\n".join(parts)


def router_address(node: LocalNode) -> tuple[str, int] | None:
    """Where a ready router of the node serves its API; None while there is none."""
    for pod in node.pods():
        if pod.ready and pod.labels.get(names.LABEL_ROLE) == names.ROUTER:
            return pod.address, pod.ports.get("http", names.ROUTER_PORT)
    return None
