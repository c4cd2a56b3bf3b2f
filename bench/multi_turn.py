"""Runs vLLM's own multi-turn benchmark, unchanged, against the router before simulated engines.

The script is ``benchmarks/multi_turn/benchmark_serving_multi_turn.py`` of vLLM's source distribution, and needs an
interpreter with vLLM, transformers, pandas and numpy. What it measures here are simulated engines that take no time: it
shows that its requests are served, and how many of its turns are warm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvloop.tiny_model import write_model
from kvloop_connector.settings import Role
from tests.harness.engines import SERVED_MODEL, Kind, start
from tests.integration.router_process import routing
from tests.integration.simulated import spec

_DOCS: Final = Path(__file__).parents[1] / "docs"
_TOLD: Final = ("kvloop_router_turns_total", "kvloop_router_requests_total", "kvloop_router_reused_tokens_total")
_ROOM: Final = {"max_model_len": 16384, "kv_blocks": 8192}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives the script's own exit status."""
    parser = argparse.ArgumentParser(prog="bench.multi_turn", description=__doc__)
    parser.add_argument("--script", type=Path, required=True, help="benchmark_serving_multi_turn.py")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has what the script needs")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("rest", nargs="*", help="further arguments of the script's own, after --")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_run(Path(directory), given))


async def _run(directory: Path, given: argparse.Namespace) -> int:
    model, asked = directory / "model", directory / "conversations.json"
    write_model(model)
    asked.write_text(json.dumps(_conversations(directory, given.conversations)))
    specs = [spec(role, **_ROOM) for role in Role]
    with start(Kind.SIM, directory, specs) as engines:
        async with routing(directory, engines.as_discovery_file(), kvTransfer={"kvRecomputeThreshold": 64}) as router:
            script = await asyncio.create_subprocess_exec(
                *(given.python, given.script.name, "--model", str(model), "--served-model-name", SERVED_MODEL),
                *("--url", router.url, "--input-file", str(asked), *given.rest),
                cwd=given.script.resolve().parent,
            )
            status = await script.wait()
            exposed = (await router.get("/metrics")).text
    for line in exposed.splitlines():
        if line.startswith(_TOLD):
            print(line)
    return status


def _conversations(directory: Path, count: int) -> dict[str, Any]:
    """Synthetic ones, of this repository's own words."""
    text = directory / "text.txt"
    text.write_text(3 * " ".join(page.read_text(encoding="utf-8") for page in sorted(_DOCS.glob("*.md"))))
    return {
        "filetype": "generate_conversations",
        "num_conversations": count,
        "text_files": [str(text)],
        "print_stats": False,
        "prompt_input": {
            "num_turns": {"distribution": "uniform", "min": 6, "max": 10},
            "common_prefix_num_tokens": {"distribution": "constant", "value": 200},
            "prefix_num_tokens": {"distribution": "lognormal", "average": 300, "max": 800},
            "num_tokens": {"distribution": "uniform", "min": 60, "max": 90},
        },
        "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 40, "max": 60}},
    }


if __name__ == "__main__":
    sys.exit(main())
