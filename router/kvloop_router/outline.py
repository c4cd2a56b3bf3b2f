"""What is remembered of a request's history, so that somebody can be told later where it diverged, and how. Pure.

Of each message only keyed digests and a length stay, packed into 29 bytes; nothing of a prompt can be read from them.
A long text is represented by its beginning, its end and its length: which message was changed the trail says exactly
(``history``); the outline only has to say how.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from kvloop_connector.digest import DIGEST_BYTES, DigestKey
from kvloop_router.history import Trail
from kvloop_router.request import Api, Request

_PERSON = b"kvloop/outline"
_PACKED = struct.Struct(f"<BI{DIGEST_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}s")
_NOTHING = bytes(DIGEST_BYTES)
_SAMPLE = 2048
"""Characters at either end of a text that its digest covers."""
_LONGEST = 2**32 - 1

ROLES = ("other", "system", "developer", "user", "assistant", "tool", "function")
"""A role is whatever a client sends; only these are ever named."""
_ROLE_NUMBERS = {role: number for number, role in enumerate(ROLES)}
_PLAIN_FIELDS = 2
"""A message of a role and a content has no more."""

_TEMPLATE_FIELDS = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "mm_processor_kwargs",
)
_REASONING_FIELDS = ("reasoning", "reasoning_content")
_CALL_FIELDS = ("tool_calls", "function_call", "tool_call_id")


class Message(NamedTuple):
    """One message. role: one of ROLES. length: characters of its text. content, reasoning, calls: their digests; all
    zeros where there is none."""

    role: str
    length: int
    content: bytes
    reasoning: bytes
    calls: bytes

    @property
    def reasons(self) -> bool:
        """Whether it has reasoning."""
        return self.reasoning != _NOTHING


@dataclass(frozen=True, slots=True)
class Outline:
    """A request's history.

    scope: as in ``scope.Scope.ident``; digests of two scopes cannot be compared.
    conversation: digest of the id that the client gave; empty without one.
    trail: as the search went by; of a completion's prompt, of which there is nothing else.
    packed: the messages. tools, arguments: digests of the tools and of what else the chat template is given.
    """

    scope: bytes
    conversation: bytes
    trail: Trail
    packed: bytes
    tools: bytes
    arguments: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes, but for a constant."""
        return len(self.packed) + len(self.trail.digests)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages, in their order."""
        return tuple(
            Message(ROLES[role], length, content, reasoning, calls)
            for role, length, content, reasoning, calls in _PACKED.iter_unpack(self.packed)
        )


def outline(key: DigestKey, request: Request, trail: Trail) -> Outline:
    """The outline of a request. ``key``: that of the trail's digests."""
    digest = _Digest(key)
    named = request.conversation
    conversation = b"" if named is None else digest(named.encode("utf-8", "surrogatepass"))
    if request.api is not Api.CHAT:
        return Outline(key.context, conversation, trail, b"", _NOTHING, _NOTHING)
    body = request.body
    arguments = {name: body[name] for name in _TEMPLATE_FIELDS if body.get(name) is not None}
    return Outline(
        scope=key.context,
        conversation=conversation,
        trail=trail,
        packed=b"".join([_message(digest, message) for message in body["messages"]]),
        tools=digest.of(body.get("tools")),
        arguments=digest.of(arguments),
    )


class _Digest:
    """Digests under a key, which is taken in once for all of them."""

    __slots__ = ("_keyed",)

    def __init__(self, key: DigestKey) -> None:
        self._keyed = blake2b(key.context, key=key.secret, digest_size=DIGEST_BYTES, person=_PERSON)

    def __call__(self, data: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(data)
        return keyed.digest()

    def of(self, value: Any) -> bytes:
        if not value:
            return _NOTHING
        return self(_sampled(value) if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_SORT_KEYS))


def _message(digest: _Digest, message: Mapping[str, Any]) -> bytes:
    content = message.get("content")
    if isinstance(content, str):
        length, data = len(content), _sampled(content)
    else:
        texts = [_text(part) for part in content] if isinstance(content, list) else [_text(content)]
        length, data = sum(map(len, texts)), b"\0".join(map(_sampled, texts))
    reasoning = calls = _NOTHING
    if len(message) > _PLAIN_FIELDS:
        reasoning = digest.of(next((message[name] for name in _REASONING_FIELDS if message.get(name)), None))
        calls = digest.of([message[name] for name in _CALL_FIELDS if message.get(name)])
    return _PACKED.pack(
        _ROLE_NUMBERS.get(message["role"], 0),
        min(length, _LONGEST),
        digest(data) if length else _NOTHING,
        reasoning,
        calls,
    )


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if part is None:
        return ""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return orjson.dumps(part, option=orjson.OPT_SORT_KEYS).decode()


def _sampled(text: str) -> bytes:
    if len(text) > 2 * _SAMPLE:
        text = f"{len(text)}\0{text[:_SAMPLE]}\0{text[-_SAMPLE:]}"
    return text.encode("utf-8", "surrogatepass")


def shared(left: Sequence[Message], right: Sequence[Message]) -> int:
    """How many messages of ``left``, wherever they stand, ``right`` has too; system prompts do not count."""
    there = {message.content for message in right}
    own = (message for message in left if message.role not in ("system", "developer"))
    return sum(message.content in there for message in own)
