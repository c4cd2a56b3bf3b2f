"""Whether a chat template is append-only: whether a turn's prompt is the beginning of the next turn's. Pure.

Only then can all be reused that a turn left. Many templates are not: they drop reasoning from earlier answers, or end
a prompt with something that they leave out once the answer is there. A synthetic chat, rendered turn by turn, shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

_QUESTION: dict[str, Any] = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
_ANSWER = {"role": "assistant", "content": "The capital of France is Paris."}
_SECOND = {"role": "user", "content": "And how far is it from Rome?"}
_SECOND_ANSWER = {"role": "assistant", "content": "About eleven hundred kilometres."}
_THIRD = {"role": "user", "content": "Thank you. What is the weather there?"}
_THOUGHT = "The user asks for a capital. France has had Paris as its capital for centuries."
# Both names that engines of the last years use for it.
_REASONING = {"reasoning": _THOUGHT, "reasoning_content": _THOUGHT}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "I will look it up.",
    # Nine letters and digits: some templates take no other.
    "tool_calls": [
        {"id": "kvloop001", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Paris"}'}}
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "kvloop001", "content": '{"country": "France"}'}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks up facts about a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


class Case(StrEnum):
    """What is tried."""

    ANSWER = "answer"
    """A question, its answer, another question, and so on."""
    REASONING = "reasoning"
    """The first answer has reasoning, and the client sends it back."""
    TOOL_CALL = "tool_call"
    """The answer is a tool call; its result follows."""
    AFTER_TOOL_CALL = "after_tool_call"
    """A tool call with reasoning, its result, the answer, and another question."""


class Verdict(StrEnum):
    """What came of it."""

    APPEND_ONLY = "append_only"
    CHANGED = "changed"
    """The next prompt does not begin with the one before."""
    DROPPED = "dropped"
    """The template renders reasoning of the last answer, and drops it once another question follows."""
    NO_REASONING = "no_reasoning"
    """The template never renders reasoning that is sent back."""
    REFUSED = "refused"
    """The engine would not render it, such as a template without tools."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one case. equal, of: how many tokens of a turn's prompt the next one begins with, where that is
    least; 0 where nothing was rendered."""

    case: Case
    verdict: Verdict
    equal: int = 0
    of: int = 0


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What is known of a model's template. findings: empty where the engine has no ``/tokenize``."""

    model: str
    engine: str
    kv_revision: str
    findings: tuple[Finding, ...]

    @property
    def append_only(self) -> bool | None:
        """Whether it is, in all that it renders; None: not known."""
        judged = [finding.verdict for finding in self.findings if finding.verdict in _JUDGED]
        return all(verdict is Verdict.APPEND_ONLY for verdict in judged) if judged else None

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": self.model,
            "engine": self.engine,
            "kvRevision": self.kv_revision,
            "appendOnly": self.append_only,
            "cases": [
                {
                    "case": finding.case.value,
                    "verdict": finding.verdict.value,
                    "equalTokens": finding.equal,
                    "ofTokens": finding.of,
                }
                for finding in self.findings
            ],
        }

    def by_case(self) -> list[tuple[str, bool]]:
        """Each case that says something, and whether the template is append-only there."""
        return [
            (finding.case.value, finding.verdict is Verdict.APPEND_ONLY)
            for finding in self.findings
            if finding.verdict in _JUDGED
        ]


_JUDGED = frozenset({Verdict.APPEND_ONLY, Verdict.CHANGED, Verdict.DROPPED})

Body = Mapping[str, Any]
Rendered = Sequence[Sequence[int]]


def bodies(case: Case, model: str) -> list[Body]:
    """The requests to ``/tokenize`` whose answers ``judge`` takes, in their order: each turn's prompt, and for
    REASONING first the same history without reasoning, then both with the answer at the end."""
    match case:
        case Case.ANSWER:
            chat = [_QUESTION, _ANSWER, _SECOND, _SECOND_ANSWER, _THIRD]
            return [_body(model, chat[:length]) for length in (1, 3, 5)]
        case Case.REASONING:
            thought = {**_ANSWER, **_REASONING}
            return [
                _body(model, [_QUESTION, _ANSWER], ends=True),
                _body(model, [_QUESTION, thought], ends=True),
                _body(model, [_QUESTION, _ANSWER, _SECOND]),
                _body(model, [_QUESTION]),
                _body(model, [_QUESTION, thought, _SECOND]),
            ]
        case Case.TOOL_CALL:
            chat = [_QUESTION, _CALL, _RESULT]
            return [_body(model, chat[:length], _TOOLS) for length in (1, 3)]
        case Case.AFTER_TOOL_CALL:
            chat = [_QUESTION, {**_CALL, **_REASONING}, _RESULT, _ANSWER, _SECOND]
            return [_body(model, chat[:length], _TOOLS) for length in (3, 5)]


def judge(case: Case, rendered: Rendered) -> Finding:
    """What the answers to ``bodies`` mean."""
    prompts = list(rendered)
    dropped = False
    if case is Case.REASONING:
        plain_end, end, plain_next, *prompts = rendered
        if list(plain_end) == list(end):
            return Finding(case, Verdict.NO_REASONING)
        dropped = list(plain_next) == list(prompts[-1])
    shares = [(_common(first, then), len(first)) for first, then in pairwise(prompts)]
    equal, of = min(shares, key=lambda share: share[0] - share[1])
    if equal < of:
        return Finding(case, Verdict.CHANGED, equal, of)
    return Finding(case, Verdict.DROPPED if dropped else Verdict.APPEND_ONLY, equal, of)


def _body(model: str, messages: Sequence[Body], tools: Sequence[Body] = (), *, ends: bool = False) -> Body:
    body: dict[str, Any] = {"model": model, "messages": list(messages), "add_generation_prompt": not ends}
    return {**body, "tools": list(tools)} if tools else body


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
