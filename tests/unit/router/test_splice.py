from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from kvloop_router import splice
from kvloop_router.splice import Stripped, UnreadableAnswer, strip

HANDLE = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[3, 4]],
    "remote_engine_id": "9f1c",
    "remote_request_id": "chatcmpl-1-aa",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 60,
    "remote_blocks_expiry_time": 12.5,
}

TOP_NAMES = {"kv_transfer_params", "prompt_token_ids"}
CHOICE_NAMES = {"token_ids", "prompt_token_ids"}


def without_own_keys(answer: Any, *, keep_token_ids: bool) -> Any:
    """What stripping means, said on values instead of bytes."""
    if not isinstance(answer, dict):
        return answer
    kept = {name: value for name, value in answer.items() if name not in TOP_NAMES}
    if keep_token_ids and "prompt_token_ids" in answer:
        kept["prompt_token_ids"] = answer["prompt_token_ids"]
    if isinstance(response := kept.get("response"), dict):
        kept["response"] = {name: value for name, value in response.items() if name != "kv_transfer_params"}
    if isinstance(choices := kept.get("choices"), list) and not keep_token_ids:
        kept["choices"] = [
            {name: value for name, value in choice.items() if name not in CHOICE_NAMES}
            if isinstance(choice, dict)
            else choice
            for choice in choices
        ]
    return kept


def is_subsequence(part: bytes, whole: bytes) -> bool:
    remaining = iter(whole)
    return all(byte in remaining for byte in part)


# --- whole answers and events as vLLM writes them


def test_a_whole_answer_loses_its_handle_and_its_token_ids() -> None:
    body = (
        b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},'
        b'"finish_reason":"stop","stop_reason":null,"token_ids":[7,8]}],"usage":{"prompt_tokens":3},'
        b'"prompt_logprobs":null,"prompt_token_ids":[1,2,3],"kv_transfer_params":' + json.dumps(HANDLE).encode() + b"}"
    )

    assert strip(body, keep_token_ids=False) == Stripped(
        data=(
            b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},'
            b'"finish_reason":"stop","stop_reason":null}],"usage":{"prompt_tokens":3},"prompt_logprobs":null}'
        ),
        handle=HANDLE,
        prompt_token_ids=[1, 2, 3],
        token_ids={0: [7, 8]},
        finish_reasons={0: "stop"},
        has_content=True,
    )


def test_a_client_that_asked_for_token_ids_keeps_them() -> None:
    body = b'{"choices":[{"index":0,"text":"a","token_ids":[7]}],"prompt_token_ids":[1],"kv_transfer_params":{"a":1}}'

    stripped = strip(body, keep_token_ids=True)

    assert stripped.data == b'{"choices":[{"index":0,"text":"a","token_ids":[7]}],"prompt_token_ids":[1]}'
    assert stripped.handle == {"a": 1}
    assert stripped.token_ids == {0: [7]}
    assert stripped.prompt_token_ids == [1]


def test_the_first_chat_chunk_gives_the_prompt_and_is_no_content() -> None:
    event = (
        b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        b'"finish_reason":null}],"model":"m","prompt_token_ids":[1,2]}\n\n'
    )

    stripped = strip(event, keep_token_ids=False)

    assert stripped.data == event.replace(b',"prompt_token_ids":[1,2]', b"")
    assert stripped.prompt_token_ids == [1, 2]
    assert not stripped.has_content


def test_the_first_completion_chunk_has_the_prompt_in_its_choice() -> None:
    event = (
        b'data: {"id":"c","choices":[{"index":0,"text":"a","finish_reason":null,"prompt_token_ids":[1,2],'
        b'"token_ids":[3]}]}\n\n'
    )

    stripped = strip(event, keep_token_ids=False)

    assert stripped.data == b'data: {"id":"c","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
    assert stripped.prompt_token_ids == [1, 2]
    assert stripped.token_ids == {0: [3]}


_IDS = b",".join(b"%d" % number for number in range(2000))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b'{"choices":[],"prompt_token_ids":[I]}', id="chat"),
        pytest.param(b'{"choices":[{"index":0,"text":"a","prompt_token_ids":[I],"token_ids":[3]}]}', id="completion"),
        pytest.param(b'{"prompt_token_ids":[I],"choices":[]}', id="at the beginning"),
        pytest.param(b'{"choices":[],"metadata":{"x":1,"prompt_token_ids":[I]}}', id="of something else"),
        pytest.param(b'{"choices":[{"index":0,"prompt_token_ids":[1]}],"prompt_token_ids":[I]}', id="twice"),
        pytest.param(b'{"choices":[],"prompt_token_ids":[I],"prompt\\u005ftoken_ids":[1]}', id="under two spellings"),
        pytest.param(b'{"choices":[],"prompt_token_ids":[I,x]}', id="not ids"),
        pytest.param(b'{"choices":[{"index":0,"text":",\\"prompt_token_ids\\":[I]"}]}', id="in a text"),
        pytest.param(b'{"choices":[],"prompt_token_ids":[I],"kv_transfer_params":{"a":"b"}}', id="with a handle"),
    ],
)
@pytest.mark.parametrize("frame", [b"%b", b"data: %b\n\n"])
def test_many_ids_that_are_not_read_are_cut_out_like_few(
    text: bytes, frame: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = frame % text.replace(b"I", _IDS)

    def outcome() -> tuple[Any, ...] | type[UnreadableAnswer]:
        try:
            part = strip(payload, keep_token_ids=False)
        except UnreadableAnswer as error:
            return type(error)
        ids = part.prompt_token_ids
        return part.data, part.handle, None if ids is None else list(ids), part.token_ids, part.has_content

    quick = outcome()
    monkeypatch.setattr(splice, "_LONG", 1_000_000)

    assert quick == outcome()


def test_a_content_chunk_loses_its_token_ids_only() -> None:
    event = b'data: {"choices":[{"index":1,"delta":{"content":"x"},"finish_reason":null,"token_ids":[9]}]}\n\n'

    stripped = strip(event, keep_token_ids=False)

    assert stripped == Stripped(
        data=b'data: {"choices":[{"index":1,"delta":{"content":"x"},"finish_reason":null}]}\n\n',
        token_ids={1: [9]},
        has_content=True,
    )


@pytest.mark.parametrize("ids", [b"null", b"[9]", b"[]"])
@pytest.mark.parametrize("first", [True, False], ids=["ids first", "handle first"])
def test_a_chunk_that_says_that_it_has_no_handle_loses_that_too(ids: bytes, first: bool) -> None:
    """As vLLM writes them from 0.33 on, whichever order the members have."""
    choices = (
        b'"choices":[{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null,"token_ids":%b}]' % ids
    )
    members = [b'"id":"c"', choices, b'"kv_transfer_params":null', b'"usage":null']
    members = members if first else [members[0], members[2], members[1], members[3]]

    stripped = strip(b"data: {" + b",".join(members) + b"}\n\n", keep_token_ids=False)

    assert stripped.data == (
        b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null}],'
        b'"usage":null}\n\n'
    )
    assert stripped.handle is None
    assert stripped.token_ids == ({} if ids == b"null" else {0: json.loads(ids)})


def test_what_says_null_elsewhere_is_no_handle_of_the_answers_own() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"a":1,"kv_transfer_params":null},"b":2,"token_ids":[9]}],"c":3}\n\n'

    assert strip(event, keep_token_ids=False).data == event.replace(b',"token_ids":[9]', b"")


def test_the_finish_chunk_gives_the_handle() -> None:
    event = (
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length","token_ids":[]}],"kv_transfer_params":'
        + json.dumps(HANDLE).encode()
        + b"}\r\n\r\n"
    )

    stripped = strip(event, keep_token_ids=False)

    assert stripped.data == b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\r\n\r\n'
    assert stripped.handle == HANDLE
    assert stripped.finish_reasons == {0: "length"}
    assert stripped.token_ids == {0: []}


