"""The bodies that a turn sends to engines."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_connector.handle import COLD_PREFILL_PARAMS, KVHandle
from kvloop_connector.verdict import Outcome
from kvloop_router import legs
from kvloop_router.request import Api, Request

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
HANDLE = KVHandle.parse(
    {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_engine_id": "engine",
        "remote_request_id": "request",
        "remote_host": "127.0.0.2",
        "remote_port": 5600,
        "remote_num_tokens": 70,
        "remote_block_ids": [[4, 5, 6]],
        "remote_blocks_expiry_time": 12.5,
        "a_field_of_the_future": {"x": 1},
    }
)
FROM_PREFILL = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[1]], "tp_size": 8}


def request(extra: dict[str, Any] | None = None, *, api: Api = Api.CHAT) -> Request:
    base = CHAT if api is Api.CHAT else {"model": "tiny", "prompt": "Hello"}
    return Request(api, {**base, **(extra or {})}, "tiny", None, False)


def prefill(extra: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    return legs.prefill(request(extra), **({"handle": None, "token_ids": None, "salt": None} | arguments))


@pytest.mark.parametrize(
    "extra",
    [
        {"max_completion_tokens": 50},
        {"max_tokens": 50},
        {"min_tokens": 5, "max_tokens": 50},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": [1]},
        {"n": 1, "return_token_ids": True},
    ],
)
def test_a_prefill_leg_makes_one_token_and_no_stream(extra: dict[str, Any]) -> None:
    body = prefill(extra)

    assert (body["max_tokens"], body["stream"], body["n"]) == (1, False, 1)
    forbidden = {
        "max_completion_tokens",
        "min_tokens",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
    }
    assert not forbidden & body.keys()


def test_what_decides_the_first_token_goes_to_prefill_too() -> None:
    extra = {"tools": [{"type": "function"}], "tool_choice": "auto", "response_format": {"type": "json_object"}}

    assert extra.items() <= prefill(extra).items()


def test_a_cold_prefill_leg_names_no_remote_blocks() -> None:
    assert prefill({})["kv_transfer_params"] == dict(COLD_PREFILL_PARAMS)


def test_a_handle_goes_to_prefill_with_all_its_fields() -> None:
    assert prefill({}, handle=HANDLE)["kv_transfer_params"] == HANDLE.params


def test_both_legs_get_the_same_token_ids() -> None:
    cold = prefill({}, token_ids=[7, 8])
    decode = legs.decode(request(), params=FROM_PREFILL, token_ids=[7, 8], salt=None)

    assert cold["kv_transfer_params"]["prompt_token_ids"] == [7, 8]
    assert decode["kv_transfer_params"] == {**FROM_PREFILL, "prompt_token_ids": [7, 8]}


def test_a_completions_prompt_becomes_its_token_ids() -> None:
    completion = request(api=Api.COMPLETIONS)

    cold = legs.prefill(completion, handle=None, token_ids=[7, 8], salt=None)

    assert cold["prompt"] == [7, 8]
    assert "prompt_token_ids" not in cold["kv_transfer_params"]


def test_a_decode_leg_sends_on_what_prefill_gave_and_asks_for_token_ids() -> None:
    body = legs.decode(request({"max_completion_tokens": 9}), params=FROM_PREFILL, token_ids=None, salt=None)

    assert body["kv_transfer_params"] == FROM_PREFILL
    assert body["return_token_ids"] is True
    assert body["max_completion_tokens"] == 9


def test_without_parameters_from_prefill_a_decode_leg_has_none() -> None:
    body = legs.decode(request(), params=None, token_ids=[1, 2], salt="salt")

    assert body == {**CHAT, "cache_salt": "salt"}


@pytest.mark.parametrize(
    ("api", "asked"),
    [(Api.CHAT, {"logprobs": True, "top_logprobs": 20}), (Api.COMPLETIONS, {"logprobs": 20})],
)
def test_a_leg_that_is_to_tell_how_likely_tokens_are_asks_in_its_apis_way(api: Api, asked: dict[str, Any]) -> None:
    wanted = {**asked, "return_tokens_as_token_ids": True}
    own = request({"logprobs": None, "include_reasoning": False}, api=api)
    leg = legs.prefill(own, handle=HANDLE, token_ids=None, salt="salt", ask_logprobs=True)

    assert wanted.items() <= leg.items()
    assert leg["kv_transfer_params"] == HANDLE.params
    assert "include_reasoning" not in leg
    assert wanted.items() <= legs.anew(own, token_ids=None, salt="other").items()


def test_what_is_computed_anew_is_the_prefill_leg_without_anything_of_kv_transfer() -> None:
    own = request({"tools": [{"type": "function"}], "max_completion_tokens": 9, "stream": True})
    leg = legs.prefill(own, handle=HANDLE, token_ids=None, salt="salt", ask_logprobs=True)

    anew = legs.anew(own, token_ids=None, salt="other")

    assert anew == {name: value for name, value in leg.items() if name != "kv_transfer_params"} | {
        "cache_salt": "other"
    }


def test_what_is_computed_anew_has_the_same_token_ids_and_no_other_parameters() -> None:
    completion = legs.anew(request(api=Api.COMPLETIONS), token_ids=[7, 8], salt="s")

    assert legs.anew(request(), token_ids=[7, 8], salt="s")["kv_transfer_params"] == {"prompt_token_ids": [7, 8]}
    assert (completion["prompt"], "kv_transfer_params" in completion) == ([7, 8], False)


def test_building_legs_leaves_the_request_as_it_was() -> None:
    once = request({"max_tokens": 3})
    before = dict(once.body)

    legs.prefill(once, handle=HANDLE, token_ids=[1], salt="salt")
    legs.decode(once, params=FROM_PREFILL, token_ids=[1], salt="salt")

    assert once.body == before
    assert "prompt_token_ids" not in HANDLE.params
    assert "prompt_token_ids" not in FROM_PREFILL


def test_a_filler_releases_and_pulls_nothing() -> None:
    body = legs.filler("tiny", HANDLE)

    assert body["max_tokens"] == 1
    assert body["kv_transfer_params"]["remote_num_tokens"] == 0
    assert body["kv_transfer_params"]["remote_block_ids"] == [[4, 5, 6]]


def test_the_tokenizer_gets_all_that_the_template_depends_on() -> None:
    extra = {
        "tools": [{"type": "function"}],
        "documents": [{"text": "d"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"custom": 1},
        "add_generation_prompt": False,
        "temperature": 0,
    }

    body = legs.tokenize(request(extra))

    assert body == {
        **CHAT,
        "tools": [{"type": "function"}],
        "add_generation_prompt": False,
        "chat_template_kwargs": {
            "custom": 1,
            "documents": [{"text": "d"}],
            "reasoning_effort": "low",
            "enable_thinking": True,
        },
    }


def test_the_clients_own_thinking_switch_wins_over_its_effort() -> None:
    body = legs.tokenize(request({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}))

    assert body is not None
    assert body["chat_template_kwargs"]["enable_thinking"] is True


def test_token_ids_need_no_tokenizer() -> None:
    assert legs.tokenize(request({"prompt": [1, 2]}, api=Api.COMPLETIONS)) is None
    assert legs.tokenize(request({"prompt": ["one"]}, api=Api.COMPLETIONS)) is not None


def test_what_may_change_the_rendering_changes_the_shape() -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"tools": [1]},
        {"tools": [1], "tool_choice": "none"},
        {"tools": [1], "tool_choice": {"type": "function"}},
        {"response_format": {"type": "json_schema"}},
        {"reasoning_effort": "low"},
        {"documents": [{}]},
        {"chat_template_kwargs": {"x": 1}},
    ]
    shapes = [legs.shape(request(extra)) for extra in variants]

    assert len(set(shapes)) == len(shapes)
    assert legs.shape(request({"temperature": 1, "max_tokens": 4})) == legs.shape(request())


def test_without_proof_in_the_router_decode_is_not_asked_for_ids() -> None:
    asked = legs.decode(request(), params=FROM_PREFILL, token_ids=None, salt=None)
    unasked = legs.decode(request(), params=FROM_PREFILL, token_ids=None, salt=None, ask_token_ids=False)

    assert {**unasked, "return_token_ids": True} == asked


def test_a_verdict_is_what_the_prefill_engine_said() -> None:
    said = {**FROM_PREFILL, "kvloop_reuse": {"outcome": "read", "tokens": 64, "more": 1}}

    assert legs.verdict(said) == legs.Verdict(Outcome.READ, 64)


@pytest.mark.parametrize(
    "said",
    [
        None,
        "read",
        {},
        {"outcome": "read"},
        {"outcome": "read", "tokens": "64"},
        {"outcome": "read", "tokens": True},
        {"outcome": "one of the future", "tokens": 0},
        {"outcome": None, "tokens": 0},
    ],
)
def test_what_is_no_verdict_is_none(said: Any) -> None:
    assert legs.verdict({**FROM_PREFILL, "kvloop_reuse": said}) is None
    assert legs.verdict(FROM_PREFILL) is None
    assert legs.verdict(None) is None
