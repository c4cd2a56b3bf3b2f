"""What a scripted engine answers where nothing is wrong with it.

Its tokens are the bytes of what its template renders, and its template is append-only, so that turn follows turn as
with a real model.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvloop_connector.settings import Role
from tests.integration import hazards

if TYPE_CHECKING:
    from tests.integration.scripted_engine import ScriptedEngine

BLOCK_SIZE = 4
ANSWER = "fine"
END = "\n"
RANK: ContextVar[int] = ContextVar("rank", default=0)
"""The data-parallel rank that computes the request."""


def rendered(body: Mapping[str, Any]) -> list[int]:
    """The token ids of a request's prompt."""
    if "messages" in body:
        texts = [f"<{message['role']}>{_text(message.get('content'))}{END}" for message in body["messages"]]
        return list(("".join(texts) + "<assistant>").encode())
    prompt = body["prompt"] if "prompt" in body else body["input"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        (prompt,) = prompt
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


def handle(engine: ScriptedEngine, tokens: int, held: list[int] | None = None) -> dict[str, Any]:
    """``kv_transfer_params`` as this engine returns them for ``tokens`` computed tokens. held: their ids."""
    decodes = engine.role is Role.DECODE
    params: dict[str, Any] = {
        "do_remote_prefill": not decodes,
        "do_remote_decode": decodes,
        "remote_block_ids": [list(range(100, 100 + -(-tokens // BLOCK_SIZE)))],
        "remote_engine_id": engine.engine_id if engine.ranks == 1 else f"{engine.engine_id}_dp{RANK.get()}",
        "remote_request_id": uuid.uuid4().hex,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 123.5 if decodes else None,
        "a_field_of_the_future": {"kept": True},
    }
    if held is not None:
        hazards.witness().gave(engine, params, held, BLOCK_SIZE)
    return params


async def good(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The answer of an engine at which nothing is wrong."""
    if body.get("stream"):
        return await stream(engine, request, body)
    return web.json_response(whole_answer(engine, request.path, body))


async def stream(
    engine: ScriptedEngine, request: web.Request, body: dict[str, Any], events: list[bytes] | None = None
) -> web.StreamResponse:
    """A streamed answer of ``events``."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for event in stream_events(engine, request.path, body) if events is None else events:
        await response.write(event)
    await response.write_eof()
    return response


def stream_events(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> list[bytes]:
    """The events of a good answer: role, text, end with the handle, mark."""
    answer = whole_answer(engine, path, body)
    chat = "messages" in body
    text, ids = answer["choices"][0]["text"] if not chat else ANSWER, list(ANSWER.encode())
    events: list[dict[str, Any]] = []
    asked = bool(body.get("return_token_ids"))
    prompt_ids = {"prompt_token_ids": rendered(body)} if asked else {}
    if chat:
        events.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], **prompt_ids})
    first = {} if chat else prompt_ids
    piece = {"delta": {"content": text}} if chat else {"text": text}
    events.append({"choices": [{"index": 0, **piece, "finish_reason": None, **_ids(asked, ids), **first}]})
    piece = {"delta": {"content": ""}} if chat else {"text": ""}
    last: dict[str, Any] = {"choices": [{"index": 0, **piece, "finish_reason": "stop", **_ids(asked, END.encode())}]}
    if answer.get("kv_transfer_params"):
        last["kv_transfer_params"] = answer["kv_transfer_params"]
    events.append(last)
    return [*(event(item) for item in events), b"data: [DONE]\n\n"]


def event(item: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(item, separators=(",", ":")).encode() + b"\n\n"


def whole_answer(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A good answer, whole."""
    params = body.get("kv_transfer_params")
    ids = prompt_ids(engine, body)
    asked = bool(body.get("return_token_ids"))
    answer_ids = list((ANSWER + END).encode())
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if engine.role is Role.PREFILL else "stop"}
    if "messages" in body:
        choice["message"] = {"role": "assistant", "content": ANSWER}
    else:
        choice["text"] = ANSWER + END
    if body.get("logprobs") and engine.likely:
        choice["logprobs"] = _logprobs(engine.likely.pop(0) if engine.likely[1:] else engine.likely[0], body)
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(answer_ids)}
    answer: dict[str, Any] = {"id": "answer", "choices": [{**choice, **_ids(asked, answer_ids)}], "usage": usage}
    if asked and "messages" in body:
        answer["prompt_token_ids"] = ids
    elif asked:
        answer["choices"][0]["prompt_token_ids"] = ids
    if params and engine.role is Role.PREFILL:
        answer["kv_transfer_params"] = handle(engine, len(ids), ids)
        pulled = params.get("remote_num_tokens") or 0
        if engine.verdict:
            pulled = pulled // BLOCK_SIZE * BLOCK_SIZE if engine.verdict == "read" else 0
        cached = pulled if engine.cached_tokens is None else engine.cached_tokens
        answer["kv_transfer_params"]["remote_prefill_cached_tokens"] = cached
        if engine.verdict:
            said = engine.verdict if params.get("remote_engine_id") else "no_handle"
            answer["kv_transfer_params"]["kvloop_reuse"] = {"outcome": said, "tokens": pulled}
    elif params:
        answer["kv_transfer_params"] = handle(engine, len(ids) + len(answer_ids) - 1, [*ids, *answer_ids])
    return answer


def _logprobs(likely: Mapping[str, float], body: Mapping[str, Any]) -> dict[str, Any]:
    if "messages" not in body:
        return {"top_logprobs": [dict(likely)]}
    return {"content": [{"top_logprobs": [{"token": word, "logprob": value} for word, value in likely.items()]}]}


def prompt_ids(engine: ScriptedEngine, body: Mapping[str, Any]) -> list[int]:
    """The ids of the prompt that the engine computes."""
    given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if given is not None:
        return list(given)
    return [*rendered(body), *([1] if engine.renders_otherwise else [])]


def _ids(asked: bool, ids: list[int] | bytes) -> dict[str, Any]:
    return {"token_ids": list(ids)} if asked else {}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)
