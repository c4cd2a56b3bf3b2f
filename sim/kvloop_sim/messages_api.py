"""``/v1/messages`` as vLLM 0.32 answers it: what is asked as a chat, and its answer as a message.

The events and their fields are those of ``entrypoints/anthropic/serving.py`` there.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvloop_sim.answers import AnswerWriter, Choice, Delta
from kvloop_sim.protocol import ApiError, invalid
from kvloop_sim.responses_api import Event

_SAME: Final = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "cache_salt",
    "chat_template_kwargs",
    "kv_transfer_params",
    "vllm_xargs",
    "stream",
)


def as_chat(body: Mapping[str, Any], *, counting: bool = False) -> dict[str, Any]:
    """The chat request that the engine makes of it. Raises ApiError. ``counting``: nothing is to be generated."""
    for name in ("model", "messages") if counting else ("model", "messages", "max_tokens"):
        if body.get(name) is None:
            raise invalid("Field required", f"body.{name}")
    if not isinstance(body["messages"], list) or not all(isinstance(item, Mapping) for item in body["messages"]):
        raise invalid("Input should be a valid list", "body.messages")
    chat = {name: body[name] for name in _SAME if name in body}
    system = [{"role": "system", "content": _plain(body["system"])}] if body.get("system") else []
    chat["messages"] = [*system, *(each for message in body["messages"] for each in _messages(message))]
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    tools = [tool for tool in body.get("tools") or () if isinstance(tool, Mapping)]
    if tools:
        chat["tools"] = [_tool(tool) for tool in tools]
        chat["tool_choice"] = _choice(body.get("tool_choice"))
    return chat


def error_body(error: ApiError) -> dict[str, Any]:
    """An error that the handler itself gives; a body without the schema is refused before it, in OpenAI's shape."""
    if error.before_the_engine:
        return error.as_json()
    return {"type": "error", "error": {"type": error.kind, "message": error.message}}


def whole(writer: AnswerWriter, choice: Choice) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    reason, sequence = _stop(writer, choice)
    message: dict[str, Any] = {
        "id": writer.answer_id,
        "type": "message",
        "role": "assistant",
        "content": [_block(writer, choice.text)],
        "model": writer.request.model,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(len(choice.prompt), len(choice.token_ids)),
        "kv_transfer_params": choice.handle,
    }
    return {name: value for name, value in message.items() if value is not None}


class MessageStream:
    """The events of a streamed message. Its handle is in none of them."""

    def __init__(self, writer: AnswerWriter) -> None:
        self._writer = writer
        self._choice = Choice(writer.request.prompts[0])
        self._open = False

    def begin(self) -> Iterator[Event]:
        """What comes before anything was generated."""
        message: dict[str, Any] = {
            "id": self._writer.answer_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._writer.request.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(self._choice.prompt), 0),
        }
        yield _event("message_start", message=message)

    def feed(self, delta: Delta) -> Iterator[Event]:
        """What one step adds."""
        self._choice.add(delta)
        if not delta.text:
            return
        block = _block(self._writer, "")
        calls = block["type"] == "tool_use"
        if not self._open:
            self._open = True
            yield _event("content_block_start", index=0, content_block=block)
        added = (
            {"type": "input_json_delta", "partial_json": delta.text}
            if calls
            else {"type": "text_delta", "text": delta.text}
        )
        yield _event("content_block_delta", index=0, delta=added)

    def end(self) -> Iterator[Event]:
        """What comes after the last step."""
        if self._open:
            yield _event("content_block_stop", index=0)
        reason, sequence = _stop(self._writer, self._choice)
        usage = _usage(len(self._choice.prompt), len(self._choice.token_ids))
        yield _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage)
        yield _event("message_stop")


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    calls, results, rest = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            text = _plain(block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            rest.append(block)
    own = {"role": role, "content": rest, **({"tool_calls": calls} if calls else {})}
    return [*results, *([own] if rest or calls else [])]


def _plain(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _choice(choice: object) -> Any:
    match choice:
        case {"type": "tool", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "any"}:
            return "required"
        case {"type": "none"}:
            return "none"
    return "auto"


def _block(writer: AnswerWriter, text: str) -> dict[str, Any]:
    shape = writer.request.shape
    if shape is None or shape.tool is None:
        return {"type": "text", "text": text}
    call = f"chatcmpl-tool-{secrets.token_hex(8)}"
    return {"type": "tool_use", "id": call, "name": shape.tool, "input": json.loads(text) if text else {}}


def _stop(writer: AnswerWriter, choice: Choice) -> tuple[str | None, str | None]:
    shape = writer.request.shape
    if choice.finish == "length":
        return "max_tokens", None
    if shape is not None and shape.tool is not None:
        return "tool_use", None
    if choice.finish != "stop":
        return None, None
    return ("stop_sequence", choice.stop_reason) if isinstance(choice.stop_reason, str) else ("end_turn", None)


def _usage(prompt_tokens: int, answer_tokens: int) -> dict[str, int]:
    return {"input_tokens": prompt_tokens, "output_tokens": answer_tokens}


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}
