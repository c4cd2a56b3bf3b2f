"""Requests are accepted and refused as vLLM does."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_sim import tokenizer
from kvloop_sim.options import parse
from kvloop_sim.protocol import ApiError, GenerationRequest, parse_generation

OPTIONS = parse(["serve", "m", "--served-model-name", "x", "--max-model-len", "64"], {})
CHAT = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "x", "prompt": "hi there"}


def chat(**fields: Any) -> GenerationRequest:
    return parse_generation({**CHAT, **fields}, OPTIONS, chat=True)


def completion(**fields: Any) -> GenerationRequest:
    return parse_generation({**COMPLETION, **fields}, OPTIONS, chat=False)


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert chat(max_tokens=1, max_completion_tokens=9).max_tokens == (9,)


def test_defaults_of_max_tokens() -> None:
    request = chat()

    assert request.max_tokens == (64 - len(request.prompts[0]),)
    assert completion().max_tokens == (16,)


def test_several_prompts_and_token_prompts() -> None:
    ids = tokenizer.encode("hi there")

    assert completion(prompt=["hi there", "you"]).prompts == (tuple(ids), tuple(tokenizer.encode("you")))
    assert completion(prompt=ids).prompts == (tuple(ids),)
    assert completion(prompt=[ids, ids]).prompts == (tuple(ids), tuple(ids))


def test_given_prompt_ids_replace_the_template_and_leave_the_parameters() -> None:
    ids = tokenizer.encode("exactly this")
    request = chat(kv_transfer_params={"prompt_token_ids": ids, "do_remote_decode": True})

    assert request.prompts == (tuple(ids),)
    assert request.params == {"do_remote_decode": True}


def test_given_prompt_ids_are_ignored_before_0_32() -> None:
    older = parse(["serve", "m", "--sim-version", "0.31.0"], {})
    body = {"messages": CHAT["messages"], "kv_transfer_params": {"prompt_token_ids": [1]}}

    assert len(parse_generation(body, older, chat=True).prompts[0]) > 1


def test_what_is_not_modelled_is_accepted() -> None:
    chat(tools=[{"type": "function", "function": {"name": "f"}}], response_format={"type": "json_object"}, user="u")


@pytest.mark.parametrize(
    ("fields", "status", "kind", "parameter"),
    [
        ({"model": "y"}, 404, "NotFoundError", "model"),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"max_tokens": 65}, 400, "BadRequestError", "max_tokens"),
        ({"max_completion_tokens": 65}, 400, "BadRequestError", "max_completion_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, 400, "BadRequestError", "min_tokens"),
        ({"max_tokens": "2"}, 400, "Bad Request", "body.max_tokens"),
        ({"stream_options": {"include_usage": True}}, 400, "Bad Request", "stream_options"),
        ({"n": 0}, 400, "BadRequestError", "n"),
        ({"n": 2, "temperature": 0}, 400, "BadRequestError", "n"),
        ({"temperature": 2.1}, 400, "BadRequestError", "temperature"),
        ({"top_p": 0}, 400, "BadRequestError", "top_p"),
        ({"stop": [""]}, 400, "BadRequestError", "stop"),
        ({"stop": 3}, 400, "Bad Request", "body.stop"),
        ({"cache_salt": ""}, 400, "Bad Request", "cache_salt"),
        ({"kv_transfer_params": "text"}, 400, "Bad Request", "body.kv_transfer_params"),
        ({"kv_transfer_params": {"prompt_token_ids": []}}, 400, "BadRequestError", None),
        ({"kv_transfer_params": {"prompt_token_ids": [2**40]}}, 400, "BadRequestError", None),
        ({"vllm_xargs": {"kv_transfer_params": "text"}}, 500, "InternalServerError", None),
        ({"messages": None}, 400, "Bad Request", "body.messages"),
        ({"messages": [{"role": "user", "content": "w " * 80}]}, 400, "BadRequestError", "input_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "BadRequestError", None),
        ({"add_generation_prompt": True, "continue_final_message": True}, 400, "Bad Request", None),
    ],
)
def test_refusals(fields: dict[str, Any], status: int, kind: str, parameter: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)

    body = refused.value.as_json()["error"]
    assert (body["code"], body["type"]) == (status, kind)
    assert body.keys() == {"message", "type", "param", "code"}
    assert parameter is None or body["param"] == parameter


@pytest.mark.parametrize("prompt", [None, "", [], [""], [1.5], [[]], {"text": "hi"}])
def test_prompt_that_is_none_is_refused(prompt: object) -> None:
    with pytest.raises(ApiError) as refused:
        completion(prompt=prompt)

    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("chat", "fields"), [(True, {"logprobs": True, "top_logprobs": 21}), (False, {"logprobs": 21})]
)
def test_no_more_likely_tokens_are_told_than_the_engine_allows(chat: bool, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}

    with pytest.raises(ApiError, match="greater than max allowed: 20"):
        parse_generation({**body, **fields}, OPTIONS, chat=chat)
    more = parse(["serve", "m", "--max-model-len", "4096", "--max-logprobs", "21"], {})
    assert parse_generation({**body, **fields}, more, chat=chat).logprobs == 21
