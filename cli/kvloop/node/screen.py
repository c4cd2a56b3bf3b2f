"""What ``kvloop up`` and ``kvloop demo`` show of a local node's pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvloop.node.node import LocalNode
from kvloop.node.pod import PodStatus

_STYLES = {"Running": "yellow", "Ready": "green"}
_REFRESHES_PER_SECOND = 4


def pods_table(pods: tuple[PodStatus, ...]) -> Table:
    """One line a pod."""
    table = Table(box=None, pad_edge=False)
    for column in ("POD", "STATE", "RESTARTS", "ADDRESS", "MESSAGE"):
        table.add_column(column)
    for pod in pods:
        word = state_word(pod)
        state = f"[{_STYLES.get(word, 'red')}]{word}[/]"
        table.add_row(pod.name, state, str(pod.restarts), pod.address, pod.message)
    return table


def state_word(pod: PodStatus) -> str:
    """The pod's state, with Ready told apart from Running."""
    return "Ready" if pod.ready else pod.state


@asynccontextmanager
async def shown(node: LocalNode, console: Console) -> AsyncIterator[None]:
    """Show pods while they change: a table that is drawn anew on a terminal, one line a change elsewhere."""
    if console.is_terminal:
        live = Live(
            console=console, refresh_per_second=_REFRESHES_PER_SECOND, get_renderable=lambda: pods_table(node.pods())
        )
        with live:
            yield
        return
    async with asyncio.TaskGroup() as group:
        printer = group.create_task(_print_changes(node, console))
        try:
            yield
        finally:
            printer.cancel()


async def _print_changes(node: LocalNode, console: Console) -> None:
    seen: dict[str, tuple[str, int]] = {}

    def is_new() -> bool:
        return _states(node) != seen

    while True:
        await node.wait_for(is_new)
        states = _states(node)
        for name, (word, restarts) in states.items():
            if seen.get(name) != (word, restarts):
                console.print(f"{name}: {word}" + (f" ({restarts} restarts)" if restarts else ""), highlight=False)
        seen = states


def _states(node: LocalNode) -> dict[str, tuple[str, int]]:
    return {pod.name: (state_word(pod), pod.restarts) for pod in node.pods()}
