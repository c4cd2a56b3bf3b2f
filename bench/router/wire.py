"""What goes over the wire in the benchmark: requests as clients send them, answers in the shape of vLLM 0.33's.

An engine's answer depends on a request's length, ``max_tokens`` (how many chunks), ``seed`` (milliseconds between them)
and on what routers ask for; all of it is found by looking for bytes, since an engine that reads JSON would cost more
than the routers.
"""

from __future__ import annotations

import json
import re
from functools import cache

MODEL = "bench"
BLOCK_SIZE = 16
BYTES_A_TOKEN = 4
MAX_MODEL_LEN = 2_000_000
PIECE = b" tok"
"""The text of every chunk that has any."""
PATH = "/v1/chat/completions"
END_OF_STREAM = b"0\r\n\r\n"
_MESSAGES = 12
_WORDS = "the engine keeps what it computed until the next turn of the conversation asks for it again "
_IDS = 131_072

MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
SEED = re.compile(rb'"seed": ?(\d+)')
ASKS_IDS = re.compile(rb'"return_token_ids": ?true')
STREAMS = re.compile(rb'"stream": ?true')
GIVEN_HANDLE = re.compile(rb'"remote_num_tokens": ?(\d+)')


class Conversation:
    """A conversation whose every turn has the same long history and another last message."""

    def __init__(self, number: int, *, size: int, chunks: int, step_ms: int, messages: int = _MESSAGES) -> None:
        """size: of the body, about, in bytes."""
        each = max(1, (size - 500) // messages)
        roles = ("user", "assistant")
        history = [{"role": "system", "content": f"You are the assistant of customer {number}."}]
        for position in range(messages - 2):
            text = (f"{number}.{position} " + _WORDS * (each // len(_WORDS) + 1))[:each]
            history.append({"role": roles[position % 2], "content": text})
        head = {
            "model": MODEL,
            "max_tokens": chunks,
            "seed": step_ms,
            "temperature": 0.7,
            "stream": True,
            "stream_options": {"include_usage": False},
            "messages": history,
        }
        self._start = _dump(head)[: -len(b"]}")] + b',{"role":"user","content":"' + b"and what of that " * 5
        self._turn = 0

    def next_turn(self) -> bytes:
        """The body of the next turn."""
        self._turn += 1
        return self._start + b'%08d"}]}' % self._turn


def request(host: str, path: str, body: bytes) -> bytes:
    """A request as a client sends it."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer none\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def answer(body: bytes, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    """An answer in one piece."""
    head = (
        f"HTTP/1.1 {status}\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: {content_type}\r\n\r\n"
    )
    return head.encode() + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


@cache
def chunk(*, with_ids: bool) -> bytes:
    """A chunk in the middle of a stream, in the transfer's own framing."""
    choice = {
        "index": 0,
        "delta": {"content": PIECE.decode()},
        "logprobs": None,
        "finish_reason": None,
        "token_ids": [4711] if with_ids else None,
    }
    return _framed({"choices": [choice], "kv_transfer_params": None})


@cache
def first_chunk(tokens: int, *, with_ids: bool) -> bytes:
    """The chunk with the role, and the prompt's ids where they were asked for."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return _framed({"choices": [choice], "prompt_token_ids": token_ids(tokens) if with_ids else None})


def last_chunk(params: bytes, *, with_ids: bool) -> bytes:
    """The chunk that ends an answer, the mark after it, and the transfer's end."""
    event = _LAST % (b"[4712]" if with_ids else b"null", params)
    return b"%x\r\n%b\r\n" % (len(event), event) + b"e\r\ndata: [DONE]\n\n\r\n" + END_OF_STREAM


@cache
def token_ids(tokens: int) -> list[int]:
    """The ids of a prompt; two prompts begin alike."""
    return [(position * 7919) % _IDS for position in range(tokens)]


@cache
def tokenized(tokens: int) -> bytes:
    """What ``/tokenize`` answers."""
    told = {"count": tokens, "max_model_len": MAX_MODEL_LEN, "tokens": token_ids(tokens), "token_strs": None}
    return answer(_dump(told))


def tokens_of(body: bytes) -> int:
    """How many tokens the messages of a body are said to have: the same for both legs and every turn, so that what
    routers put behind the messages, such as a handle or the prompt's ids, does not count."""
    start = max(0, body.find(b'"messages":'))
    end = body.find(b'"kv_transfer_params":', start)
    length = (end if end >= 0 else len(body)) - start
    return max(BLOCK_SIZE * 4, length // 1024 * 1024 // BYTES_A_TOKEN)


@cache
def _handle_end(role: str, tokens: int) -> bytes:
    decodes = role == "decode"
    held: dict[str, object] = {
        "remote_engine_id": f"5f3c8a52-7a1d-4c0e-9d8e-{role}",
        "remote_block_ids": [list(range(100, 100 + -(-tokens // BLOCK_SIZE)))],
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "transfer_mode": "pull",
        "do_remote_prefill": not decodes,
        "do_remote_decode": decodes,
    }
    if decodes:
        held["remote_blocks_expiry_time"] = 123456.789
    return _dump(held)[1:-1]


def params(role: str, number: int, tokens: int, *, pulled: int | None) -> bytes:
    """``kv_transfer_params`` of an answer. ``pulled``: what prefill read of the handle that it was given."""
    held = b'{"remote_request_id":"chatcmpl-%016x",%b' % (number, _handle_end(role, tokens))
    if pulled is None:
        return held + b"}"
    told = b',"remote_prefill_cached_tokens":%d,"kvloop_reuse":{"outcome":"read","tokens":%d}}'
    return held + told % (pulled, pulled)


def prefilled(params: bytes, tokens: int, *, with_ids: bool) -> bytes:
    """A prefill leg's answer."""
    ids = b',"prompt_token_ids":' + _dump(token_ids(tokens)) if with_ids else b',"prompt_token_ids":null'
    return answer(_PREFILLED % (tokens, tokens + 1, ids, params))


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _event(value: dict[str, object]) -> bytes:
    common = {"id": "chatcmpl-0b7a4c1e9d2f4e6f", "object": "chat.completion.chunk", "created": 1796040000}
    return b"data: " + _dump({**common, "model": MODEL, **value}) + b"\n\n"


def _framed(value: dict[str, object]) -> bytes:
    event = _event(value)
    return b"%x\r\n%b\r\n" % (len(event), event)


_LAST = (
    _event({"choices": ["CHOICE"], "kv_transfer_params": "PARAMS"})
    .replace(
        b'"CHOICE"',
        b'{"index":0,"delta":{"content":"' + PIECE + b'"},"logprobs":null,"finish_reason":"length","stop_reason":null,'
        b'"token_ids":%b}',
    )
    .replace(b'"PARAMS"', b"%b")
)
_PREFILLED = (
    b'{"id":"chatcmpl-0b7a4c1e9d2f4e6f","object":"chat.completion","created":1796040000,"model":"bench","choices":[{'
    b'"index":0,"message":{"role":"assistant","content":" tok","refusal":null,"annotations":null,"audio":null,'
    b'"function_call":null,"tool_calls":[],"reasoning":null},"logprobs":null,"finish_reason":"length",'
    b'"stop_reason":null,"token_ids":null}],"service_tier":null,"system_fingerprint":null,"usage":{"prompt_tokens":%d,'
    b'"total_tokens":%d,"completion_tokens":1,"prompt_tokens_details":null},"prompt_logprobs":null%b,'
    b'"kv_transfer_params":%b}'
)
