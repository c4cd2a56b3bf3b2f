"""Requests of vLLM's OpenAI-compatible API: from JSON to what the engine runs, or to vLLM's error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvloop_sim import tokenizer
from kvloop_sim.options import Options
from kvloop_sim.shape import Shape, shape_of
from kvloop_sim.template import TemplateOptions, UnsupportedContent, images, render

_COMPLETION_TOKENS: Final = 16
_SALT_LENGTH: Final = 1024
_MALFORMED: Final = "Bad Request"


class ApiError(Exception):
    """An answer in vLLM's error shape."""

    def __init__(
        self, status: int, message: str, *, kind: str = "BadRequestError", parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.parameter = parameter

    @property
    def before_the_engine(self) -> bool:
        """Whether vLLM's server refuses the body itself, so that its engine never hears of the parameters."""
        return self.kind == _MALFORMED

    def as_json(self) -> dict[str, Any]:
        """The body."""
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.parameter, "code": self.status},
        }


def internal_error(message: str = "Internal server error") -> ApiError:
    """What a failed load and a dead engine give."""
    return ApiError(500, message, kind="InternalServerError")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A validated chat or completion request. ``prompts`` has one entry for a chat.

    adapter: the name of a LoRA adapter; empty for the model itself.
    logprobs: how many of the likeliest tokens are told beside each that was chosen; None: not even that one's.
    shape: the form that the answer must have; None: any.
    """

    chat: bool
    model: str
    adapter: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    ignore_eos: bool
    skip_special_tokens: bool
    skip_cache: bool
    return_token_ids: bool
    echo: bool
    logprobs: int | None
    tokens_as_ids: bool
    salt: str
    params: Mapping[str, Any] | None
    shape: Shape | None = None


def parse_generation(body: Mapping[str, Any], options: Options, *, chat: bool) -> GenerationRequest:
    """The request in ``body``; raises ApiError as vLLM answers."""
    check_model(body, options)
    fields = Fields(body)
    stream = fields.flag("stream")
    stream_options = fields.mapping("stream_options") or {}
    if stream_options and not stream:
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    params = fields.mapping("kv_transfer_params")
    params = dict(params) if params else None
    if "kv_transfer_params" in (fields.mapping("vllm_xargs") or {}):
        raise internal_error("'str' object has no attribute 'get'")
    given = _given_ids(params, options) if chat else None
    if chat:
        prompts = [given] if given is not None else [chat_ids(body, options)]
    else:
        prompts = _completion_prompts(body.get("prompt"))
    echo = fields.flag("echo") and not chat
    wanted = fields.whole("max_completion_tokens") if chat else None
    wanted_name = "max_completion_tokens" if wanted is not None else "max_tokens"
    if wanted is None:
        wanted = fields.whole("max_tokens")
    if wanted is None and not chat:
        wanted = _COMPLETION_TOKENS
    if wanted is not None and wanted > options.max_model_len:
        raise _bad(
            f"{wanted_name}={wanted} cannot be greater than max_model_len={options.max_model_len}. "
            "Please request fewer output tokens.",
            wanted_name,
        )
    if echo and wanted == 0:
        wanted = 1
    _check_ranges(body)
    min_tokens = fields.whole("min_tokens") or 0
    max_tokens = tuple(_max_tokens(prompt, wanted, min_tokens, options) for prompt in prompts)
    n = fields.whole("n")
    n = 1 if n is None else n
    if n < 1:
        raise _bad(f"n must be at least 1, got {n}.", "n")
    if n > 1 and body.get("temperature") == 0:
        raise _bad(f"n must be 1 when using greedy sampling, got {n}.", "n")
    logprobs = _logprobs(fields, options, chat=chat)
    return GenerationRequest(
        chat=chat,
        model=(model := str(body.get("model") or options.served_names[0])),
        adapter=model if model in options.adapters else "",
        prompts=tuple(tuple(prompt) for prompt in prompts),
        max_tokens=max_tokens,
        n=n,
        stream=stream,
        include_usage=bool(stream_options.get("include_usage")),
        continuous_usage=bool(stream_options.get("include_usage") and stream_options.get("continuous_usage_stats")),
        min_tokens=min_tokens,
        stop=_stop_strings(body.get("stop")),
        stop_token_ids=frozenset(_token_list(body.get("stop_token_ids") or [], "stop_token_ids")),
        include_stop=fields.flag("include_stop_str_in_output"),
        ignore_eos=fields.flag("ignore_eos"),
        skip_special_tokens=body.get("skip_special_tokens") is not False,
        skip_cache=body.get("prompt_logprobs") is not None or (echo and logprobs is not None),
        return_token_ids=fields.flag("return_token_ids"),
        echo=echo,
        logprobs=logprobs,
        tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
        salt=_salt(body.get("cache_salt")),
        params=params,
        shape=shape_of(body) if chat else None,
    )


def check_model(body: Mapping[str, Any], options: Options) -> None:
    """Raise 404 for a model that is not served; no model at all is fine."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid("Input should be a valid string", "body.model")
    if model and model not in (*options.served_names, *options.adapters):
        raise ApiError(
            404,
            f"The model `{model}` does not exist. Valid aliases: {', '.join(options.served_names)}.",
            kind="NotFoundError",
            parameter="model",
        )


