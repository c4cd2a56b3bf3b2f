"""A client's request, checked and typed before anything of it reaches an engine. Pure.

Only fields that the router itself acts on are checked; the rest is the engine's to judge, and passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from kvloop_router.errors import RequestError

OWN_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""Fields with which a client could make an engine read other people's KV, or end it. Never accepted."""

CONVERSATION_FIELD = "conversation_id"
_CONVERSATION_CHARACTERS = 512
"""The longest conversation id: it is kept for as long as anything is known of the conversation."""

_TOKEN_LIMIT = 2**31
"""No token id reaches it."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_MEDIA_KEYS = (
    "image_url",
    "input_audio",
    "audio_url",
    "video_url",
    "image_embeds",
    "audio_embeds",
    "image_pil",
    "file",
)


class Api(StrEnum):
    """The two APIs whose turns have a prefill and a decode leg."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Request:
    """One turn as the client asked for it. ``body`` is without what is the router's alone.

    model: as the client named it. conversation: the id that the client gave, or None. stream: asked for a stream.
    size: of the body, in bytes.
    """

    api: Api
    body: Mapping[str, Any]
    model: str
    conversation: str | None
    stream: bool
    size: int = 0

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that the answer may have, where the client set it; chat's newer name wins."""
        newer = self.body.get("max_completion_tokens") if self.api is Api.CHAT else None
        value = newer if newer is not None else self.body.get("max_tokens")
        return value if isinstance(value, int) else None

    @property
    def wants_token_ids(self) -> bool:
        """Whether the client asked for token ids itself, so that they are not taken out of its answer."""
        return bool(self.body.get("return_token_ids"))

    @property
    def plain(self) -> bool:
        """Whether no KV can move for it: several answers of which one handle would come back, or a prompt that prefill
        reads no prefix for (``prompt_logprobs``, ``echo``).
        """
        body = self.body
        several = (body.get("n") or 1) > 1 or (body.get("best_of") or 1) > 1 or bool(body.get("use_beam_search"))
        whole = body.get("prompt_logprobs") is not None or bool(body.get("echo"))
        if self.api is Api.CHAT:
            return several or whole
        unusual = body.get("prompt_embeds") is not None or body.get("suffix") is not None
        return several or whole or unusual or len(prompts(body.get("prompt"))) != 1

    @property
    def provable(self) -> bool:
        """Whether the token ids of the prompt say all about it and can be known before the prefill leg."""
        if self.body.get("truncate_prompt_tokens") is not None:
            return False
        return self.api is Api.COMPLETIONS or not has_media(self.body["messages"])


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body. Raises RequestError."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error.msg} at position {error.pos}.") from error
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    try:
        # More can be read than can be written, and a leg puts some fields one level deeper.
        orjson.dumps([body])
    except orjson.JSONEncodeError as error:
        raise RequestError("The body is nested too deeply.") from error
    return body


def refuse_own_fields(body: Mapping[str, Any]) -> None:
    """Raises RequestError where the client sets what only the router may set, also under ``vllm_xargs``."""
    for name in OWN_FIELDS:
        if name in body:
            raise RequestError(f"'{name}' is set by the router and cannot be sent by a client.", param=name)
    extra = body.get("vllm_xargs")
    if isinstance(extra, Mapping):
        for name in OWN_FIELDS:
            if name in extra:
                param = f"vllm_xargs.{name}"
                raise RequestError(f"'{param}' is set by the router and cannot be sent by a client.", param=param)


def parse(api: Api, raw: bytes, *, conversation: str | None, models: frozenset[str]) -> Request:
    """The turn in a request body. ``conversation`` is what a header said. Raises RequestError.

    A conversation id in the body goes before one in a header; neither is sent on.
    """
    body = parse_json(raw)
    refuse_own_fields(body)
    for name, (holds, expected) in (_CHAT_FIELDS if api is Api.CHAT else _COMPLETION_FIELDS).items():
        if body.get(name) is not None and not holds(body[name]):
            raise RequestError(f"'{name}' must be {expected}.", param=name, code="invalid_type")
    model = require_model(body, models)
    _require_prompt(api, body)
    named = body.pop(CONVERSATION_FIELD, None) or conversation or None
    if named is not None and len(named) > _CONVERSATION_CHARACTERS:
        raise RequestError(
            f"A conversation id has at most {_CONVERSATION_CHARACTERS} characters.", param=CONVERSATION_FIELD
        )
    return Request(api=api, body=body, model=model, conversation=named, stream=bool(body.get("stream")), size=len(raw))


