from __future__ import annotations

import json
from typing import Any

import pytest

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
