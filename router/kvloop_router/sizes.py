"""How many tokens a turn has, as far as that is known before any engine has seen it. Pure.

With vLLM's own connector the router has the token ids, and a proof of how many of them decode holds. With
KvloopConnector it has neither: then characters tell, at a rate that is learned from what prefill engines counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kvloop_router.cost_model import Work
from kvloop_router.history import Trail
from kvloop_router.path_choice import Sizes
from kvloop_router.request import Api, Request, prompts

TOKENS_PER_CHARACTER = 0.25
"""Of English text; until an engine has counted."""
_TOKENS_PER_MESSAGE = 5
"""What templates put around each."""
_ANSWER_TOKENS = 300
"""Of an answer, where the client does not want a shorter one."""


def characters(request: Request) -> int:
    """Of the prompt; token ids count as what they are."""
    if request.api is Api.COMPLETIONS:
        (prompt, *_) = prompts(request.body.get("prompt")) or ("",)
        return len(prompt or "")
    return sum(map(_length, request.body["messages"]))


def estimated(request: Request, token_ids: Sequence[int] | None, rate: float) -> int:
    """Tokens of the prompt; ``rate``: tokens a character."""
    if token_ids is not None:
        return len(token_ids)
    size = characters(request)
    return size if _of_ids(request) else max(1, round(size * rate))


def prefill_work(request: Request, token_ids: Sequence[int] | None, held: int, rate: float) -> Work:
    """What a prefill leg is thought to do that is to read ``held`` tokens."""
    prompt = estimated(request, token_ids, rate)
    return Work(max(1, prompt - held), context=held, pulled=held)


def sizes(
    request: Request,
    token_ids: Sequence[int] | None,
    *,
    held: int,
    recorded: Trail,
    trail: Trail,
    rate: float,
) -> Sizes | None:
    """The turn's sizes, where decode holds ``held`` tokens of a turn with the history ``recorded``.

    trail: the new turn's. None where the two histories differ, so that without token ids nobody knows how much of it
    is of use.
    """
    answer = min(request.max_tokens or _ANSWER_TOKENS, _ANSWER_TOKENS)
    if token_ids is not None:
        return Sizes(len(token_ids), min(held, len(token_ids)), answer)
    if not len(recorded) or trail.prefix(len(recorded)) != recorded.whole:
        return None
    if request.api is Api.COMPLETIONS:
        return Sizes(max(held + 1, estimated(request, None, rate)), held, answer)
    following = request.body["messages"][len(recorded) :]
    if following and following[0]["role"] == "assistant":
        # The answer of that turn, which decode holds as well.
        following = following[1:]
    rest = sum(map(_length, following)) * rate + _TOKENS_PER_MESSAGE * len(following)
    return Sizes(held + max(1, round(rest)), held, answer)


def _of_ids(request: Request) -> bool:
    if request.api is not Api.COMPLETIONS:
        return False
    (prompt, *_) = prompts(request.body.get("prompt")) or ("",)
    return isinstance(prompt, list)


def _length(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    if isinstance(content, str) and "tool_calls" not in message:
        return len(content)
    return len(orjson.dumps(message))
