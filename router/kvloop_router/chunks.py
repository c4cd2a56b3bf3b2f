"""The chunk in the middle of a stream, known by its bytes: some text, no end yet, no handle.

Nearly all events of a stream are of this kind. It is recognised by its whole grammar, as vLLM writes it, so that what
is cut is what parsing would find (``splice``); whatever differs in anything is parsed. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_CHOICE_REST = rb'(?:,"(?:stop_reason|prompt_logprobs)":null)*+'
_REST = rb'(?:,"(?:usage|system_fingerprint|service_tier|prompt_text|metrics)":null)*+'
_PLAIN = re.compile(
    rb'data: \{"id":S,"object":S,"created":\d++,"model":S,"choices":\[\{"index":0,'
    rb'(?:"delta":\{(?:"role":S,)?"(?:content|reasoning|reasoning_content)":(?P<said>S)\}|"text":(?P<text>S))(?:,"logprobs":null)?+'
    rb',"finish_reason":null'
    rb'C(?P<ids>(?:,"prompt_token_ids":null)?+(?:,"token_ids":(?:null|\[(?P<listed>(?:\d++(?:,\d++)*+)?+)\]))?+)C\}\]'
    rb'R(?P<prompt>(?:,"prompt_token_ids":null)?+)R(?P<handle>(?:,"kv_transfer_params":null)?+)R\}\n\n'.replace(
        b"S", _STRING
    )
    .replace(b"C", _CHOICE_REST)
    .replace(b"R", _REST)
)
_IDS, _LISTED, _PROMPT, _HANDLE, _SAID, _TEXT = (
    _PLAIN.groupindex[name] for name in ("ids", "listed", "prompt", "handle", "said", "text")
)
_NOTHING = b'""'
_NOT_AS_IT_IS = bytes([*range(0x20), *b'"\\'])
_LISTED_BYTES = b"0123456789,"


class Plain(NamedTuple):
    """Events of this kind.

    data: what to forward. token_ids: those in them. has_content: whether there is any text in them.
    """

    data: bytes
    token_ids: list[int]
    has_content: bool


def plain(data: bytes, *, keep_token_ids: bool) -> Plain | None:
    """What ``splice.strip`` makes of events all of which are plain; None where one is not, or is not whole."""
    found = _PLAIN.match(data)
    if found is None:
        return None
    if found.end() == len(data):
        return Plain(_cut(data, found, keep_token_ids=keep_token_ids), _token_ids(found), _has_content(found))
    kept, token_ids, has_content = [], [], False
    while found is not None:
        kept.append(_cut(data, found, keep_token_ids=keep_token_ids))
        token_ids += _token_ids(found)
        has_content = has_content or _has_content(found)
        if found.end() == len(data):
            return Plain(b"".join(kept), token_ids, has_content)
        found = _PLAIN.match(data, found.end())
    return None


class Alike:
    """`plain` for what arrives of one stream. Its events are alike but for their text and its ids, so that one that
    differs from the one before in nothing else is known without the grammar.
    """

    __slots__ = ("_after", "_before", "_between", "_keep_token_ids", "_sent")

    def __init__(self, *, keep_token_ids: bool) -> None:
        self._keep_token_ids = keep_token_ids
        # Around the text and the ids, and what is sent after the text. Nothing is known yet.
        self._before = self._between = self._after = self._sent = b""

    def plain(self, data: bytes) -> Plain | None:
        """What `plain` gives."""
        if self._before and data.startswith(self._before) and (found := self._like_the_one_before(data)):
            return found
        match = _PLAIN.match(data)
        if match is None:
            return None
        self._learn(data, match)
        return plain(data, keep_token_ids=self._keep_token_ids)

    def _like_the_one_before(self, data: bytes) -> Plain | None:
        before, between, after = self._before, self._between, self._after
        sent: list[bytes] = []
        token_ids: list[int] = []
        has_content = False
        at, length = 0, len(data)
        while at < length:
            start = at + len(before)
            end = data.find(b'"', start)
            text = data[start:end]
            if (
                end < 0
                or not data.startswith(before, at)
                or not data.startswith(between, end)
                or len(text.translate(None, _NOT_AS_IT_IS)) != len(text)
            ):
                return None
            sent.append(data[at:end])
            has_content = has_content or end > start
            at = end + len(between)
            if after:
                ids_end = data.find(after, at)
                listed = data[at:ids_end]
                if ids_end < 0 or listed.translate(None, _LISTED_BYTES):
                    return None
                try:
                    token_ids += [int(number) for number in listed.split(b",")] if listed else []
                except ValueError:
                    return None
                at = ids_end + len(after)
        sent.append(b"")
        return Plain(self._sent.join(sent), token_ids, has_content)

    def _learn(self, data: bytes, match: re.Match[bytes]) -> None:
        start, end = match.span(_SAID if match[_SAID] else _TEXT)
        listed, after_listed = match.span(_LISTED)
        if listed < 0:
            listed = after_listed = match.end()
        elif self._keep_token_ids:
            self._before = b""
            return
        self._before, self._between = data[: start + 1], data[end - 1 : listed]
        self._after = data[after_listed : match.end()]
        self._sent = _cut(data, match, keep_token_ids=self._keep_token_ids)[end - 1 :]


def _has_content(found: re.Match[bytes]) -> bool:
    return (found[_SAID] or found[_TEXT]) != _NOTHING


def _cut(data: bytes, found: re.Match[bytes], *, keep_token_ids: bool) -> bytes:
    handle, end = found.span(_HANDLE)
    if keep_token_ids:
        return data[found.start() : handle] + data[end : found.end()]
    ids, after_ids = found.span(_IDS)
    prompt, after_prompt = found.span(_PROMPT)
    return data[found.start() : ids] + data[after_ids:prompt] + data[after_prompt:handle] + data[end : found.end()]


def _token_ids(found: re.Match[bytes]) -> list[int]:
    listed = found[_LISTED]
    return [int(number) for number in listed.split(b",")] if listed else []
