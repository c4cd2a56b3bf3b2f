"""``/v1/responses`` as vLLM 0.32 answers it without a store: what is asked as a chat, and its answer as a response.

The events and their fields are those of ``entrypoints/openai/responses/streaming_events.py`` and ``serving.py`` there.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvloop_sim.answers import AnswerWriter, Choice, Delta
from kvloop_sim.protocol import ApiError, Fields, invalid

Event = tuple[str, dict[str, Any]]
"""The name of a server-sent event, and its data."""

_SAME: Final = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "cache_salt",
    "chat_template_kwargs",
    "kv_transfer_params",
    "vllm_xargs",
    "stream",
)
_ROLES: Final = {"developer": "system"}


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request that the engine makes of it. Raises ApiError."""
    fields = Fields(body)
    if body.get("input") is None:
        raise invalid("Field required", "body.input")
    if body.get("previous_response_id") is not None:
        missing = f"Response with id '{body['previous_response_id']}' not found."
        raise ApiError(404, missing, kind="invalid_request_error", parameter="response_id")
    if fields.flag("background"):
        told = "This vLLM engine does not support `store=True` and therefore does not support the background mode."
        raise ApiError(400, told, kind="invalid_request_error", parameter="background")
    chat = {name: body[name] for name in _SAME if name in body}
    chat["messages"] = _messages(body)
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    tools = [_tool(tool) for tool in body.get("tools") or () if isinstance(tool, Mapping)]
    if tools:
        chat["tools"] = tools
        chat["tool_choice"] = _choice(body.get("tool_choice"))
    form = (fields.mapping("text") or {}).get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    elif isinstance(form, Mapping):
        chat["response_format"] = form
    return chat


def whole(body: Mapping[str, Any], writer: AnswerWriter, choice: Choice) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    items = [_item(writer, choice.text)] if choice.text else []
    status = "incomplete" if choice.finish == "length" else "completed"
    response = _response(body, writer, status, items)
    response["usage"] = _usage(len(choice.prompt), len(choice.token_ids))
    response["kv_transfer_params"] = choice.handle
    return response


class ResponseStream:
    """The events of a streamed response."""

    def __init__(self, body: Mapping[str, Any], writer: AnswerWriter) -> None:
        self._body = body
        self._writer = writer
        self._choice = Choice(writer.request.prompts[0])
        self._item: dict[str, Any] | None = None
        self._sent = 0

    def begin(self) -> Iterator[Event]:
        """What comes before anything was generated."""
        response = _response(self._body, self._writer, "in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def feed(self, delta: Delta) -> Iterator[Event]:
        """What one step adds."""
        self._choice.add(delta)
        if not delta.text:
            return
        calls = self._writer.request.shape is not None and self._writer.request.shape.tool is not None
        if self._item is None:
            self._item = _item(self._writer, "", status="in_progress")
            opened = self._item if calls else {**self._item, "content": []}
            yield self._event("response.output_item.added", output_index=0, item=opened)
            if not calls:
                yield self._of_item("response.content_part.added", content_index=0, part=_text("", logprobs=[]))
        if calls:
            yield self._of_item("response.function_call_arguments.delta", delta=delta.text)
        else:
            yield self._of_item("response.output_text.delta", content_index=0, delta=delta.text, logprobs=[])

    def end(self) -> Iterator[Event]:
        """What comes after the last step."""
        items: list[dict[str, Any]] = []
        text = self._choice.text
        if self._item is not None:
            done = {**_item(self._writer, text), "id": self._item["id"]}
            if "call_id" in done:
                done["call_id"] = self._item["call_id"]
                yield self._of_item("response.function_call_arguments.done", arguments=text, name=done["name"])
            else:
                yield self._of_item("response.output_text.done", content_index=0, text=text, logprobs=[])
                yield self._of_item("response.content_part.done", content_index=0, part=_text(text))
            yield self._event("response.output_item.done", output_index=0, item=done)
            items.append(done)
        response = whole(self._body, self._writer, self._choice)
        yield self._event("response.completed", response={**response, "output": items})

    def _of_item(self, kind: str, **data: Any) -> Event:
        return self._event(kind, item_id=(self._item or {})["id"], output_index=0, **data)

    def _event(self, kind: str, **data: Any) -> Event:
        self._sent += 1
        return kind, {**data, "sequence_number": self._sent - 1, "type": kind}


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body["input"]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, Mapping) for item in given):
        raise invalid("Input should be a valid list", "body.input")
    return [*messages, *(_message(item) for item in given)]


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    match item.get("type", "message"):
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        case "message":
            role = item.get("role")
            return {"role": _ROLES.get(str(role), role), "content": item.get("content")}
    raise invalid(f"Unsupported item {item.get('type')}", "body.input")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


def _choice(choice: object) -> Any:
    if isinstance(choice, Mapping):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice or "auto"


def _item(writer: AnswerWriter, text: str, *, status: str = "completed") -> dict[str, Any]:
    shape = writer.request.shape
    if shape is not None and shape.tool is not None:
        return {
            "arguments": text,
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": shape.tool,
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(16)}",
            "status": status,
        }
    return {
        "id": f"msg_{secrets.token_hex(16)}",
        "content": [_text(text)] if text else [],
        "role": "assistant",
        "status": status,
        "type": "message",
    }


def _text(text: str, logprobs: Sequence[Any] | None = None) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _usage(prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": answer_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt_tokens + answer_tokens,
    }


def _response(
    body: Mapping[str, Any], writer: AnswerWriter, status: str, output: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "id": writer.answer_id,
        "created_at": writer.created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": writer.request.model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "temperature": body.get("temperature", 1.0),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p", 1.0),
        "background": False,
        "max_output_tokens": writer.request.max_tokens[0],
        "max_tool_calls": body.get("max_tool_calls"),
        "previous_response_id": None,
        "prompt": None,
        "reasoning": body.get("reasoning"),
        "service_tier": body.get("service_tier", "auto"),
        "status": status,
        "text": body.get("text"),
        "top_logprobs": None,
        "truncation": body.get("truncation", "disabled"),
        "usage": None,
        "user": body.get("user"),
        "presence_penalty": body.get("presence_penalty", 0.0),
        "frequency_penalty": body.get("frequency_penalty", 0.0),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }
