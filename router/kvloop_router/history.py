"""Finding a conversation by what its messages say, without the client's help. Pure.

A message history becomes a trail: one keyed digest a message, each chained to the one before it, so that two trails
share exactly as many digests as the histories share messages. A trail is kept with each handle; a new request's trail
is matched against it. What is found here is only a candidate: token by token, the proof decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from kvloop_connector.digest import DIGEST_BYTES, DigestKey, common_blocks
from kvloop_router.request import Api, Request, prompts

_PERSON = b"kvloop/history"
_INTRODUCTION = frozenset({"system", "developer"})
PROMPT_CHARACTERS = 256
PROMPT_TOKEN_IDS = 64
"""A completion's prompt has no messages; it is cut into pieces of this size."""


@dataclass(frozen=True, slots=True)
class Trail:
    """The digests of a history.

    digests: DIGEST_BYTES for each message.
    shared: how many leading messages many conversations may have in common without being one (the system prompt); of a
        completion's prompt, all but the last piece.
    answered: whether it holds an answer, which no other conversation is likely to have.
    """

    digests: bytes
    shared: int
    answered: bool

    def __len__(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    def prefix(self, messages: int) -> bytes:
        """The digest that stands for the first ``messages`` messages; chained, so that it covers all of them."""
        return self.digests[(messages - 1) * DIGEST_BYTES : messages * DIGEST_BYTES]

    @property
    def whole(self) -> bytes:
        """The digest that stands for the whole history; empty where there is none."""
        return self.digests[-DIGEST_BYTES:]

    @property
    def start(self) -> bytes:
        """The digest up to and with the first message that is the conversation's own; empty where there is none."""
        return self.prefix(self.shared + 1) if len(self) > self.shared else b""


def trail(key: DigestKey, request: Request) -> Trail:
    """The trail of a request's history, keyed and bound to the key's context."""
    if request.api is Api.CHAT:
        messages = request.body["messages"]
        return Trail(
            digests=_chain(key, [_canonical(message) for message in messages]),
            shared=_introduction(messages),
            answered=any(message["role"] == "assistant" for message in messages),
        )
    pieces = _pieces(request.body.get("prompt"))
    return Trail(_chain(key, pieces), shared=max(0, len(pieces) - 1), answered=True)


def common_messages(left: Trail, right: Trail) -> int:
    """How many leading messages two histories share."""
    return common_blocks(left.digests, right.digests)


def same_conversation(recorded: Trail, new: Trail) -> bool:
    """Whether the new history may use the recorded one's handle: it shares more than a system prompt, and is not just
    another conversation's equal beginning.
    """
    common = common_messages(recorded, new)
    return common > recorded.shared and (common < len(new) or new.answered)


def goes_on(recorded: Trail, new: Trail) -> bool:
    """Whether the new history is surely the recorded one's conversation later on: it begins with all of that one, an
    answer included. Whatever the recorded one's handle retains, the new one's does too.
    """
    chat = recorded.shared + 1 < len(recorded)
    return chat and recorded.answered and common_messages(recorded, new) == len(recorded) < len(new)


def _introduction(messages: Sequence[Mapping[str, Any]]) -> int:
    for index, message in enumerate(messages):
        if message["role"] not in _INTRODUCTION:
            return index
    return len(messages)


def _canonical(message: Mapping[str, Any]) -> bytes:
    return orjson.dumps(message, option=orjson.OPT_SORT_KEYS)


def _pieces(prompt: Any) -> list[bytes]:
    (only, *more) = prompts(prompt)
    if more or only is None:
        return []
    size = PROMPT_CHARACTERS if isinstance(only, str) else PROMPT_TOKEN_IDS
    return [orjson.dumps(only[start : start + size]) for start in range(0, len(only) - size + 1, size)]


def _chain(key: DigestKey, parts: Sequence[bytes]) -> bytes:
    previous = blake2b(key.context, key=key.secret, digest_size=DIGEST_BYTES, person=_PERSON).digest()
    digests = bytearray()
    for part in parts:
        previous = blake2b(previous + part, key=key.secret, digest_size=DIGEST_BYTES, person=_PERSON).digest()
        digests += previous
    return bytes(digests)
