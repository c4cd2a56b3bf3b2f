"""Takes KV handles and token ids out of an engine's answer by cutting bytes; all other bytes stay as they came.

Where an engine puts them (vLLM 0.32.0, ``entrypoints/openai``): ``kv_transfer_params`` at the top
(``chat_completion/serving.py:1203``, ``completion/serving.py:649``) or, in events of ``/v1/responses``, in
``response``;
``prompt_token_ids`` at the top for chat and in each choice for completions; ``token_ids`` in each choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import orjson

from kvloop_router import sse
from kvloop_router.token_ids import TokenIds, is_array

_HANDLE = "kv_transfer_params"
_PROMPT_TOKEN_IDS = "prompt_token_ids"  # noqa: S105
_TOKEN_IDS = "token_ids"  # noqa: S105
_CONTENT_KEYS = ("content", "reasoning", "reasoning_content", "tool_calls", "function_call", "refusal", "audio")

_ESCAPE = rb"\u00"
_ESCAPED_ASCII = re.compile(rb"\\u00([0-7][0-9a-fA-F])")
_JSON_SPACE = b" \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
_COMPACT_TOKEN_IDS = re.compile(rb',"token_ids":(?:\[[0-9,]*\]|null)')
_COMPACT_PROMPT_TOKEN_IDS = re.compile(rb',"prompt_token_ids":(?:\[[0-9,]*\]|null)')
_BEFORE_HANDLE = b',"kv_transfer_params":'
_BEFORE_PROMPT = b',"prompt_token_ids":'
_LONG = 4096
"""In fewer bytes no prompt's ids are that are worth looking for."""

_decode_value = json.JSONDecoder().raw_decode

Span = tuple[int, int]


class UnreadableAnswer(ValueError):
    """An answer that names a handle or token ids and cannot be read, so that they cannot be cut out.

    It must not be forwarded. The message never holds any of it.
    """

    def __init__(self) -> None:
        super().__init__("the engine's answer is not valid JSON and may hold a KV handle")


@dataclass(frozen=True, slots=True)
class Stripped:
    """An answer, or one event of it, as the client may see it, and what was in it.

    data: what to forward.
    handle: the KV handle, as the engine gave it.
    prompt_token_ids: of the first choice that has them.
    token_ids, finish_reasons: by choice index, where the choice has any.
    has_content: whether a choice holds text, reasoning or tool calls that are not empty.
    """

    data: bytes
    handle: Mapping[str, Any] | None = None
    prompt_token_ids: Sequence[int] | None = None
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    has_content: bool = False


def strip(payload: bytes, *, keep_token_ids: bool) -> Stripped:
    """Take the handle, and unless ``keep_token_ids`` the token ids, out of an event or of a whole JSON body.

    Raises UnreadableAnswer.
    """
    if len(payload) >= _LONG and not keep_token_ids and (found := _without_prompts_ids(payload)) is not None:
        return found
    lines = [(0, len(payload))] if payload.lstrip(_JSON_SPACE)[:1] in (b"{", b"[") else sse.data_spans(payload)
    text = b"\n".join([payload[start:end] for start, end in lines])
    mentioned = _mentions_own_key(text)
    try:
        answer = _parse(text)
        cuts = _cuts(text, answer, keep_token_ids=keep_token_ids) if mentioned else ()
    except (ValueError, RecursionError):
        if mentioned:
            raise UnreadableAnswer from None
        return Stripped(payload)
    return _described(_without(payload, lines, cuts) if cuts else payload, answer)


def _without_prompts_ids(payload: bytes) -> Stripped | None:
    """What ``strip`` gives of what has a prompt's ids once, in one piece, and where they are to be cut out; they are
    not read. None of what is otherwise.

    In a JSON text the bytes of ``_BEFORE_PROMPT`` are a key wherever they stand: within a string its quotes would be
    escaped.
    """
    start = payload.find(_BEFORE_PROMPT) + len(_BEFORE_PROMPT)
    end = payload.find(b"]", start) + 1
    if start < len(_BEFORE_PROMPT) or not is_array(written := payload[start:end]):
        return None
    rest = payload[:start] + b"null" + payload[end:]
    if rest.count(b"prompt_token_ids") != 1:
        return None
    part = strip(rest, keep_token_ids=False)
    if part.prompt_token_ids is not None or b"prompt_token_ids" in part.data:
        # There is another one under an escaped name, or this is part of something else.
        return None
    return replace(part, prompt_token_ids=TokenIds(written))


def _mentions_own_key(text: bytes) -> bool:
    if b"token_ids" in text or b"kv_transfer_params" in text:
        return True
    if _ESCAPE not in text:
        return False
    plain = _ESCAPED_ASCII.sub(lambda escape: bytes.fromhex(escape[1].decode()), text)
    return b"token_ids" in plain or b"kv_transfer_params" in plain


