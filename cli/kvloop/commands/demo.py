"""``kvloop demo``: a conversation with reuse off and on, on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvloop.commands.up import add_engine_arguments, cancel_on_sigterm
from kvloop.demo import report
from kvloop.demo.arms import Arm, router_workload, with_both_arms
from kvloop.demo.play import Player, TurnFailed, characters_per_token
from kvloop.demo.result import Played, faults, rows
from kvloop.demo.script import Script, sample, sizes, write_script
from kvloop.node.errors import NodeError
from kvloop.node.node import LocalNode
from kvloop.node.pod import PodStatus
from kvloop.node.resource import LocalDeployment, prepare
from kvloop.node.session import running, state_directory
from kvloop.node.stand_in import EngineKind
from kvloop_operator import names

EXAMPLE = Path(__file__).parents[3] / "examples" / "demo.yaml"

_CONTEXT_LIMITS = {EngineKind.SIM: 32768, EngineKind.VLLM: 4096}
"""How many tokens a conversation comes to at most; a CPU takes seconds for a thousand."""

_DEFAULT_REPETITIONS = {EngineKind.SIM: 3, EngineKind.VLLM: 1}
_WARM_UP_TURNS = 2
_CANARY_SECONDS = 120
_POLL_SECONDS = 0.2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="play a conversation with reuse off and on",
        description="Run a resource on this machine and play a growing agent conversation through two routers before "
        "the same engines, one of which releases every KV handle unused. Exit status 1 where a turn after the first "
        "did not reuse what the turn before left.",
    )
    parser.add_argument("-f", "--file", type=Path, default=EXAMPLE, help="file with one DisaggregatedInference")
    add_engine_arguments(parser)
    parser.add_argument("--turns", type=_at_least_two, default=8, help="turns of the conversation (default 8)")
    parser.add_argument("--repeat", type=_positive, help="repetitions; times are medians (default 3, with vllm 1)")
    parser.add_argument("--answer-tokens", type=_positive, default=32, help="length of each answer (default 32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw what was measured")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    try:
        with state_directory(arguments.state_dir) as state_dir:
            # With its own prefix cache, prefill would find most of the history itself and hide what reuse is worth.
            settings = {"prefill": {"prefixCaching": False}}
            deployment = with_both_arms(
                prepare(
                    arguments.file,
                    engine=arguments.engine,
                    state_dir=state_dir,
                    time_scale=arguments.time_scale,
                    settings=settings,
                )
            )
            repetitions = asyncio.run(_play(deployment, state_dir, arguments, console))
    except NodeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped")
        return 130
    return _tell(repetitions, deployment, arguments, console)


async def _play(
    deployment: LocalDeployment, state_dir: Path, arguments: argparse.Namespace, console: Console
) -> list[Played]:
    cancel_on_sigterm()
    async with running(deployment, state_dir, console) as node, aiohttp.ClientSession() as session:
        await _verified(node, deployment, session, console)
        for name, value in _settings(deployment, arguments).items():
            console.print(f"{name}: {value}", highlight=False, markup=False)
        player = Player(
            session=session,
            urls={arm: _router_url(node, deployment, arm) for arm in Arm},
            model=deployment.served_name,
            answer_tokens=arguments.answer_tokens,
        )
        script = await _script(node, deployment, session, arguments)
        return await _repetitions(player, script, _repeat(arguments), console)


async def _repetitions(player: Player, script: Script, count: int, console: Console) -> list[Played]:
    warm_up = Script(system=script.system, outputs=script.outputs[:_WARM_UP_TURNS])
    turns = len(Arm) * (len(warm_up.outputs) + count * len(script.outputs))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("warm-up, not counted", total=turns)

        def advance() -> None:
            progress.advance(bar)

        await player.play(warm_up, advance=advance)
        played = []
        for repetition in range(count):
            progress.update(bar, description=f"conversation {repetition + 1} of {count}")
            played.append(await player.play(script, repetition=repetition, advance=advance))
        return played


async def _script(
    node: LocalNode, deployment: LocalDeployment, session: aiohttp.ClientSession, arguments: argparse.Namespace
) -> Script:
    """A conversation that fills most of what the engines take."""
    [engine, *_] = [pod for pod in node.pods() if pod.labels.get(names.LABEL_ROLE) == "decode"]
    url = f"http://{engine.address}:{names.ENGINE_PORT}"
    length = await characters_per_token(session, url, deployment.served_name, sample())
    limit = _CONTEXT_LIMITS[deployment.engine]
    context = min(deployment.resource.spec.engine.max_model_len or limit, limit)
    wanted = sizes(context=context, turns=arguments.turns, answer=arguments.answer_tokens)
    return write_script(wanted, turns=arguments.turns, characters_per_token=length)


async def _verified(
    node: LocalNode, deployment: LocalDeployment, session: aiohttp.ClientSession, console: Console
) -> None:
    """Wait until both routers have tried out every pair of engines, so that no canary runs into the measurement."""
    material = deployment.facts.secret_material
    if not deployment.resource.spec.router.canary.enabled or material is None:
        return
    headers = {"Authorization": f"Bearer {material.admin_token}"}
    with console.status("trying out the engines' KV transfer"):
        try:
            async with asyncio.timeout(_CANARY_SECONDS):
                reports = [report async for report in _canaries(node, deployment, session, headers)]
        except TimeoutError:
            raise TurnFailed(f"no router has tried out the engines within {_CANARY_SECONDS} s") from None
    for pair in reports:
        if pair["verdict"] != "verified":
            raise TurnFailed(f"no KV moves between {pair['prefill']} and {pair['decode']}: {pair['detail']}")
        console.print(
            f"KV moves both ways between {pair['prefill']} and {pair['decode']}, by their own counters: "
            f"{pair['toDecodeBytes']} and {pair['toPrefillBytes']} bytes",
            highlight=False,
        )


async def _canaries(
    node: LocalNode, deployment: LocalDeployment, session: aiohttp.ClientSession, headers: Mapping[str, str]
) -> AsyncIterator[dict[str, Any]]:
    """What the router with reuse found out about each pair, once both routers are through with theirs."""
    pairs: list[dict[str, Any]] = []
    for arm in Arm:
        url = f"http://{_router(node, deployment, arm).address}:{names.ADMIN_PORT}/admin/v1/pairs"
        while True:
            async with session.get(url, headers=headers) as response:
                pairs = (await response.json())["pairs"]
            if pairs and all(pair["verdict"] != "unknown" for pair in pairs):
                break
            await asyncio.sleep(_POLL_SECONDS)
    for pair in pairs:
        yield pair


def _router(node: LocalNode, deployment: LocalDeployment, arm: Arm) -> PodStatus:
    [router, *_] = [pod for pod in node.pods() if pod.workload == router_workload(deployment, arm)]
    return router


def _router_url(node: LocalNode, deployment: LocalDeployment, arm: Arm) -> str:
    return f"http://{_router(node, deployment, arm).address}:{names.ROUTER_PORT}"


def _repeat(arguments: argparse.Namespace) -> int:
    return int(arguments.repeat or _DEFAULT_REPETITIONS[arguments.engine])


def _settings(deployment: LocalDeployment, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the times depend on; equal in both arms."""
    spec = deployment.resource.spec
    settings: dict[str, Any] = {
        "engines": "SIMULATED" if deployment.engine is EngineKind.SIM else "vLLM on the CPU",
        "engine version": deployment.engine_version,
        "engine pods": f"{spec.prefill.replicas} prefill, {spec.decode.replicas} decode",
        "prefill prefix caching, both arms": "on" if spec.prefill.prefix_caching else "off",
        "decode prefix caching, both arms": "on" if spec.decode.prefix_caching else "off",
        "recompute threshold": spec.kv_transfer.kv_recompute_threshold,
        "answer tokens": arguments.answer_tokens,
        "repetitions": _repeat(arguments),
        "arms": "two routers before the same engines, turn by turn, first one, then the other",
    }
    if deployment.engine is EngineKind.SIM:
        settings["time scale"] = arguments.time_scale
    return settings


def _tell(
    repetitions: list[Played], deployment: LocalDeployment, arguments: argparse.Namespace, console: Console
) -> int:
    measured, settings = rows(repetitions), _settings(deployment, arguments)
    heading = report.title(deployment.engine, deployment.engine_version)
    console.print(report.table(measured, heading))
    if arguments.json is not None:
        document = report.document(measured, deployment.engine, settings)
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    if arguments.png is not None:
        report.picture(measured, heading, settings, arguments.png)
    lines = faults(repetitions)
    for line in lines:
        sys.stderr.write(f"{line}\n")
    return 1 if lines else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _at_least_two(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("reuse begins with the second turn: at least 2 are needed")
    return value
