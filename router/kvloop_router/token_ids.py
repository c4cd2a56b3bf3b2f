"""Token ids as an engine wrote them, in the answer of its tokenizer. Pure.

A long prompt has hundreds of thousands. Where they only go on to other engines, nobody here has to read them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import orjson

_BEFORE = re.compile(rb'\{"count":\d++,"max_model_len":(?P<limit>\d++),"tokens":(?=\[)')
_AFTER = b',"token_strs":null}'
_DIGITS = b"0123456789"


class TokenIds(Sequence[int]):
    """A JSON array of ids, read when one of them is looked at."""

    __slots__ = ("_length", "_numbers", "_written")

    def __init__(self, written: bytes) -> None:
        self._written = written
        self._length = written.count(b",") + 1
        self._numbers: array[int] | None = None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        found = self.numbers[at]
        return found if isinstance(found, int) else found.tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    @property
    def numbers(self) -> array[int]:
        """The ids themselves."""
        if self._numbers is None:
            self._numbers = array("I", orjson.loads(self._written))
        return self._numbers

    @property
    def written(self) -> orjson.Fragment:
        """The same, to be part of a JSON text."""
        return orjson.Fragment(self._written)


def told(answer: bytes) -> tuple[TokenIds, int] | None:
    """The ids, at least one, and the longest prompt in the answer of a tokenizer; None where it is not written as vLLM
    writes it."""
    head = _BEFORE.match(answer)
    if head is None or not answer.endswith(_AFTER):
        return None
    written = answer[head.end() : -len(_AFTER)]
    return (TokenIds(written), int(head["limit"])) if is_array(written) else None


def is_array(written: bytes) -> bool:
    """Whether this is a JSON array of ids, at least one, with no space in it."""
    separators = written.translate(None, _DIGITS)
    if separators != b"[" + b"," * (len(separators) - 2) + b"]":
        return False
    return b",," not in written and not written.startswith((b"[,", b"[]")) and not written.endswith(b",]")


def numbers(token_ids: Sequence[int]) -> array[int]:
    """Ids in one piece of memory, of four bytes each."""
    return token_ids.numbers if isinstance(token_ids, TokenIds) else array("I", token_ids)


def in_json(token_ids: Sequence[int]) -> Any:
    """Ids as a value in what is to be written as JSON."""
    return token_ids.written if isinstance(token_ids, TokenIds) else list(token_ids)