def test_a_responses_event_holds_the_handle_in_its_response() -> None:
    event = (
        b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r","kv_transfer_params":'
        b'{"remote_port":1},"metadata":{"kv_transfer_params":"mine"}}}\n\n'
    )

    stripped = strip(event, keep_token_ids=False)

    assert stripped.data == (
        b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r",'
        b'"metadata":{"kv_transfer_params":"mine"}}}\n\n'
    )
    assert stripped.handle == {"remote_port": 1}


@pytest.mark.parametrize(
    "payload",
    [
        b"data: [DONE]\n\n",
        b": kv_transfer_params\n\n",
        b'data: {"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n',
        b"retry: 10\n\n",
        b"\n\n",
        b"",
        b"not json at all",
        b"data: {\n\n",
        b'["kv_transfer_params"]',
        b'{"choices":null,"response":null,"token_ids":[1]}',
        b'{"choices":[null,[{"token_ids":[1]}],"token_ids"],"response":["kv_transfer_params"]}',
    ],
)
def test_what_holds_nothing_of_ours_is_forwarded_as_it_came(payload: bytes) -> None:
    assert strip(payload, keep_token_ids=False) == Stripped(payload)


def test_names_in_nested_content_and_in_strings_stay() -> None:
    body = json.dumps(
        {
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "content": 'say "kv_transfer_params": {"a": 1}, "token_ids":[1]',
                        "tool_calls": [{"function": {"arguments": '{"token_ids":[1]}'}, "kv_transfer_params": {}}],
                        "token_ids": [4],
                    },
                }
            ],
            "metadata": {"prompt_token_ids": [5]},
        }
    ).encode()

    stripped = strip(body, keep_token_ids=False)

    assert stripped.data == body
    assert stripped.handle is None
    assert stripped.token_ids == {}


def test_an_escaped_name_is_the_same_name() -> None:
    body = rb'{"a":1,"kv_transfer\u005fparams":{"remote_port":1},"choices":[{"\u0074oken_ids":[1]}]}'

    stripped = strip(body, keep_token_ids=False)

    assert stripped.data == b'{"a":1,"choices":[{}]}'
    assert stripped.handle == {"remote_port": 1}
    assert stripped.token_ids == {0: [1]}


def test_an_escaped_name_is_found_beside_plain_ones() -> None:
    body = rb'{"kv_transfer\u005fparams":{},"choices":[{"index":0,"token_ids":[1]},{"index":1,"\u0074oken_ids":[2]}]}'

    stripped = strip(body, keep_token_ids=False)

    assert stripped.data == b'{"choices":[{"index":0},{"index":1}]}'
    assert stripped.token_ids == {0: [1], 1: [2]}


def test_of_members_with_one_name_all_go_and_the_last_counts() -> None:
    body = (
        b'{"kv_transfer_params":{"a":1},"b":2,"kv_transfer_params":{"a":3},"choices":[{"token_ids":[1]}],"choices":[]}'
    )

    stripped = strip(body, keep_token_ids=False)

    assert stripped.data == b'{"b":2,"choices":[{}],"choices":[]}'
    assert stripped.handle == {"a": 3}
    assert stripped.token_ids == {}


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b'{"kv_transfer_params":null}', b"{}"),
        (b'{ "kv_transfer_params" : {} }', b"{  }"),
        (b'{"kv_transfer_params":1, "b":2}', b'{"b":2}'),
        (b'{"b":2 , "kv_transfer_params":1 }', b'{"b":2 }'),
        (b'{"a":1,"kv_transfer_params":2,"prompt_token_ids":null,"b":3}', b'{"a":1,"b":3}'),
        (b'\n {"kv_transfer_params":1,"prompt_token_ids":[]}\n', b"\n {}\n"),
        ('{"é":"ü","kv_transfer_params":{"h":"ß"},"ö":1}'.encode(), '{"é":"ü","ö":1}'.encode()),
        (b'{"n":NaN,"kv_transfer_params":{},"s":"\\ud800"}', b'{"n":NaN,"s":"\\ud800"}'),
    ],
)
def test_the_cut_leaves_valid_json_wherever_the_member_stood(body: bytes, data: bytes) -> None:
    assert strip(body, keep_token_ids=False).data == data


