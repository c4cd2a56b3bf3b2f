"""The chat template of the simulated model, in the style of ChatML.

Append-only: the prompt of a turn, followed by the answer, is a prefix of the prompt of the next turn. With
``strip_reasoning`` it is not: like the templates of reasoning models, it drops ``<think>…</think>`` from answers
before the last question, so that a history differs from what the decode engine retained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvloop_sim.tokenizer import END_OF_TEXT, IMAGE_PAD, IMAGE_TOKENS, SPECIAL_TEXTS

_THINKING: Final = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
NO_THINKING: Final = "<think>\n\n</think>\n\n"
"""What ``enable_thinking: false`` puts in front of an answer."""


IMAGE: Final = IMAGE_TOKENS * SPECIAL_TEXTS[IMAGE_PAD - END_OF_TEXT]


class UnsupportedContent(ValueError):
    """A message that this template cannot render."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """What a request says about the rendering, beside its messages and tools. images: how many there may be."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    enable_thinking: bool = True
    strip_reasoning: bool = False
    images: int = 0


def render(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, options: TemplateOptions
) -> str:
    """The prompt text of a chat. Raises UnsupportedContent where a message is malformed or not text."""
    if len(images(messages)) > max(1, options.images):
        raise UnsupportedContent(f"At most {options.images} image(s) may be provided in one prompt.")
    parts: list[str] = []
    rest = list(messages)
    if tools:
        system = _content(rest.pop(0), options) if rest and rest[0].get("role") == "system" else ""
        listing = "\n".join(json.dumps(tool, ensure_ascii=False, sort_keys=True) for tool in tools)
        parts.append(f"<|im_start|>system\n{system}\n# Tools\n{listing}<|im_end|>\n")
    last_user = max((index for index, message in enumerate(rest) if message.get("role") == "user"), default=-1)
    for index, message in enumerate(rest):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise UnsupportedContent("each message needs a role")
        body = _content(message, options)
        if role == "assistant":
            body = _assistant(message, body)
            if options.strip_reasoning and index < last_user:
                body = _THINKING.sub("", body)
        open_ended = options.continue_final_message and index == len(rest) - 1
        parts.append(f"<|im_start|>{role}\n{body}" + ("" if open_ended else "<|im_end|>\n"))
    if options.add_generation_prompt and not options.continue_final_message:
        parts.append("<|im_start|>assistant\n" + ("" if options.enable_thinking else NO_THINKING))
    return "".join(parts)


def images(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where the images of a chat come from, in their order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [str(part["image_url"]) for part in parts if isinstance(part, Mapping) and part.get("image_url")]


def _content(message: Mapping[str, Any], options: TemplateOptions) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnsupportedContent("content is neither text nor a list of parts")
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif options.images and isinstance(part, Mapping) and part.get("image_url"):
            texts.append(IMAGE)
        else:
            kind = str(part.get("type")).removesuffix("_url") if isinstance(part, Mapping) else "unknown"
            raise UnsupportedContent(f"At most 0 {kind}(s) may be provided in one prompt.")
    return "\n".join(texts)


def _assistant(message: Mapping[str, Any], body: str) -> str:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        body = f"<think>\n{reasoning}\n</think>\n\n{body}"
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        text = json.dumps({"name": function.get("name"), "arguments": function.get("arguments")}, ensure_ascii=False)
        body += f"\n<tool_call>\n{text}\n</tool_call>"
    return body
