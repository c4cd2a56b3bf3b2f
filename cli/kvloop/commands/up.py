"""``kvloop up``: a resource on this machine, with simulated or real engines."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path

from rich.console import Console

from kvloop.node.errors import NodeError
from kvloop.node.forward import forwarded
from kvloop.node.node import LocalNode
from kvloop.node.resource import LocalDeployment, prepare
from kvloop.node.screen import pods_table
from kvloop.node.session import router_address, running, state_directory
from kvloop.node.stand_in import EngineKind

DEFAULT_PORT = 8000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "up",
        help="run a resource on this machine",
        description="Run the operator's manifests for a resource as processes of this machine, with the router on a "
        "local port, until Ctrl-C.",
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="file with one DisaggregatedInference")
    add_engine_arguments(parser)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="local port of the router; 0: a free one")
    parser.set_defaults(run=run)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command takes that runs engines."""
    parser.add_argument(
        "--engine",
        type=EngineKind,
        choices=list(EngineKind),
        default=EngineKind.SIM,
        help="sim: simulated engines (default); vllm: real vLLM on the CPU with a tiny model of random weights",
    )
    parser.add_argument(
        "--state-dir", type=Path, help="where logs and pods' directories are kept; default: thrown away"
    )
    parser.add_argument(
        "--time-scale", type=_scale, default=1.0, help="factor for all durations of simulated engines (default 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    try:
        with state_directory(arguments.state_dir) as state_dir:
            deployment = prepare(
                arguments.file, engine=arguments.engine, state_dir=state_dir, time_scale=arguments.time_scale
            )
            asyncio.run(_serve(deployment, state_dir, port=arguments.port, console=console))
    except NodeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped")
    return 0


async def _serve(deployment: LocalDeployment, state_dir: Path, *, port: int, console: Console) -> None:
    """Until SIGINT or SIGTERM, which cancel it. A second SIGINT cuts the shutdown short; nothing stays even then."""
    nodes: list[LocalNode] = []

    def target() -> tuple[str, int] | None:
        return router_address(nodes[0]) if nodes else None

    cancel_on_sigterm()
    # The port comes first: that it is taken is known at once, not after the engines have loaded.
    async with forwarded(port, target) as local_port, running(deployment, state_dir, console) as node:
        nodes.append(node)
        console.print(_welcome(deployment, state_dir, local_port), highlight=False, markup=False, soft_wrap=True)
        if not console.is_terminal:
            console.print(pods_table(node.pods()))
        await asyncio.Event().wait()


def cancel_on_sigterm() -> None:
    """Let SIGTERM end the current task as ``asyncio.run`` lets SIGINT."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _welcome(deployment: LocalDeployment, state_dir: Path, port: int) -> str:
    url = f"http://127.0.0.1:{port}"
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": deployment.served_name, "messages": messages, "max_tokens": 32})
    kind = "SIMULATED engines" if deployment.engine is EngineKind.SIM else f"vLLM {_version(deployment)} on the CPU"
    return "\n".join(
        [
            "",
            f"Router: {url} ({kind})",
            f"Logs:   {state_dir / 'logs'}",
            "",
            f"curl -i {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
            "",
            "Ctrl-C stops everything.",
        ]
    )


def _version(deployment: LocalDeployment) -> str:
    return str(deployment.facts.engine.version) if deployment.facts.engine is not None else ""


def _scale(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: not a factor")
    return value