def test_a_handle_keeps_its_characters() -> None:
    assert strip('{"kv_transfer_params":{"remote_host":"hôte"}}'.encode(), keep_token_ids=False).handle == {
        "remote_host": "hôte"
    }


@pytest.mark.parametrize(
    "payload",
    [
        b'data: {"kv_transfer_params":{"remote_port":5600}\n\n',
        b'{"kv_transfer_params":{"remote_port":5600}',
        b'{"kv_transfer_params":{"remote_port":5600}} {}',
        b'data: {"a":1}\ndata: {"kv_transfer_params":{"remote_port":5600}}\n\n',
        b"data: kv_transfer_params 5600\n\n",
        rb'{"kv_transfer\u005Fparams":5600',
        b'data: {"choices":[{"token_ids":[5600]\n\n',
        b'{"a":' + b"[" * 100_000 + b'"kv_transfer_params 5600"' + b"]" * 100_000 + b"}",
        b'{"a":"\xff5600","kv_transfer_params":1,}',
    ],
)
def test_what_may_hold_a_handle_and_cannot_be_read_is_refused(payload: bytes) -> None:
    with pytest.raises(UnreadableAnswer) as refusal:
        strip(payload, keep_token_ids=False)

    assert "5600" not in str(refusal.value)


def test_control_characters_alone_do_not_make_a_broken_chunk_suspect() -> None:
    assert strip(rb'data: {"a":"\u0001' + b"\n\n", keep_token_ids=False).data == rb'data: {"a":"\u0001' + b"\n\n"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"text": ""}, False),
        ({"text": "a"}, True),
        ({"delta": {}}, False),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"content": None}}, False),
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"reasoning": "a"}}, True),
        ({"delta": {"reasoning_content": "a"}}, True),
        ({"delta": {"tool_calls": []}}, False),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"message": {"content": "a"}}, True),
        ({"message": {"role": "assistant", "content": None}}, False),
    ],
)
def test_content_is_text_reasoning_or_tool_calls(choice: dict[str, Any], expected: bool) -> None:
    event = b"data: " + json.dumps({"choices": [{"index": 0}, {"index": 1, **choice}]}).encode() + b"\n\n"

    assert strip(event, keep_token_ids=False).has_content is expected


# --- equal to parsing, for any answer

own_names = st.sampled_from(["kv_transfer_params", "prompt_token_ids", "token_ids"])
names = st.one_of(own_names, st.sampled_from(["choices", "response", "index", "delta", "a", "é", 'q"', "\\", "\x00"]))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**40),
    st.floats(allow_nan=False),
    st.sampled_from(["", "kv_transfer_params", ',"token_ids":[1]', "é\u2028\U0001f600", '"', "\\", "\n\x01"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.lists(st.integers(0, 2**18), max_size=3),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4)),
    max_leaves=10,
)
choices = st.lists(st.one_of(values, st.dictionaries(names, values, max_size=5)), max_size=3)
answers = st.dictionaries(names, values, max_size=5).flatmap(
    lambda answer: st.fixed_dictionaries(
        {}, optional={"choices": choices, "response": st.dictionaries(names, values, max_size=4)}
    ).map(lambda more: {**answer, **more})
)


