"""What the clients of the explored router do: the truth test's turns, and twists that only a simulator can judge. Pure.

A history is kept as text. Markers within it stand for what is not: ``[image 3]`` in a question is a media part,
``[call 2]`` in an answer a call of a tool and its result, ``[adapter 1]`` in the system prompt another model name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any, Final

from kvloop_sim.template import TemplateOptions, render
from tests.truth.turns import Ask, Kind

KINDS: Final = (
    *(6 * (Kind.GROW,)),
    *(2 * (Kind.REGENERATE,)),
    Kind.START,
    Kind.EDIT,
    Kind.TRUNCATE_HEAD,
    Kind.TRUNCATE_TAIL,
    Kind.COMPACT,
    Kind.STRIP_REASONING,
    Kind.FORK,
    Kind.FOREIGN_ID,
    Kind.SWAP_TENANT,
    Kind.RACE,
    Kind.SYSTEM,
    Kind.TOOLS,
    Kind.TEMPLATE,
)
"""As often as they are named."""


class Twist(StrEnum):
    """What else is unusual about a request."""

    NONE = "none"
    LEAVES = "leaves"
    """The client goes away before the answer has ended."""
    SEVERAL = "several"
    """It asks for two answers."""
    STOP = "stop"
    """With a stop string, so that the engine's request is aborted."""
    ONE = "one"
    """An answer of one token."""
    LONG = "long"
    IDS = "ids"
    """The client wants token ids itself."""
    COMPLETION = "completion"
    """By the completions API, as text."""
    IMAGE = "image"
    """There is an image in the question."""
    CALL = "call"
    """The last answer was the call of a tool."""
    ADAPTER = "adapter"
    """Another adapter from here on, or none."""


TWISTS: Final = (*(10 * (Twist.NONE,)), *(twist for twist in Twist if twist is not Twist.NONE))

_IMAGE: Final = re.compile(r"\[image (\d+)\]")
_CALL: Final = re.compile(r" \[call (\d+)\]")
_ADAPTER: Final = re.compile(r" \[adapter (\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An ask as it is sent. leaves: seconds after which the client goes; None: it stays."""

    ask: Ask
    path: str
    body: Mapping[str, Any]
    leaves: float | None

    @property
    def chat(self) -> bool:
        return "messages" in self.body

    @property
    def media(self) -> bool:
        return any(isinstance(message["content"], list) for message in self.body.get("messages", ()))

    @property
    def several(self) -> bool:
        return bool(self.body.get("n", 1) > 1)


def twisted(ask: Ask, twist: Twist, chance: Random) -> Ask:
    """The ask with what a twist changes of its history, for good."""
    messages = list(ask.talk.messages)
    match twist:
        case Twist.IMAGE if messages[-1]["role"] == "user":
            messages[-1] = _marked(messages[-1], f" [image {chance.randrange(3)}]")
        case Twist.CALL if len(messages) > 2 and messages[-2]["role"] == "assistant":
            messages[-2] = _marked(messages[-2], f" [call {chance.randrange(3)}]")
        case Twist.ADAPTER if messages[0]["role"] == "system":
            found = _ADAPTER.search(messages[0]["content"])
            bare = {**messages[0], "content": _ADAPTER.sub("", messages[0]["content"])}
            messages[0] = _marked(bare, f" [adapter {chance.randrange(1, 3)}]") if found is None else bare
    return replace(ask, talk=replace(ask.talk, messages=tuple(messages)))


def request(ask: Ask, twist: Twist, chance: Random, *, model: str) -> Request:
    """How an ask is sent, its history twisted already."""
    body = {**ask.body(), "model": model, "stream": ask.stream, "max_tokens": chance.randint(3, 8)}
    adapter = _ADAPTER.search(ask.talk.messages[0]["content"])
    if adapter is not None:
        body["model"] = f"{model}-{adapter[1]}"
    body["messages"] = list(_expanded(ask.talk.messages))
    path, leaves = "/v1/chat/completions", None
    match twist:
        case Twist.LEAVES:
            leaves = chance.choice([0.0, 0.0001, chance.uniform(0, 0.3), chance.uniform(0, 0.1)])
        case Twist.SEVERAL:
            body |= {"n": 2, "temperature": 1.0}
        case Twist.STOP:
            body |= {"stop": [chance.choice("aeiou")]}
        case Twist.ONE:
            body |= {"max_tokens": 1}
        case Twist.LONG:
            body |= {"max_tokens": 40}
        case Twist.IDS:
            body |= {"return_token_ids": True}
        case Twist.COMPLETION if not _IMAGE.search(str(ask.talk.messages)):
            text = render(body.pop("messages"), body.pop("tools", None), TemplateOptions())
            body.pop("tool_choice", None)
            body.pop("chat_template_kwargs", None)
            body["prompt"] = text
            path = "/v1/completions"
    if ask.told:
        body["conversation_id"] = ask.conversation
    return Request(ask=ask, path=path, body=body, leaves=leaves)


def _marked(message: Mapping[str, str], marker: str) -> Mapping[str, str]:
    return {**message, "content": message["content"] + marker}


def _expanded(messages: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, Any]]:
    expanded: list[Mapping[str, Any]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "system":
            expanded.append({**message, "content": _ADAPTER.sub("", text)})
        elif role == "assistant" and (call := _CALL.search(text)):
            function = {"name": "search", "arguments": f'{{"about": "{call[1]}"}}'}
            called = [{"id": f"call-{call[1]}", "type": "function", "function": function}]
            expanded.append({**message, "content": _CALL.sub("", text), "tool_calls": called})
            expanded.append({"role": "tool", "tool_call_id": f"call-{call[1]}", "content": f"found {call[1]}"})
        elif role == "user" and _IMAGE.search(text):
            expanded.append({**message, "content": [*_parts(text)]})
        else:
            expanded.append(message)
    return expanded


def _parts(text: str) -> Sequence[Mapping[str, Any]]:
    images = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{number}"}}
        for number in _IMAGE.findall(text)
    ]
    return [{"type": "text", "text": _IMAGE.sub("", text)}, *images]
