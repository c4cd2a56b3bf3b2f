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
