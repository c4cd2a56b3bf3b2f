"""Finding a conversation by what its messages say, without the client's help. Pure.

A message history becomes a trail: one keyed digest a message, each chained to the one before it, so that two trails
share exactly as many digests as the histories share messages. A trail is kept with each handle; a new request's trail
is matched against it. What is found here is only a candidate: token by token, the proof decides.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
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

_DIGEST = f"{DIGEST_BYTES}s"
_SETTING_FIELDS = ("tools", "documents", "chat_template")

GAIN = 2
"""How many times as much as its own conversation loses by it a handle has to give another one."""


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
    def prefixes(self) -> tuple[bytes, ...]:
        """``prefix`` of one message, of two, and so on up to all of them."""
        return struct.unpack(_DIGEST * (len(self.digests) // DIGEST_BYTES), self.digests)

    @property
    def whole(self) -> bytes:
        """The digest that stands for the whole history; empty where there is none."""
        return self.digests[-DIGEST_BYTES:]

    @property
    def start(self) -> bytes:
        """The digest up to and with the first message that is the conversation's own; empty where there is none."""
        return self.digests[self.shared * DIGEST_BYTES : (self.shared + 1) * DIGEST_BYTES]


def trail(key: DigestKey, request: Request) -> Trail:
    """The trail of a request's history, keyed and bound to the key's context and to the request's setting."""
    if request.api is Api.CHAT:
        messages = request.body["messages"]
        return Trail(
            digests=_chain(key, [_canonical(message) for message in messages], _setting(request.body)),
            shared=_introduction(messages),
            answered=any(message["role"] == "assistant" for message in messages),
        )
    pieces = _pieces(request.body.get("prompt"))
    return Trail(_chain(key, pieces), shared=max(0, len(pieces) - 1), answered=True)


def common_messages(left: Trail, right: Trail) -> int:
    """How many leading messages two histories share."""
    return common_blocks(left.digests, right.digests)


class Kinship(IntEnum):
    """What a new history is to a recorded one."""

    NONE = 0
    LIKE = 1
    """It may use the recorded one's handle, but for all that is known that is another conversation's."""
    SAME = 2
    """It is that conversation, edited or not."""


def kinship(recorded: Trail, new: Trail, *, named: bool | None) -> Kinship:
    """Whether the new history may use the recorded one's handle.

    named: whether both were told under one conversation id; None: one of them under none.

    An id only selects: threads that share one are told apart by what is said in them, and a conversation that comes
    under another's id, or goes on from within another, is known by its history, if nearly all of what was recorded is
    its beginning. Without ids it has to share more than a system prompt, and not to be another conversation's equal
    beginning; the very same history is asked again by whoever wants another answer.
    """
    common = common_messages(recorded, new)
    whole = common == len(recorded)
    if named:
        return Kinship.SAME
    if common <= recorded.shared or not (common < len(new) or new.answered or whole):
        return Kinship.NONE
    if named is None:
        return Kinship.SAME if whole and (common < len(new) or recorded.answered) else Kinship.LIKE
    return Kinship.LIKE if mostly(recorded, new) else Kinship.NONE


def mostly(recorded: Trail, new: Trail) -> bool:
    """Whether the new history begins with nearly all of the recorded one."""
    common = common_messages(recorded, new)
    return common >= GAIN * (len(recorded) - common)


def apart(recorded: Trail, new: Trail, *, named: bool | None) -> bool:
    """Whether a history that may use the recorded one's handle could as well be another conversation: told under
    another id, or the same first question once more, or a thread that has only the system prompt in common.
    ``named``: as for `kinship`.
    """
    common = common_messages(recorded, new)
    again = not new.answered and common == len(recorded) == len(new)
    return named is False or (named is None and again) or (common <= recorded.shared and common < len(recorded))


def outgrown(recorded: Trail, new: Trail, *, named: bool | None) -> bool:
    """Whether whatever the recorded history's handle retains, the new one's does too: the new one begins with all of
    that one. ``named``: as for `kinship`; without ids there has to be an answer in it, that no other conversation has.
    """
    if named is False or common_messages(recorded, new) != len(recorded):
        return False
    chat = recorded.shared + 1 < len(recorded)
    return named is True or (chat and recorded.answered and len(recorded) < len(new))


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


def _setting(body: Mapping[str, Any]) -> bytes:
    """What templates write in front of the messages. With other tools the same messages are another history: a request
    beside a conversation, such as one for its title, takes nothing from it."""
    given = {name: body[name] for name in _SETTING_FIELDS if body.get(name)}
    return orjson.dumps(given, option=orjson.OPT_SORT_KEYS) if given else b""


def _chain(key: DigestKey, parts: Sequence[bytes], setting: bytes = b"") -> bytes:
    previous = blake2b(key.context, key=key.secret, digest_size=DIGEST_BYTES, person=_PERSON).digest()
    if setting:
        previous = blake2b(previous + setting, key=key.secret, digest_size=DIGEST_BYTES, person=_PERSON).digest()
    digests = bytearray()
    for part in parts:
        previous = blake2b(previous + part, key=key.secret, digest_size=DIGEST_BYTES, person=_PERSON).digest()
        digests += previous
    return bytes(digests)
