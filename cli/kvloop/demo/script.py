"""The text of an agent's conversation: tools in the system prompt, then one tool's output a turn. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

SYSTEM_SHARE = 0.2
"""How much of the whole conversation the system prompt is."""

_TOOLS = ("read_file", "list_directory", "run_tests", "search_code", "apply_patch", "fetch_issue", "query_metrics")
_NOUNS = (
    "request",
    "router",
    "handle",
    "block",
    "engine",
    "queue",
    "prompt",
    "cache",
    "token",
    "leg",
    "turn",
    "session",
)
_VERBS = ("opened", "closed", "retried", "expired", "waited", "matched", "skipped", "failed", "returned", "released")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens. ``system`` once; ``tool_output`` and ``answer`` every turn."""

    system: int
    tool_output: int
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the user's side says: ``system`` before the first turn, ``outputs[n]`` in turn n."""

    system: str
    outputs: tuple[str, ...]

    def opening(self, name: str) -> list[Message]:
        """The messages of the first turn. ``name`` makes the conversation a new one from its first words on."""
        return [
            {"role": "system", "content": f"Conversation {name}.\n{self.system}"},
            {"role": "user", "content": f"Find out why the nightly job is slow.\n{self.outputs[0]}"},
        ]

    def next_turn(self, messages: Sequence[Message], answer: str, turn: int) -> list[Message]:
        """The messages of turn ``turn`` (from 2 on): the history, the answer to it, one more tool output."""
        said = {"role": "assistant", "content": answer}
        return [*messages, said, {"role": "user", "content": self.outputs[turn - 1]}]


def sizes(*, context: int, turns: int, answer: int) -> Sizes:
    """Sizes with which ``turns`` turns stay well inside ``context`` tokens."""
    # Templates add a few tokens a message, and text of a wanted length is only met about.
    usable = int(context * 0.85) - turns * answer
    system = int(usable * SYSTEM_SHARE)
    return Sizes(system=max(system, 64), tool_output=max((usable - system) // turns, 32), answer=answer)


def write_script(wanted: Sizes, *, turns: int, characters_per_token: float, seed: int = 0) -> Script:
    """A script whose parts have about the wanted sizes; equal arguments give equal texts."""
    chance = random.Random(seed)  # noqa: S311 - prose, not secrets
    system = _filled(_tool_description, wanted.system, characters_per_token, chance)
    outputs = tuple(
        _filled(_log_line, wanted.tool_output, characters_per_token, chance, head=f"Output of {_TOOLS[turn % 7]}:\n")
        for turn in range(turns)
    )
    return Script(system=f"You are an agent with these tools.\n{system}", outputs=outputs)


def sample(seed: int = 0) -> str:
    """A text of the kind that scripts are made of, to measure how long its tokens are."""
    chance = random.Random(seed)  # noqa: S311 - prose, not secrets
    return "\n".join(_log_line(chance, number) for number in range(40))


def _filled(line: Any, tokens: int, characters_per_token: float, chance: random.Random, *, head: str = "") -> str:
    wanted = int(tokens * characters_per_token)
    text, number = head, 0
    while len(text) < wanted:
        text += f"{line(chance, number)}\n"
        number += 1
    return text


def _tool_description(chance: random.Random, number: int) -> str:
    tool = _TOOLS[number % len(_TOOLS)]
    noun, verb, other = chance.choice(_NOUNS), chance.choice(_VERBS), chance.choice(_NOUNS)
    return f"- {tool}_{number}(path, limit): tells whether the {noun} was {verb}, and for each {other} why."


def _log_line(chance: random.Random, number: int) -> str:
    noun, verb, other = chance.choice(_NOUNS), chance.choice(_VERBS), chance.choice(_NOUNS)
    return f"{number:03d} the {noun} of the {other} {verb} after {chance.randrange(10, 999)} steps"
