"""A turn's requests to engines: the tokenizer's, the prefill leg's and the decode leg's bodies. Pure.

Every body is built anew from the client's; ``kv_transfer_params`` hold what an engine returned or nothing of anyone's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvloop_connector.handle import COLD_PREFILL_PARAMS, KVHandle
from kvloop_connector.verdict import REUSE_FIELD, Outcome
from kvloop_router.request import Api, Request, prompts
from kvloop_router.token_ids import in_json
from kvloop_router.truth import TOP_TOKENS

PARAMS = "kv_transfer_params"
_PROMPT_IDS = "prompt_token_ids"

# An answer of one token cannot have these, or pays for them on prefill (vllm: min_tokens above max_tokens and
# stream_options without a stream are refused; max_completion_tokens goes before max_tokens).
_NOT_ON_PREFILL = (
    "max_completion_tokens",
    "min_tokens",
    "stream_options",
    "stream_interval",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "best_of",
    "return_token_ids",
    "return_prompt_text",
)

# Answers without reasoning have no log-probabilities (vllm: chat_completion/serving.py, suppress_metadata).
_NOT_WITH_LOGPROBS = ("include_reasoning",)

# What a chat template may depend on beside the messages, as the tokenizer's endpoint takes it.
_TEMPLATE_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "mm_processor_kwargs",
)
_SHAPE_FIELDS = (
    "tools",
    "documents",
    "reasoning_effort",
    "chat_template",
    "continue_final_message",
    "add_special_tokens",
)


def tokenize(request: Request) -> dict[str, Any] | None:
    """The body for ``/tokenize`` that gives the prompt's token ids; None where the client sent ids."""
    body = request.body
    if request.api is Api.COMPLETIONS:
        (prompt,) = prompts(body["prompt"])
        if not isinstance(prompt, str):
            return None
        return {"model": request.model, "prompt": prompt, "add_special_tokens": body.get("add_special_tokens", True)}
    wanted = {name: body[name] for name in _TEMPLATE_FIELDS if body.get(name) is not None}
    arguments = _template_arguments(body)
    if arguments:
        wanted["chat_template_kwargs"] = arguments
    return {"model": request.model, **wanted}


def shape(request: Request) -> tuple[str, ...]:
    """What of a request, beside the messages, could make an engine render it otherwise than its ``/tokenize`` does."""
    if request.api is Api.COMPLETIONS:
        return (request.api,)
    body = request.body
    traits = [name for name in _SHAPE_FIELDS if body.get(name)]
    traits += [f"chat_template_kwargs.{name}" for name in sorted(body.get("chat_template_kwargs") or ())]
    choice = body.get("tool_choice")
    if body.get("tools") and choice not in (None, "auto"):
        traits.append(f"tool_choice.{choice if isinstance(choice, str) else 'named'}")
    kind = body.get("response_format")
    if isinstance(kind, Mapping):
        traits.append(f"response_format.{kind.get('type')}")
    return (request.api, request.model, *traits)


def prefill(
    request: Request,
    *,
    handle: KVHandle | None,
    token_ids: Sequence[int] | None,
    salt: str | None,
    ask_token_ids: bool = False,
    ask_logprobs: bool = False,
) -> dict[str, Any]:
    """The body of a prefill leg. ``handle``: what to pull or to release; None: neither.

    token_ids: the prompt that both legs use; None: the engine renders it.
    ask_token_ids: have the engine say which ids it rendered.
    ask_logprobs: have it say how likely the likeliest first tokens are.
    """
    body = _of_one_token(request, salt)
    if ask_logprobs:
        _ask_logprobs(request, body)
    if ask_token_ids:
        body["return_token_ids"] = True
    body[PARAMS] = dict(handle.params if handle is not None else COLD_PREFILL_PARAMS)
    _set_prompt(request, body, token_ids)
    return body


def anew(request: Request, *, token_ids: Sequence[int] | None, salt: str) -> dict[str, Any]:
    """The body of a request that computes the prompt with nothing reused, retains nothing, and says how likely the
    likeliest first tokens are. ``salt``: one that nobody else has. token_ids: as for ``prefill``.
    """
    body = _of_one_token(request, salt)
    _ask_logprobs(request, body)
    if token_ids is not None and request.api is Api.CHAT:
        # The engine takes the ids out and is left with no parameters (vllm: renderers/online_renderer.py:122).
        body[PARAMS] = {}
    _set_prompt(request, body, token_ids)
    return body


def decode(
    request: Request,
    *,
    params: Mapping[str, Any] | None,
    token_ids: Sequence[int] | None,
    salt: str | None,
    ask_token_ids: bool = True,
) -> dict[str, Any]:
    """The body of a decode leg. ``params``: what the prefill leg returned, sent on as it came; None: plain.

    ask_token_ids: have the engine say of which tokens it retains the KV.
    """
    body = _common(request, salt)
    if params is not None:
        body[PARAMS] = dict(params)
        if ask_token_ids:
            body["return_token_ids"] = True
        _set_prompt(request, body, token_ids)
    return body


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a prefill engine with KvloopConnector said of the handle that it was given.

    tokens: how many leading tokens of the prompt it proved to be retained.
    """

    outcome: Outcome
    tokens: int


def verdict(params: Mapping[str, Any] | None) -> Verdict | None:
    """The verdict in what a prefill leg returned; None where it holds none that this version knows."""
    said = (params or {}).get(REUSE_FIELD)
    if isinstance(said, Mapping) and type(said.get("tokens")) is int:
        with suppress(ValueError):
            return Verdict(Outcome(str(said.get("outcome"))), said["tokens"])
    return None


def filler(model: str, handle: KVHandle) -> dict[str, Any]:
    """The body of a prefill leg of one token whose only purpose is to release ``handle``."""
    return {"model": model, "prompt": ".", "max_tokens": 1, "stream": False, PARAMS: dict(handle.released().params)}


def _common(request: Request, salt: str | None) -> dict[str, Any]:
    body = dict(request.body)
    if salt is not None:
        body["cache_salt"] = salt
    return body


def _of_one_token(request: Request, salt: str | None) -> dict[str, Any]:
    body = _common(request, salt)
    for name in _NOT_ON_PREFILL:
        body.pop(name, None)
    body.update(stream=False, max_tokens=1, n=1)
    return body


def _ask_logprobs(request: Request, body: dict[str, Any]) -> None:
    for name in _NOT_WITH_LOGPROBS:
        body.pop(name, None)
    if request.api is Api.CHAT:
        body.update(logprobs=True, top_logprobs=TOP_TOKENS)
    else:
        body["logprobs"] = TOP_TOKENS
    # Texts of different tokens can be equal.
    body["return_tokens_as_token_ids"] = True


def _set_prompt(request: Request, body: dict[str, Any], token_ids: Sequence[int] | None) -> None:
    if token_ids is None:
        return
    if request.api is Api.COMPLETIONS:
        body["prompt"] = in_json(token_ids)
    else:
        body[PARAMS][_PROMPT_IDS] = in_json(token_ids)


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """As vLLM's chat API builds them (``entrypoints/openai/chat_completion/protocol.py``, build_chat_params, 0.32)."""
    arguments = dict(body.get("chat_template_kwargs") or {})
    if body.get("documents") is not None:
        arguments["documents"] = body["documents"]
    effort = body.get("reasoning_effort")
    if effort is not None:
        if "enable_thinking" not in arguments:
            arguments["enable_thinking"] = effort != "none"
        arguments["reasoning_effort"] = effort
    return arguments
