"""A reversible tokenizer with a vocabulary of every UTF-8 piece of one to four bytes.

A text is split into words (a single space belongs to the word after it; any other white space stands alone) and each
word into pieces of at most four bytes, never inside a character. A piece is packed into an id below 2**32: its bytes,
big-endian, padded with 0xFF, which UTF-8 never contains. Ids with a leading 0xFF are special tokens.

Splitting depends on nothing to the left of a word, so that the tokens of a text stay a prefix of the tokens of the
text and anything appended that starts with a space, a newline or a special token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

PIECE_BYTES: Final = 4
_PAD: Final = 0xFF
_SPECIAL_BASE: Final = 0xFF000000
_TOKEN_BITS: Final = 32
_TOKEN_MASK: Final = 2**_TOKEN_BITS - 1

IMAGE_TOKENS: Final = 8
"""Placeholders that an image takes in a prompt."""

SPECIAL_TEXTS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|image_pad|>",
)
END_OF_TEXT: Final = _SPECIAL_BASE
MESSAGE_START: Final = _SPECIAL_BASE + 1
MESSAGE_END: Final = _SPECIAL_BASE + 2
THINK_START: Final = _SPECIAL_BASE + 3
THINK_END: Final = _SPECIAL_BASE + 4
IMAGE_PAD: Final = _SPECIAL_BASE + 7
"""Where an image stands in a prompt, one for each of its parts."""

CONTROL_IDS: Final = frozenset({END_OF_TEXT, MESSAGE_START, MESSAGE_END})
"""Left out of text where special tokens are skipped; the others are added tokens, which stay."""

_SPECIAL_IDS: Final = {text: _SPECIAL_BASE + index for index, text in enumerate(SPECIAL_TEXTS)}
_SPECIAL_SPLIT: Final = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL_TEXTS) + ")")
_WORDS: Final = re.compile(r" ?\S+|\s")


def encode(text: str) -> list[int]:
    """The ids of ``text``; the texts of special tokens become special tokens, as in a rendered chat template."""
    ids: list[int] = []
    for part in _SPECIAL_SPLIT.split(text):
        special = _SPECIAL_IDS.get(part)
        if special is not None:
            ids.append(special)
            continue
        for word in _WORDS.findall(part):
            ids.extend(_pieces(word))
    return ids


def decode(ids: Iterable[int], *, skip_control: bool = False) -> str:
    """The text of ``ids``; with ``skip_control`` without the tokens that bound messages. Raises ValueError."""
    return "".join(token_text(token) for token in ids if not (skip_control and token in CONTROL_IDS))


def with_media(ids: Sequence[int], media: Iterable[str]) -> list[int]:
    """``ids`` as the engine has them: for each of ``media``, in their order, so many placeholders hold what it shows.

    As in vLLM, ids alone do not say what KV they have: `plain` gives the ids that are told, which are all alike.
    """
    shown = [_digest(each) for each in media for _ in range(IMAGE_TOKENS)]
    seen = iter(shown)
    return [token | next(seen, 0) << _TOKEN_BITS if token == IMAGE_PAD else token for token in ids]


def plain(ids: Iterable[int]) -> list[int]:
    """The ids that an engine tells."""
    return [token & _TOKEN_MASK for token in ids]


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=3).digest(), "big")


@lru_cache(maxsize=65536)
def token_text(token: int) -> str:
    """The text of one id; raises ValueError for an id outside the vocabulary."""
    if not 0 <= token < 2**32:
        raise ValueError(f"token id {token} is out of vocabulary")
    if token >= _SPECIAL_BASE:
        index = token - _SPECIAL_BASE
        if index >= len(SPECIAL_TEXTS):
            raise ValueError(f"token id {token} is out of vocabulary")
        return SPECIAL_TEXTS[index]
    padded = token.to_bytes(PIECE_BYTES, "big")
    piece = padded.rstrip(b"\xff")
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"token id {token} is out of vocabulary") from error


def is_token(token: int) -> bool:
    """Whether ``token`` is in the vocabulary."""
    try:
        token_text(token)
    except ValueError:
        return False
    return True


def pack(piece: bytes) -> int:
    """The id of a piece of one to four bytes."""
    return int.from_bytes(piece.ljust(PIECE_BYTES, b"\xff"), "big")


@lru_cache(maxsize=65536)
def _pieces(word: str) -> Sequence[int]:
    encoded = word.encode("utf-8", "replace")
    if len(encoded) == len(word):
        return tuple(pack(encoded[start : start + PIECE_BYTES]) for start in range(0, len(encoded), PIECE_BYTES))
    ids: list[int] = []
    piece = b""
    for character in word:
        more = character.encode("utf-8", "replace")
        if len(piece) + len(more) > PIECE_BYTES:
            ids.append(pack(piece))
            piece = b""
        piece += more
    ids.append(pack(piece))
    return tuple(ids)
