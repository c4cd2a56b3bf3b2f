"""How many tokens a prompt has, for the engines' load, where no engine has counted them yet. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloop_router.request import Api, Request, prompts

_CHARACTERS = 4
"""Of a token of English text."""


def prompt_tokens(request: Request, counted: int | None) -> int:
    """The prompt's tokens: as counted, or else about as many as its text takes."""
    if counted is not None:
        return counted
    if request.api is Api.COMPLETIONS:
        return sum(_tokens(prompt) for prompt in prompts(request.body.get("prompt")))
    return sum(_tokens(message.get("content")) for message in request.body["messages"])


def _tokens(content: Any) -> int:
    if isinstance(content, str):
        return 1 + len(content) // _CHARACTERS
    if not isinstance(content, Sequence):
        return 1
    if content and isinstance(content[0], int):
        return len(content)
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return 1 + sum(len(text) // _CHARACTERS for text in texts if isinstance(text, str))