def chat_ids(body: Mapping[str, Any], options: Options) -> list[int]:
    """The prompt of a chat request, or of ``/tokenize`` with messages."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise invalid("Field required" if messages is None else "Input should be a valid list", "body.messages")
    tools = body.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise invalid("Input should be a valid list", "body.tools")
    fields = Fields(body)
    arguments = fields.mapping("chat_template_kwargs") or {}
    continued = fields.flag("continue_final_message")
    if continued and body.get("add_generation_prompt"):
        raise invalid("Cannot set both `continue_final_message` and `add_generation_prompt` to True.", None)
    template = TemplateOptions(
        add_generation_prompt=body.get("add_generation_prompt") is not False,
        continue_final_message=continued,
        enable_thinking=arguments.get("enable_thinking") is not False,
        strip_reasoning=options.strip_reasoning,
        images=options.images,
    )
    try:
        return tokenizer.with_media(tokenizer.encode(render(messages, tools, template)), images(messages))
    except UnsupportedContent as error:
        raise _bad(str(error), None) from error


class Fields:
    """Typed access to a body. Raises ApiError as a validation of vLLM does."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def flag(self, name: str) -> bool:
        """A boolean; null and absent are false."""
        value = self._body.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise invalid("Input should be a valid boolean", f"body.{name}")

    def whole(self, name: str) -> int | None:
        """A whole number of 0 or more, or None."""
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid("Input should be a valid integer", f"body.{name}")
        if value < 0:
            raise _bad(f"{name} must be at least 0, got {value}.", name)
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """An object, or None."""
        value = self._body.get(name)
        if value is None or isinstance(value, Mapping):
            return value
        raise invalid("Input should be a valid dictionary", f"body.{name}")


# What vLLM's sampling parameters may be: the least and the most, and whether the least itself is allowed.
_RANGES: Final[dict[str, tuple[float, float, bool]]] = {
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, False),
    "top_k": (-1, 2**31, True),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, float("inf"), False),
}


def _check_ranges(body: Mapping[str, Any]) -> None:
    for name, (least, most, closed) in _RANGES.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid("Input should be a valid number", f"body.{name}")
        if not (least < value <= most or (closed and value == least)):
            raise _bad(f"{name} must be in {'[' if closed else '('}{least:g}, {most:g}], got {value}.", name)


def _logprobs(fields: Fields, options: Options, *, chat: bool) -> int | None:
    if chat:
        wanted = (fields.whole("top_logprobs") or 0) if fields.flag("logprobs") else None
    else:
        wanted = fields.whole("logprobs")
    if wanted is not None and wanted > options.max_logprobs:
        told = f"Requested sample logprobs of {wanted}, which is greater than max allowed: {options.max_logprobs}"
        raise _bad(told, "logprobs")
    return wanted


def _given_ids(params: dict[str, Any] | None, options: Options) -> list[int] | None:
    """The prompt that ``kv_transfer_params.prompt_token_ids`` names, taken out of the parameters."""
    if not params or not options.prompt_token_ids:
        return None
    ids = params.pop("prompt_token_ids", None)
    if ids is None:
        return None
    name = "kv_transfer_params.prompt_token_ids"
    if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
        raise _bad("`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.", name)
    unknown = next((token for token in ids if not tokenizer.is_token(token)), None)
    if unknown is not None:
        raise _bad(f"Token id {unknown} is out of vocabulary", name)
    return list(ids)


def _completion_prompts(prompt: object) -> list[list[int]]:
    if isinstance(prompt, str):
        return [_text_ids(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return [_text_ids(item) for item in prompt]
        if all(type(item) is int for item in prompt):
            return [_token_list(prompt, "prompt")]
        if all(isinstance(item, list) and item for item in prompt):
            return [_token_list(item, "prompt") for item in prompt]
    raise _bad("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")


def _text_ids(text: str) -> list[int]:
    ids = tokenizer.encode(text)
    if not ids:
        raise _bad("The decoder prompt cannot be empty", "prompt")
    return ids


def _token_list(tokens: object, name: str) -> list[int]:
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise invalid("Input should be a valid list of integers", f"body.{name}")
    unknown = next((token for token in tokens if not tokenizer.is_token(token)), None)
    if unknown is not None:
        raise _bad(f"Token id {unknown} is out of vocabulary", name)
    return list(tokens)


def _max_tokens(prompt: Sequence[int], wanted: int | None, min_tokens: int, options: Options) -> int:
    longest = options.max_model_len
    if len(prompt) > longest:
        raise _bad(
            f"This model's maximum context length is {longest} tokens. However, your prompt contains {len(prompt)} "
            "input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
        )
    tokens = longest - len(prompt) if wanted is None else min(wanted, longest - len(prompt))
    if tokens < 1:
        raise _bad(f"max_tokens must be at least 1, got {tokens}.", "max_tokens")
    if min_tokens > tokens:
        raise _bad(f"min_tokens must be less than or equal to max_tokens={tokens}, got {min_tokens}.", "min_tokens")
    return tokens


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise invalid("Input should be a valid string", "body.stop")
    if any(not text for text in strings):
        raise _bad("stop cannot contain an empty string.", "stop")
    return tuple(strings)


def _salt(salt: object) -> str:
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 1 <= len(salt) <= _SALT_LENGTH:
        raise invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    return salt


def _bad(message: str, parameter: str | None) -> ApiError:
    return ApiError(400, message, parameter=parameter)


def invalid(fault: str, location: str | None) -> ApiError:
    """A body that does not have vLLM's schema."""
    message = f"1 validation error:\n  {{'loc': '{location}', 'msg': '{fault}'}}"
    return ApiError(400, message, kind=_MALFORMED, parameter=location)
