"""The tiny model's chat templates, rendered with the engine's Jinja."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvloop.tiny_model import write_model
from tests.harness.engines import engine_environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

QUESTION: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What now?"}]
FOLLOW_UP = {"role": "user", "content": "And then?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
# Jinja as transformers sets it up, without the half minute that importing transformers can take.
RENDER = """
import json, pathlib, sys
from jinja2.sandbox import ImmutableSandboxedEnvironment
settings = json.loads(pathlib.Path(sys.argv[1], "tokenizer_config.json").read_text())
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
environment.filters["tojson"] = json.dumps
template = environment.from_string(settings["chat_template"])
cases = json.loads(sys.argv[2])
print(json.dumps([template.render(**{"tools": None, "add_generation_prompt": True, **case}) for case in cases]))
"""


def rendered(directory: Path, template: str, *cases: dict[str, Any]) -> list[str]:
    write_model(directory, template=template)
    python = str(engine_environment() / "bin" / "python")
    command = [python, "-c", RENDER, str(directory), json.dumps(cases)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(json.loads(answer.stdout))


def test_append_only_template_begins_the_next_turn_with_all_of_this_one(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "look"}}]}
    said = {"role": "assistant", "content": "<think>I wonder.</think> Now this."}

    prompt, following, with_tools = rendered(
        tmp_path,
        "append-only",
        {"messages": QUESTION},
        {"messages": [*QUESTION, said, FOLLOW_UP]},
        {"messages": [*QUESTION, call], "tools": [TOOL]},
    )

    assert prompt.endswith("<|assistant|>")
    assert following.startswith(prompt + said["content"] + "<|end|>")
    assert with_tools.startswith("<|tools|>")
    assert '"name": "look"' in with_tools.rpartition("<|assistant|>")[0].rpartition("<|assistant|>")[2]


def test_template_that_strips_reasoning_renders_another_history_than_was_generated(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "I wonder.</think> Now this."}

    prompt, following = rendered(
        tmp_path, "strips-reasoning", {"messages": QUESTION}, {"messages": [*QUESTION, said, FOLLOW_UP]}
    )

    assert prompt.endswith("<|assistant|><think>")
    assert not following.startswith(prompt)
    assert "wonder" not in following
    assert "<|assistant|> Now this.<|end|>" in following
