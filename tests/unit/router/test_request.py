"""What a client may send, before anything of it reaches an engine."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from kvloop_router.errors import RequestError
from kvloop_router.request import Api, Request, parse, too_long

MODELS = frozenset({"tiny"})
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION = {"model": "tiny", "prompt": "Hello"}


def parsed(body: Any, api: Api = Api.CHAT, conversation: str | None = None) -> Request:
    return parse(api, orjson.dumps(body), conversation=conversation, models=MODELS)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        pytest.param({**CHAT, "kv_transfer_params": {}}, 400, "kv_transfer_params", id="a handle"),
        pytest.param({**CHAT, "kv_transfer_params": None}, 400, "kv_transfer_params", id="an empty handle"),
        pytest.param({**CHAT, "ec_transfer_params": {}}, 400, "ec_transfer_params", id="an encoder handle"),
        pytest.param(
            {**CHAT, "vllm_xargs": {"kv_transfer_params": "x"}},
            400,
            "vllm_xargs.kv_transfer_params",
            id="a handle by another way",
        ),
        pytest.param({**CHAT, "vllm_xargs": 1}, 400, "vllm_xargs", id="extra arguments that are none"),
        pytest.param({"messages": CHAT["messages"]}, 400, "model", id="no model"),
        pytest.param({**CHAT, "model": None}, 400, "model", id="a null model"),
        pytest.param({**CHAT, "model": 1}, 400, "model", id="a model that is a number"),
        pytest.param({**CHAT, "model": "other"}, 404, "model", id="an unknown model"),
        pytest.param({"model": "tiny"}, 400, "messages", id="no messages"),
        pytest.param({**CHAT, "messages": []}, 400, "messages", id="empty messages"),
        pytest.param({**CHAT, "messages": "Hello"}, 400, "messages", id="messages that are text"),
        pytest.param({**CHAT, "messages": ["Hello"]}, 400, "messages[0]", id="a message that is text"),
        pytest.param({**CHAT, "messages": [{"content": "x"}]}, 400, "messages[0]", id="a message of nobody"),
        pytest.param({**CHAT, "stream": "yes"}, 400, "stream", id="stream as text"),
        pytest.param({**CHAT, "n": 0}, 400, "n", id="no answers"),
        pytest.param({**CHAT, "n": True}, 400, "n", id="a truth as a number"),
        pytest.param({**CHAT, "max_tokens": "9"}, 400, "max_tokens", id="a number as text"),
        pytest.param({**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens", id="no tokens"),
        pytest.param({**CHAT, "temperature": "hot"}, 400, "temperature", id="a temperature as text"),
        pytest.param({**CHAT, "tools": {}}, 400, "tools", id="tools that are no list"),
        pytest.param({**CHAT, "chat_template_kwargs": []}, 400, "chat_template_kwargs", id="template arguments"),
        pytest.param({**CHAT, "conversation_id": 7}, 400, "conversation_id", id="a conversation that is a number"),
        pytest.param({**CHAT, "stop": [1]}, 400, "stop", id="a stop that is a number"),
    ],
)
def test_bad_chat_requests_name_the_parameter(body: Any, status: int, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parsed(body)

    assert (refused.value.status, refused.value.param) == (status, param)


@pytest.mark.parametrize("prompt", [1, [], {"text": "x"}, [1, "x"], [[]], [-1], [1.5], [True]])
def test_bad_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as refused:
        parsed({**COMPLETION, "prompt": prompt}, Api.COMPLETIONS)

    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'"text"', b"null", b'{"model": "tiny",}', b"\xff\xfe", b'{"model": NaN}', b"[" * 5000],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        parse(Api.CHAT, raw, conversation=None, models=MODELS)

    assert refused.value.status == 400


def test_a_refusal_never_repeats_the_prompt() -> None:
    with pytest.raises(RequestError) as refused:
        parse(Api.CHAT, b'{"messages": "my secret" oops', conversation=None, models=MODELS)

    assert "secret" not in refused.value.message


@pytest.mark.parametrize("prompt", ["text", ["text"], ["a", "b"], [1, 2], [[1, 2], [3]], [[1], "b"]])
def test_good_prompts_are_taken(prompt: Any) -> None:
    assert parsed({**COMPLETION, "prompt": prompt}, Api.COMPLETIONS).body["prompt"] == prompt


def test_unknown_fields_are_the_engines_to_judge() -> None:
    assert parsed({**CHAT, "repetition_detection": {"x": 1}}).body["repetition_detection"] == {"x": 1}


def test_the_conversation_id_is_taken_out_and_the_body_goes_before_the_header() -> None:
    both = parsed({**CHAT, "conversation_id": "from-body"}, conversation="from-header")

    assert both.conversation == "from-body"
    assert "conversation_id" not in both.body
    assert parsed(CHAT, conversation="from-header").conversation == "from-header"
    assert parsed(CHAT).conversation is None


@pytest.mark.parametrize(
    ("api", "extra", "plain"),
    [
        (Api.CHAT, {}, False),
        (Api.CHAT, {"n": 1}, False),
        (Api.CHAT, {"n": 2}, True),
        (Api.CHAT, {"use_beam_search": True}, True),
        (Api.CHAT, {"prompt_logprobs": 0}, True),
        (Api.CHAT, {"echo": True}, True),
        (Api.COMPLETIONS, {}, False),
        (Api.COMPLETIONS, {"best_of": 2}, True),
        (Api.COMPLETIONS, {"echo": True}, True),
        (Api.COMPLETIONS, {"suffix": "x"}, True),
        (Api.COMPLETIONS, {"prompt": ["only one"]}, False),
        (Api.COMPLETIONS, {"prompt": ["a", "b"]}, True),
        (Api.COMPLETIONS, {"prompt": [[1], [2]]}, True),
        (Api.COMPLETIONS, {"prompt": [1, 2]}, False),
    ],
)
def test_requests_for_which_no_kv_can_move_are_plain(api: Api, extra: dict[str, Any], plain: bool) -> None:
    assert parsed({**(CHAT if api is Api.CHAT else COMPLETION), **extra}, api).plain is plain


@pytest.mark.parametrize(
    ("content", "provable"),
    [
        ("text", True),
        (None, True),
        ([{"type": "text", "text": "x"}], True),
        ([{"text": "x"}], True),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], False),
        ([{"type": "text", "text": "x", "image_url": "data:"}], False),
        ([{"type": "something new"}], False),
    ],
)
def test_only_text_can_be_proven_by_its_tokens(content: Any, provable: bool) -> None:
    request = parsed({**CHAT, "messages": [{"role": "user", "content": content}]})

    assert request.provable is provable


def test_a_truncated_prompt_cannot_be_proven() -> None:
    assert not parsed({**CHAT, "truncate_prompt_tokens": 10}).provable


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fits"),
    [(99, None, True), (100, None, False), (90, 10, True), (90, 11, False), (101, 1, False), (1, 100, False)],
)
def test_prompt_and_answer_must_fit_into_the_model(prompt_tokens: int, max_tokens: int | None, fits: bool) -> None:
    fault = too_long(prompt_tokens, max_tokens, 100)

    assert (fault is None) is fits
    assert fault is None or fault.code == "context_length_exceeded"


def test_chats_newer_name_for_the_bound_wins() -> None:
    assert parsed({**CHAT, "max_tokens": 5, "max_completion_tokens": 7}).max_tokens == 7
    assert parsed({**CHAT, "max_tokens": 5}).max_tokens == 5
