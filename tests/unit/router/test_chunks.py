"""The chunk in the middle of a stream, known by its bytes, gives what parsing it gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from kvloop_router.chunks import Alike, plain
from kvloop_router.splice import Stripped, strip

WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(['"token_ids":[1]', ',"kv_transfer_params":null}', '"finish_reason":"stop"', "\\", "\u0000", "ü"]),
)
NULLS = ("stop_reason", "prompt_logprobs", "usage", "system_fingerprint", "metrics", "x")


def event(value: Any, *, ascii_only: bool = True) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=ascii_only).encode() + b"\n\n"


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    """Chunks as vLLM writes them, and such as differ from them in one thing or another."""

    def some(*members: tuple[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in members if draw(st.booleans())}

    ids = draw(st.one_of(st.none(), st.lists(st.integers(0, 200_000), max_size=3)))
    text = draw(WORDS)
    delta = draw(st.sampled_from([{"content": text}, {"role": "assistant", "content": text}, {"reasoning": text}]))
    choice = {
        "index": draw(st.sampled_from([0, 0, 0, 1])),
        **draw(st.sampled_from([{"delta": delta}, {"text": text}])),
        **some(("logprobs", None)),
        "finish_reason": draw(st.sampled_from([None, None, None, "stop"])),
        **some(("stop_reason", None), ("prompt_token_ids", None), ("token_ids", ids)),
    }
    choices = draw(st.sampled_from([[choice], [choice], [choice, choice], []]))
    nulls = [(name, None) for name in draw(st.permutations(NULLS))[:2]]
    rest = some(*nulls[:1], ("prompt_token_ids", None), *nulls[1:], ("kv_transfer_params", None))
    head = {"id": draw(WORDS), "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event({**head, "choices": choices, **rest}, ascii_only=draw(st.booleans()))


@settings(max_examples=400)
@given(data=st.lists(chunks(), min_size=1, max_size=3), keep=st.booleans())
def test_what_is_taken_for_plain_is_what_parsing_finds(data: list[bytes], keep: bool) -> None:
    found = plain(b"".join(data), keep_token_ids=keep)
    parsed = [strip(one, keep_token_ids=keep) for one in data]
    if found is None:
        return
    assert found.data == b"".join(part.data for part in parsed)
    assert found.token_ids == [number for part in parsed for number in part.token_ids.get(0, ())]
    assert found.has_content == any(part.has_content for part in parsed)
    assert not any(part.finish_reasons or part.handle or part.prompt_token_ids for part in parsed)


COMMON = '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
SHAPES = (
    '"delta":{"content":TEXT},"logprobs":null,"finish_reason":null,"token_ids":null}],"kv_transfer_params":null}',
    '"delta":{"content":TEXT},"logprobs":null,"finish_reason":null,"token_ids":IDS}],"kv_transfer_params":null}',
    '"delta":{"reasoning":TEXT},"logprobs":null,"finish_reason":null}]}',
    '"text":TEXT,"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":IDS}],"usage":null}',
)
LISTS = st.sampled_from(
    ["[]", "[7]", "[12,3456]", "[07]", "[1,,2]", "[,]", "[1", "null", "[1.5]", "[99999999999999999999]"]
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Chunks of one stream, some of which are broken, or two that came at once."""
    shape = draw(st.sampled_from(SHAPES))
    told = []
    for text, ids, ascii_only in draw(st.lists(st.tuples(WORDS, LISTS, st.booleans()), min_size=2, max_size=6)):
        rest = shape.replace("TEXT", json.dumps(text, ensure_ascii=ascii_only)).replace("IDS", ids)
        told.append(f"data: {COMMON}{rest}\n\n".encode())
    where, what = (
        draw(st.integers(0, len(told) - 1)),
        draw(st.sampled_from([b"", b'"', b"\n", b"\\", b"\x01", b"]", b"1"])),
    )
    at = draw(st.integers(0, len(told[where])))
    told[where] = told[where][:at] + what + told[where][at + draw(st.integers(0, 2)) :]
    return [*told, *told[:2], b"".join(told[:2])]


@settings(max_examples=400)
@given(stream=streams(), keep=st.booleans())
def test_a_chunk_like_the_one_before_is_known_for_what_it_is(stream: list[bytes], keep: bool) -> None:
    alike = Alike(keep_token_ids=keep)
    for data in stream:
        assert alike.plain(data) == plain(data, keep_token_ids=keep)


@pytest.mark.parametrize(
    "rest",
    [
        '"delta":{"content":"x"},"logprobs":null,"finish_reason":null,"token_ids":null}],"kv_transfer_params":null}',
        '"delta":{"content":"\\u00fc\\n"},"logprobs":null,"finish_reason":null,"token_ids":[1,22]}],"kv_transfer_params":null}',
        '"delta":{"reasoning":"x"},"logprobs":null,"finish_reason":null}]}',
        '"text":"x","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[3]}],"usage":null}',
    ],
)
def test_the_chunks_of_each_version_are_known(rest: str) -> None:
    data = f"data: {COMMON}{rest}\n\n".encode()
    found = plain(data, keep_token_ids=False)
    assert found is not None
    assert found.data == strip(data, keep_token_ids=False).data
    assert b"token_ids" not in found.data
    assert b"kv_transfer_params" not in found.data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"data: [DONE]\n\n",
        f'data: {COMMON}"delta":{{"content":"x"}},"finish_reason":"stop"}}]}}\n\n'.encode(),
        f'data: {COMMON}"delta":{{"content":"x"}},"finish_reason":null}}],"kv_transfer_params":{{}}}}\n\n'.encode(),
        f'data: {COMMON}"delta":{{"content":"x"}},"finish_reason":null}}]}}\n'.encode(),
        f'data: {COMMON}"delta":{{"content":"x"}},"finish_reason":null}}]}}\n\ndata: {{"id"'.encode(),
    ],
)
def test_an_end_a_handle_or_half_an_event_is_not_plain(data: bytes) -> None:
    assert plain(data, keep_token_ids=False) is None


def test_stripped_text_is_content() -> None:
    data = f'data: {COMMON}"delta":{{"content":"x"}},"finish_reason":null}}]}}\n\n'.encode()
    assert strip(data, keep_token_ids=False) == Stripped(data, has_content=True)