@st.composite
def written(draw: st.DrawFn, value: Any, newline: str = "\n") -> str:
    """``value`` as JSON with spaces, escapes and repeated members wherever JSON allows them."""

    def space() -> str:
        return draw(st.sampled_from(["", "", "", " ", newline, "\t "]))

    def string(text: str) -> str:
        style = draw(st.sampled_from(["ascii", "unicode", "escaped"]))
        if style == "escaped" and text.isascii():
            return '"' + "".join(f"\\u{ord(c):04x}" for c in text) + '"'
        return json.dumps(text, ensure_ascii=style == "ascii")

    def write(value: Any) -> str:
        if isinstance(value, dict):
            members = list(value.items())
            repeated: bool = draw(st.booleans())
            if members and repeated:
                members.insert(0, (members[-1][0], draw(leaves)))
            inner = (space() + string(k) + space() + ":" + space() + write(v) + space() for k, v in members)
            return "{" + (",".join(inner) or space()) + "}"
        if isinstance(value, list):
            return "[" + (",".join(space() + write(v) + space() for v in value) or space()) + "]"
        return string(value) if isinstance(value, str) else json.dumps(value)

    return space() + write(value) + space()


compact_or_not = answers.flatmap(
    lambda answer: st.one_of(
        st.just(json.dumps(answer, separators=(",", ":"))),
        st.just(json.dumps(answer, ensure_ascii=False)),
        written(answer),
    )
)


@settings(max_examples=400)
@given(text=compact_or_not, keep=st.booleans())
def test_a_stripped_body_parses_to_the_answer_without_the_keys(text: str, keep: bool) -> None:
    body = text.encode()

    stripped = strip(body, keep_token_ids=keep)

    assert json.loads(stripped.data) == without_own_keys(json.loads(body), keep_token_ids=keep)
    assert is_subsequence(stripped.data, body)


@settings(max_examples=400)
@given(
    text=compact_or_not,
    keep=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    space=st.sampled_from(["", " "]),
    before=st.sampled_from(["", ": kv_transfer_params\n", "event: e\n", "id: token_ids\r\n"]),
)
def test_an_event_of_several_data_lines_is_stripped_like_its_data(
    text: str, keep: bool, end: str, space: str, before: str
) -> None:
    lines = text.split("\n")
    event = before + "".join(f"data:{space}{line}{end}" for line in lines) + end

    stripped = strip(event.encode(), keep_token_ids=keep).data.decode()

    assert stripped.startswith(before)
    assert stripped.endswith(end * 2)
    fields = stripped.removeprefix(before).split(end)
    assert [line[: len("data:" + space)] for line in fields[:-2]] == ["data:" + space] * len(lines)
    data = "\n".join(line.removeprefix("data:" + space) for line in fields[:-2])
    assert json.loads(data) == without_own_keys(json.loads(text), keep_token_ids=keep)
    assert is_subsequence(stripped.encode(), event.encode())


@settings(max_examples=300)
@given(answer=answers)
def test_what_was_cut_is_what_was_found(answer: dict[str, Any]) -> None:
    stripped = strip(json.dumps(answer).encode(), keep_token_ids=False)

    handle = answer.get("kv_transfer_params")
    if handle is None and isinstance(answer.get("response"), dict):
        handle = answer["response"].get("kv_transfer_params")
    assert stripped.handle == (handle if isinstance(handle, dict) else None)
    listed = answer.get("choices")
    assert len(stripped.token_ids) <= len(listed if isinstance(listed, list) else [])
    assert all(isinstance(ids, list) for ids in stripped.token_ids.values())


@settings(max_examples=300)
@given(answer=answers, cut=st.floats(0, 1, exclude_max=True))
def test_a_body_cut_short_is_refused_or_names_nothing_of_ours(answer: dict[str, Any], cut: float) -> None:
    whole = json.dumps(answer).encode()
    body = whole[: int(len(whole) * cut)]

    try:
        stripped = strip(body, keep_token_ids=False)
    except UnreadableAnswer:
        assert b"token_ids" in body or b"kv_transfer_params" in body
    else:
        assert stripped.data == body
        assert b"kv_transfer_params" not in body
