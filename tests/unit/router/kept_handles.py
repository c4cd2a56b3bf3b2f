"""Handles as a store keeps them, for tests; every fact can be set."""

from __future__ import annotations

from typing import Any

from kvloop_connector.digest import DigestKey, Retained
from kvloop_router.history import Trail, trail
from kvloop_router.kept import Kept, Query
from kvloop_router.request import Api, Request

SCOPE = b"scope"
KEY = DigestKey(b"k" * 32, SCOPE)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def chat_trail(*contents: str, key: DigestKey = KEY) -> Trail:
    """The trail of a conversation with a system prompt, whose messages alternate between user and assistant."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for index, content in enumerate(contents):
        messages.append({"role": "assistant" if index % 2 else "user", "content": content})
    return trail(key, Request(Api.CHAT, {"messages": messages}, "tiny", None, False))


def kept(name: str, *contents: str, deadline: float = 1450.0, **facts: Any) -> Kept:
    """A handle of a turn whose messages were ``contents``."""
    defaults: dict[str, Any] = {
        "tenant_scope": SCOPE,
        "decode": "decode-0",
        "process": "uid-0",
        "kv_revision": "a",
        "params": {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_engine_id": "engine",
            "remote_request_id": name,
            "remote_host": "127.0.0.2",
            "remote_port": 5600,
            "remote_num_tokens": 40,
        },
        "blocks": (((0, 3),),),
        "retained": Retained(digests=b"d" * 16, tokens=41, exact=b""),
        "block_size": 16,
        "trail": chat_trail(*contents),
        "conversation": None,
        "deadline": deadline,
    }
    return Kept(**(defaults | facts))


def next_turn(*contents: str, conversation: str | None = None, scope: bytes = SCOPE) -> Query:
    """A search for the turn that follows one whose messages were ``contents``."""
    return query(*contents, "an answer", "a next question", conversation=conversation, scope=scope)


def query(*contents: str, conversation: str | None = None, scope: bytes = SCOPE) -> Query:
    """A search for a turn whose messages are ``contents``."""
    return Query(scope, conversation, chat_trail(*contents, key=DigestKey(b"k" * 32, scope)))