def require_model(body: Mapping[str, Any], models: frozenset[str]) -> str:
    """The model that the body names. Raises RequestError where it is missing, malformed or not served."""
    model = body.get("model")
    if model is None:
        raise RequestError("You must provide a model parameter.", param="model", code="missing_required_parameter")
    if not isinstance(model, str):
        raise RequestError("'model' must be a string.", param="model", code="invalid_type")
    if model not in models:
        known = ", ".join(f"'{name}'" for name in sorted(models))
        message = f"The model '{model}' does not exist. There is: {known}."
        raise RequestError(message, param="model", code="model_not_found", status=404)
    return model


def prompts(prompt: Any) -> Sequence[Any]:
    """The prompts of a completions request: each a string or a list of token ids."""
    if isinstance(prompt, list) and not (prompt and _whole(prompt[0])):
        return prompt
    return [prompt]


def has_media(messages: Sequence[Any]) -> bool:
    """Whether any message has a part that is not text."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and (
                part.get("type", "text") not in _TEXT_PARTS or any(key in part for key in _MEDIA_KEYS)
            ):
                return True
    return False


def too_long(prompt_tokens: int, max_tokens: int | None, limit: int) -> RequestError | None:
    """The error for a prompt, or a prompt and its answer, that do not fit into ``limit`` tokens."""
    if prompt_tokens < limit and prompt_tokens + (max_tokens or 0) <= limit:
        return None
    asked = f"your request has {prompt_tokens} tokens in the prompt"
    if max_tokens:
        asked += f" and asks for {max_tokens} in the answer"
    return RequestError(
        f"This model's maximum context length is {limit} tokens; {asked}. Shorten the prompt or the answer.",
        param="messages" if max_tokens is None or prompt_tokens >= limit else "max_tokens",
        code="context_length_exceeded",
    )


def _require_prompt(api: Api, body: Mapping[str, Any]) -> None:
    if api is Api.CHAT:
        messages = body.get("messages")
        if messages is None:
            raise RequestError("'messages' is required.", param="messages", code="missing_required_parameter")
        if not messages:
            raise RequestError("'messages' must not be empty.", param="messages")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"'messages[{index}]' must be an object with a role.",
                    param=f"messages[{index}]",
                    code="invalid_type",
                )
    elif body.get("prompt") is None and body.get("prompt_embeds") is None:
        raise RequestError("'prompt' is required.", param="prompt", code="missing_required_parameter")


def _whole(value: Any) -> bool:
    return type(value) is int


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _positive(value: Any) -> bool:
    return _whole(value) and value >= 1


def _natural(value: Any) -> bool:
    return _whole(value) and value >= 0


def _token(value: Any) -> bool:
    return _whole(value) and 0 <= value < _TOKEN_LIMIT


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _list(value: Any) -> bool:
    return isinstance(value, list)


def _stop(value: Any) -> bool:
    return _text(value) or (_list(value) and all(_text(item) for item in value))


def _prompt(value: Any) -> bool:
    if _text(value):
        return True
    if not _list(value) or not value:
        return False
    if all(_token(item) for item in value):
        return True
    return all(_text(item) or (_list(item) and item and all(_token(token) for token in item)) for item in value)


_Check = tuple[Callable[[Any], bool], str]

_COMMON_FIELDS: dict[str, _Check] = {
    "stream": (_truth, "a boolean"),
    "stream_options": (_object, "an object"),
    "n": (_positive, "a positive integer"),
    "best_of": (_positive, "a positive integer"),
    "use_beam_search": (_truth, "a boolean"),
    "echo": (_truth, "a boolean"),
    "prompt_logprobs": (_whole, "an integer"),
    "truncate_prompt_tokens": (_whole, "an integer"),
    "min_tokens": (_natural, "a non-negative integer"),
    "temperature": (_number, "a number"),
    "top_p": (_number, "a number"),
    "stop": (_stop, "a string or a list of strings"),
    "return_token_ids": (_truth, "a boolean"),
    "cache_salt": (_text, "a string"),
    "vllm_xargs": (_object, "an object"),
    CONVERSATION_FIELD: (_text, "a string"),
}

_CHAT_FIELDS: dict[str, _Check] = _COMMON_FIELDS | {
    "messages": (_list, "a list of messages"),
    "max_tokens": (_positive, "a positive integer"),
    "max_completion_tokens": (_positive, "a positive integer"),
    "tools": (_list, "a list of tools"),
    "documents": (_list, "a list of objects"),
    "reasoning_effort": (_text, "a string"),
    "chat_template_kwargs": (_object, "an object"),
    "add_generation_prompt": (_truth, "a boolean"),
    "continue_final_message": (_truth, "a boolean"),
}

_COMPLETION_FIELDS: dict[str, _Check] = _COMMON_FIELDS | {
    "prompt": (_prompt, "a string, a list of strings, or a list of token ids"),
    "max_tokens": (_natural, "a non-negative integer"),
}
