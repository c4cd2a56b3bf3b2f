"""What a conversation's turns send to engines, and what comes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvloop_connector.handle import COLD_PREFILL_PARAMS
from tests.integration.router_process import RouterUnderTest, chat_body, scripted, until
from tests.integration.scripted_engine import (
    ANSWER,
    BLOCK_SIZE,
    ScriptedEngine,
    answers,
    rendered,
    starts_then_waits,
    stream,
    stream_events,
)

OTHER = "another question, that has nothing in common with that one"
LONG = "a question that is long enough to be worth a pull"


def provable(*contents: str) -> int:
    """Tokens of the turn with these messages that a following turn can be proven to share."""
    retained = len(rendered(chat_body(*contents))) + len(ANSWER) + 1
    return (retained - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_second_turn_pulls_what_was_proven_and_no_more(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, streamed: bool
) -> None:
    first = await router.chat(LONG, stream=streamed)
    second = await router.chat(LONG, ANSWER, "and more", stream=streamed)

    assert (first.path, first.reason, first.reused) == ("cold", "miss", 0)
    assert (second.path, second.reason, second.reused) == ("warm", "", provable(LONG))
    assert second.content == ANSWER
    pulled = prefill.carried[1]
    assert pulled["remote_engine_id"] == decode.engine_id
    assert pulled["remote_num_tokens"] == provable(LONG)
    assert len(pulled["remote_block_ids"][0]) == provable(LONG) // BLOCK_SIZE
    assert pulled["a_field_of_the_future"] == {"kept": True}
    assert second.headers["X-Kvloop-Prefill"] == "prefill-0"
    assert second.headers["X-Kvloop-Decode"] == "decode-0"


async def test_both_legs_of_a_turn_get_the_same_ids_and_decode_gets_prefills_own_parameters(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    await router.chat(LONG)
    await router.chat(LONG, ANSWER, "and more")

    ids = rendered(chat_body(LONG, ANSWER, "and more"))
    assert prefill.carried[1]["prompt_token_ids"] == decode.carried[1]["prompt_token_ids"] == ids
    assert decode.carried[1]["remote_engine_id"] == prefill.engine_id
    assert decode.carried[1]["a_field_of_the_future"] == {"kept": True}


async def test_the_first_turn_of_a_shape_checks_the_tokenizer_and_sends_no_ids_to_prefill(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    await router.chat(LONG)

    assert prefill.carried == [dict(COLD_PREFILL_PARAMS)]
    assert prefill.legs[0].body["return_token_ids"] is True
    assert decode.carried[0]["prompt_token_ids"] == rendered(chat_body(LONG))


async def test_nothing_is_reused_where_the_tokenizer_renders_otherwise(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    prefill.renders_otherwise = decode.renders_otherwise = True

    await router.chat(LONG)
    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, second.reason) == ("cold", "template")
    assert "prompt_token_ids" not in prefill.carried[1]
    assert prefill.carried[1]["remote_num_tokens"] == 0, "the handle is released"


async def test_an_edited_history_pulls_only_what_is_equal(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    await router.chat(LONG, ANSWER, "a second question, which will be edited")
    edited = await router.chat(LONG, ANSWER, "a second question, which was edited now")

    shared = len(rendered(chat_body(LONG, ANSWER, "a second question, which w"))) - len("\n<assistant>")
    assert edited.path == "warm"
    assert edited.reused == shared // BLOCK_SIZE * BLOCK_SIZE
    assert len(prefill.carried[1]["remote_block_ids"][0]) == shared // BLOCK_SIZE


async def test_another_thread_under_the_same_id_pulls_nothing_and_leaves_the_handle(
    router: RouterUnderTest, prefill: ScriptedEngine
) -> None:
    await router.chat(LONG, conversation_id="c")
    second = await router.chat("Something else altogether, of some length", conversation_id="c")
    third = await router.chat(LONG, ANSWER, "and more", conversation_id="c")

    assert (second.path, second.reason, second.reused) == ("cold", "below_threshold", 0)
    assert "remote_engine_id" not in prefill.carried[1]
    assert third.path == "warm"


async def test_a_handle_that_its_conversation_cannot_use_any_more_rides_on_the_turns_own_leg(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    body = chat_body(LONG, ANSWER, "what is this?")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body["messages"][-1]["content"] = [image]
    await router.chat(LONG)
    second = await router.post("/v1/chat/completions", body)

    assert (second.path, second.reason, second.reused) == ("cold", "api", 0)
    assert prefill.carried[1]["remote_engine_id"] == decode.engine_id
    assert prefill.carried[1]["remote_num_tokens"] == 0
    await until(lambda: router.router is not None and len(router.router.releases) == 0)
    assert await router.metric('kvloop_router_handles_given_up_total{reason="useless"}') == 1


async def test_another_conversation_with_the_same_system_prompt_takes_no_handle(
    router: RouterUnderTest, prefill: ScriptedEngine
) -> None:
    system = {"role": "system", "content": "A long system prompt that everybody has. " * 5}

    def turn(*contents: str) -> dict[str, Any]:
        body = chat_body(*contents)
        return {**body, "messages": [system, *body["messages"]]}

    await router.post("/v1/chat/completions", turn("mine"))
    other = await router.post("/v1/chat/completions", turn("theirs"))
    mine = await router.post("/v1/chat/completions", turn("mine", ANSWER, "more"))

    assert (other.path, other.reason) == ("cold", "miss")
    assert mine.path == "warm"


async def test_of_two_conversations_with_one_beginning_each_finds_its_own_handle(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    def says(text: str) -> Any:
        def change(answer: dict[str, Any]) -> None:
            answer["choices"][0]["message"]["content"] = text
            answer["choices"][0]["token_ids"] = list(f"{text}\n".encode())
            answer["kv_transfer_params"]["remote_num_tokens"] += len(text) - len(ANSWER)
            answer["kv_transfer_params"]["remote_block_ids"] = [list(range(99))]

        return answers(change)

    decode.script = [says("an answer that is the first of two"), says("some other answer, which is the second")]
    await router.chat(LONG)
    await router.chat(LONG)
    first = await router.chat(LONG, "an answer that is the first of two", "go on")
    second = await router.chat(LONG, "some other answer, which is the second", "go on")

    assert first.path == second.path == "warm"
    answer_begins = len(rendered(chat_body(LONG)))
    assert first.reused > answer_begins
    assert second.reused > answer_begins


async def test_of_two_racing_turns_one_gets_the_handle(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    await router.chat(LONG)

    turns = await asyncio.gather(*(router.chat(LONG, ANSWER, f"variant {index}") for index in range(3)))

    assert sorted((turn.path, turn.reason) for turn in turns) == [("cold", "taken"), ("cold", "taken"), ("warm", "")]
    pulls = [params for params in prefill.carried[1:] if params.get("remote_num_tokens")]
    assert len(pulls) == 1


async def test_a_handle_is_kept_before_the_client_can_know_that_its_turn_has_ended(
    router: RouterUnderTest, decode: ScriptedEngine
) -> None:
    """A client that goes on at the finish chunk, while the stream is still open, finds the handle."""
    go_on = asyncio.Event()

    async def ends_late(engine: ScriptedEngine, request: Any, body: dict[str, Any]) -> web.StreamResponse:
        events = stream_events(engine, request.path, body)
        response = await _open(request)
        for item in events[:-1]:
            await response.write(item)
        await go_on.wait()
        await response.write(events[-1])
        await response.write_eof()
        return response

    decode.script = [ends_late]
    body = chat_body(LONG, stream=True)
    async with router.session.post(router.url + "/v1/chat/completions", json=body) as response:
        async for line in response.content:
            if b'"finish_reason":"stop"' in line:
                break
        second = await router.chat(LONG, ANSWER, "and more")
        go_on.set()
        await response.read()

    assert second.path == "warm"


async def test_the_client_sees_no_handle_and_no_token_ids(router: RouterUnderTest) -> None:
    for streamed in (False, True):
        chat = await router.chat(LONG, stream=streamed)
        completion = await router.post(
            "/v1/completions", {"model": "tiny", "prompt": LONG, "stream": streamed, "max_tokens": 4}
        )
        for got in (chat, completion):
            assert got.status == 200
            assert "kv_transfer_params" not in got.text
            assert "remote_engine_id" not in got.text
            assert "token_ids" not in got.text


async def test_token_ids_that_the_client_asked_for_stay(router: RouterUnderTest) -> None:
    got = await router.chat(LONG, return_token_ids=True)

    assert got.json["choices"][0]["token_ids"] == list(f"{ANSWER}\n".encode())
    assert "kv_transfer_params" not in got.text


async def test_a_streamed_answer_is_the_engines_own_bytes_but_for_what_is_cut_out(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    odd = [
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\r\n\r\n',
        b": a comment\n\n",
        b'data: {"choices": [ {"index":0 , "delta":{"content":"\\u00e9 \xf0\x9f\x98\x80"}}]}\n\n',
        b'event: x\ndata: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n',
        b"data: [DONE]\n\n",
    ]

    async def step(engine: ScriptedEngine, request: Any, body: dict[str, Any]) -> Any:
        return await stream(engine, request, body, odd)

    decode.script = [step]
    got = await router.chat(LONG, stream=True)

    assert got.text.encode() == b"".join(odd)
    assert got.headers["Content-Type"] == "text/event-stream; charset=utf-8"


async def test_headers_come_before_the_answers_end(router: RouterUnderTest, decode: ScriptedEngine) -> None:
    go_on = asyncio.Event()
    decode.script = [starts_then_waits(go_on)]

    body = chat_body(LONG, stream=True)
    async with router.session.post(router.url + "/v1/chat/completions", json=body) as response:
        assert response.headers["X-Kvloop-Path"] == "cold"
        assert response.headers["X-Kvloop-Prefill"] == "prefill-0"
        go_on.set()
        await response.read()


async def test_completions_grow_too(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    prompt = "once upon a time there was a cache " * 20
    first = {"model": "tiny", "prompt": prompt, "max_tokens": 5}
    await router.post("/v1/completions", first)
    second = await router.post("/v1/completions", {**first, "prompt": prompt + ANSWER + "\n" + "and then"})

    assert second.path == "warm"
    assert second.reused == (len(prompt) + len(ANSWER)) // BLOCK_SIZE * BLOCK_SIZE
    assert prefill.legs[1].body["prompt"] == list((prompt + ANSWER + "\n" + "and then").encode())


async def test_below_the_threshold_nothing_is_pulled(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    prefill.cached_tokens = 4
    await router.chat(LONG)

    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, second.reason, second.reused) == ("cold", "below_threshold", 0)


async def test_what_prefill_has_itself_is_not_reused_because_of_a_handle(
    router: RouterUnderTest, prefill: ScriptedEngine
) -> None:
    prefill.cached_tokens = 500
    await router.chat(LONG)

    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, second.reason, second.reused) == ("cold", "below_threshold", 0)
    assert await router.metric("kvloop_router_reused_tokens_total") == 0


async def test_a_conversation_id_never_reaches_an_engine(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    await router.chat(LONG, conversation_id="by body")
    await router.chat(LONG, headers={"X-Conversation-ID": "by header"})

    for asked in (*prefill.asked, *decode.asked):
        assert "conversation_id" not in asked.body
        assert "X-Conversation-ID" not in asked.headers


async def test_a_session_header_selects_a_handle_where_it_is_configured(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    async with scripted(tmp_path, prefill, decode, sessionHeaders=["X-Session-ID"]) as router:
        headers = {"X-Session-ID": "s"}
        await router.chat(LONG, headers=headers)
        other = await router.chat(OTHER, headers={"X-Session-ID": "t"})
        same = await router.chat(LONG, "compacted", "more", headers=headers)

    assert (other.path, other.reason, same.path) == ("cold", "miss", "warm")


async def test_an_ended_conversation_is_released(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    await router.chat(LONG, conversation_id="c")

    async with router.session.delete(router.url + "/kvloop/v1/conversations/c") as response:
        assert (await response.json())["released"] == 1
    await until(lambda: len(prefill.fillers) == 1)

    assert prefill.fillers[0].params["remote_num_tokens"] == 0
    assert prefill.fillers[0].body["max_tokens"] == 1
    assert (await router.chat(LONG, ANSWER, "more", conversation_id="c")).path == "cold"


async def test_a_handle_expires_by_the_routers_clock(router: RouterUnderTest, prefill: ScriptedEngine) -> None:
    await router.chat(LONG)
    router.clock.ahead += 450

    second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, second.reason) == ("cold", "expired")
    assert "remote_engine_id" not in prefill.carried[1]


async def test_without_reuse_each_handle_is_released_unused(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    async with scripted(tmp_path, prefill, decode, reuse=False) as router:
        await router.chat(LONG)
        second = await router.chat(LONG, ANSWER, "and more")

    assert (second.path, second.reason, second.reused) == ("cold", "off", 0)
    assert prefill.carried[1]["remote_num_tokens"] == 0
    assert prefill.carried[1]["remote_engine_id"] == decode.engine_id


async def test_tenants_share_nothing(tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
    (tmp_path / "keys").write_text("key-a\nkey-b\n")
    async with scripted(tmp_path, prefill, decode, apiKeysFile=str(tmp_path / "keys")) as router:
        nobody = await router.chat(LONG)
        await router.chat(LONG, headers={"Authorization": "Bearer key-a"})
        other = await router.chat(LONG, ANSWER, "more", headers={"Authorization": "Bearer key-b"})
        own = await router.chat(LONG, ANSWER, "more", headers={"Authorization": "Bearer key-a"})

    assert (nobody.status, nobody.error["code"]) == (401, "invalid_api_key")
    assert (other.path, own.path) == ("cold", "warm")
    salts = [leg.body["cache_salt"] for leg in prefill.legs]
    assert salts[0] == salts[2] != salts[1]
    assert all("Authorization" not in asked.headers for asked in (*prefill.asked, *decode.asked))


async def test_several_answers_go_to_decode_alone(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    got = await router.chat(LONG, n=2)

    assert (got.status, got.path, got.reason) == (200, "cold", "api")
    assert prefill.legs == []
    assert decode.carried == [None]


async def test_a_picture_goes_through_both_legs_but_is_never_reused(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    picture = [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": picture}]}

    got = await router.post("/v1/chat/completions", body)

    assert (got.path, got.reason) == ("cold", "api")
    assert "prompt_token_ids" not in prefill.carried[0]
    await until(lambda: len(prefill.fillers) == 1)
    assert prefill.fillers[0].params["remote_engine_id"] == decode.engine_id


async def _open(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response