def _parse(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        # Takes what some writers of JSON produce and orjson refuses, such as NaN and lone surrogates.
        return json.loads(text)


def _described(data: bytes, answer: Any) -> Stripped:
    if not isinstance(answer, dict):
        return Stripped(data)
    handle = answer.get(_HANDLE)
    if handle is None and isinstance(response := answer.get("response"), dict):
        handle = response.get(_HANDLE)
    prompt_token_ids = answer.get(_PROMPT_TOKEN_IDS)
    token_ids = {}
    finish_reasons = {}
    has_content = False
    for index, choice in _choices(answer):
        if prompt_token_ids is None:
            prompt_token_ids = choice.get(_PROMPT_TOKEN_IDS)
        if isinstance(ids := choice.get(_TOKEN_IDS), list):
            token_ids[index] = ids
        if isinstance(reason := choice.get("finish_reason"), str):
            finish_reasons[index] = reason
        has_content = has_content or _has_content(choice)
    return Stripped(
        data,
        handle=handle if isinstance(handle, dict) else None,
        prompt_token_ids=prompt_token_ids if isinstance(prompt_token_ids, list) else None,
        token_ids=token_ids,
        finish_reasons=finish_reasons,
        has_content=has_content,
    )


def _choices(answer: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    choices = answer.get("choices")
    for position, choice in enumerate(choices if isinstance(choices, list) else ()):
        if isinstance(choice, dict):
            index = choice.get("index")
            yield index if type(index) is int else position, choice


def _has_content(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    message = choice.get("delta") or choice.get("message")
    return isinstance(message, dict) and any(message.get(key) for key in _CONTENT_KEYS)


class _Member(NamedTuple):
    """A member of an object: its name, and where the name starts and the value starts and ends."""

    name: str
    start: int
    value: int
    end: int


def _cuts(text: bytes, answer: Any, *, keep_token_ids: bool) -> Sequence[Span]:
    """What to cut from ``text``, a JSON text whose value is ``answer``, in order."""
    if not isinstance(answer, dict):
        return ()
    if not keep_token_ids and (spans := _chunks_cuts(text, answer)):
        return spans
    return list(_walked_cuts(text.decode("latin-1"), keep_token_ids=keep_token_ids))


def _chunks_cuts(text: bytes, answer: dict[str, Any]) -> Sequence[Span]:
    """The cuts of a chunk within a stream, found without a walk; empty where there may be others.

    From vLLM 0.33 on each chunk says that it has no handle, and whether it has token ids. Where a key is there, nothing
    in the text is escaped, and the key's name occurs once: there it is.
    """
    if _ESCAPE in text:
        return ()
    spans = []
    of_prompt = text.count(b"prompt_token_ids")
    of_answer = text.count(b"token_ids") - of_prompt
    choices = [answer, *(choice for _, choice in _choices(answer))]
    for name, compact, count, places in (
        (_PROMPT_TOKEN_IDS, _COMPACT_PROMPT_TOKEN_IDS, of_prompt, choices),
        (_TOKEN_IDS, _COMPACT_TOKEN_IDS, of_answer, choices[1:]),
    ):
        if count:
            found = compact.search(text)
            if not found or count != 1 or not any(name in place for place in places):
                return ()
            spans.append(found.span())
    if b"kv_transfer_params" in text:
        start = text.find(_BEFORE_HANDLE)
        if start < 0 or text.count(b"kv_transfer_params") != 1 or _HANDLE not in answer:
            return ()
        # What is read back to the same bytes ends where they end.
        value, at = orjson.dumps(answer[_HANDLE]), start + len(_BEFORE_HANDLE)
        if not text.startswith(value, at) or text[at + len(value)] not in b",}":
            return ()
        spans.append((start, at + len(value)))
    return sorted(spans)


def _walked_cuts(text: str, *, keep_token_ids: bool) -> Iterator[Span]:
    """What to cut from the text of an object.

    ``text`` is decoded as Latin-1: a position is then that of the byte, and JSON's own characters are ASCII.
    """
    names = {_HANDLE} if keep_token_ids else {_HANDLE, _PROMPT_TOKEN_IDS}
    names_in_choice = set() if keep_token_ids else {_PROMPT_TOKEN_IDS, _TOKEN_IDS}
    members = _members(text, _after_space(text, 0))
    removed = dict(_removals(members, names))
    for member in members:
        if member.start in removed:
            yield removed[member.start]
        elif member.name == "response" and text[member.value] == "{":
            yield from dict(_removals(_members(text, member.value), {_HANDLE})).values()
        elif member.name == "choices" and text[member.value] == "[" and names_in_choice:
            for choice in _elements(text, member.value):
                if text[choice] == "{":
                    yield from dict(_removals(_members(text, choice), names_in_choice)).values()


def _removals(members: list[_Member], names: set[str]) -> Iterator[tuple[int, Span]]:
    """Start of each member of one of these names, and the span that leaves a valid object when it is cut."""
    follows_kept = False
    for position, member in enumerate(members):
        if member.name not in names:
            follows_kept = True
        elif follows_kept:
            yield member.start, (members[position - 1].end, member.end)
        else:
            end = members[position + 1].start if position + 1 < len(members) else member.end
            yield member.start, (member.start, end)


def _members(text: str, start: int) -> list[_Member]:
    members = []
    at = _after_space(text, start + 1)
    while text[at] != "}":
        name, after_name = _decode_value(text, at)
        value = _after_space(text, _after_space(text, after_name) + len(":"))
        end = _decode_value(text, value)[1]
        members.append(_Member(name, at, value, end))
        at = _after_comma(text, end)
    return members


def _elements(text: str, start: int) -> Iterator[int]:
    at = _after_space(text, start + 1)
    while text[at] != "]":
        yield at
        at = _after_comma(text, _decode_value(text, at)[1])


def _after_comma(text: str, at: int) -> int:
    at = _after_space(text, at)
    return _after_space(text, at + 1) if text[at] == "," else at


def _after_space(text: str, at: int) -> int:
    if text[at] > " ":
        return at
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _without(payload: bytes, lines: Sequence[Span], cuts: Sequence[Span]) -> bytes:
    """``payload`` without ``cuts``, which are positions in its data lines joined by newlines.

    A cut across lines leaves their ends and field names alone: to JSON they are space between two tokens.
    """
    kept = []
    done = 0
    line_at = 0
    for start, end in lines:
        for cut_start, cut_end in cuts:
            first = max(cut_start - line_at, 0) + start
            last = min(cut_end - line_at + start, end)
            if first < last:
                kept.append(payload[done:first])
                done = last
        line_at += end - start + len(b"\n")
    kept.append(payload[done:])
    return b"".join(kept)
