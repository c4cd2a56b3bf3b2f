"""What a turn leaves behind, and what the next one reads back."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_connector.handle import COLD_PREFILL_PARAMS
from tests.contract.conftest import Pair
from tests.contract.legs import (
    ANSWER_TOKENS,
    BLOCK,
    CHAT,
    COMPLETIONS,
    Legs,
    answer_of,
    chat,
    common_prefix,
    completion,
    continued,
    fresh_salt,
    holds_nothing,
    story,
    streamed,
    tokenize,
)
from tests.harness import client
from tests.harness.engines import wait_until


class TestFirstTurn:
    def test_prefill_says_where_its_blocks_are(self, pair: Pair, legs: Legs) -> None:
        messages = story("a cold prefill leg")

        reply = legs.prefill(pair.prefill, messages, cache_salt=fresh_salt())

        assert reply.status == 200
        body = reply.json
        params = body["kv_transfer_params"]
        prompt = tokenize(pair.prefill, messages)
        assert params["do_remote_prefill"] is True
        assert params["do_remote_decode"] is False
        assert params["remote_num_tokens"] == len(prompt) == body["usage"]["prompt_tokens"]
        assert params["remote_host"] == pair.prefill.host
        assert params["remote_port"] == 5600
        assert params["remote_blocks_expiry_time"] is None
        assert params["tp_size"] == 1
        assert params["transfer_mode"] == "pull"
        assert [len(group) for group in params["remote_block_ids"]] == [-(-len(prompt) // BLOCK)]
        # The blocks wait for a decode leg; let it come.
        legs.decode(pair.prefill, pair.decode, messages, params)

    def test_decode_pulls_the_prompt_and_returns_a_handle(self, pair: Pair, legs: Legs) -> None:
        before = pair.decode.metrics()

        answer = legs.cold(pair.prefill, pair.decode, story("a first turn"))

        params = answer.params
        assert params is not None
        assert params["do_remote_prefill"] is False
        assert params["do_remote_decode"] is True
        assert params["remote_host"] == pair.decode.host
        assert isinstance(params["remote_blocks_expiry_time"], float)
        assert params["remote_request_id"].startswith("chatcmpl-")
        handle = answer.handle
        assert answer.finish_reason == "length"
        assert len(answer.answer_ids) == ANSWER_TOKENS
        assert handle.num_tokens == len(answer.retained_ids) - 1
        assert [len(group) for group in handle.block_ids] == [-(-handle.num_tokens // BLOCK)]
        counted = pair.decode.metrics() - before
        assert counted.reads == 1
        assert counted.external_hits == len(answer.prompt_ids)

    def test_engine_ids_differ_and_stay_while_the_process_lives(self, pair: Pair, legs: Legs) -> None:
        first = legs.cold(pair.prefill, pair.decode, story("engine ids", words=40))
        second = legs.cold(pair.prefill, pair.decode, story("engine ids again", words=40))
        other = legs.cold(pair.prefill, pair.forgetful_decode, story("engine ids elsewhere", words=40))

        assert first.handle.engine_id == second.handle.engine_id
        assert first.handle.engine_id != other.handle.engine_id
        assert first.handle.request_id != second.handle.request_id

    def test_answer_ends_by_stop_token_with_a_handle(self, pair: Pair, legs: Legs) -> None:
        messages = story("stop tokens")
        chosen = legs.cold(pair.prefill, pair.decode, messages).answer_ids[4]

        answer = legs.cold(pair.prefill, pair.decode, messages, stop_token_ids=[chosen])

        assert answer.finish_reason == "stop"
        assert answer.answer_ids[-1] == chosen
        assert answer.handle.num_tokens <= len(answer.retained_ids)

    def test_answer_that_a_stop_string_ends_has_no_handle_and_retains_nothing(self, pair: Pair, legs: Legs) -> None:
        messages = story("stop strings")
        word = legs.cold(pair.prefill, pair.decode, messages).text.split()[4]
        legs.settle()

        answer = legs.cold(pair.prefill, pair.decode, messages, stop=[f" {word}"])

        assert answer.finish_reason == "stop"
        assert answer.params is None
        assert wait_until(lambda: holds_nothing(pair.decode))

    def test_conversation_goes_on_after_a_streamed_answer_that_a_stop_string_ended(
        self, pair: Pair, legs: Legs
    ) -> None:
        messages, salt = story("stop strings in a stream"), fresh_salt()
        stop = f" {legs.cold(pair.prefill, pair.decode, messages).text.split()[4]}"
        legs.settle()
        of_prefill = legs.prefill(pair.prefill, messages, cache_salt=salt).json["kv_transfer_params"]
        body = chat(messages, cache_salt=salt, stop=[stop], return_token_ids=True, kv_transfer_params=of_prefill)

        with streamed(pair.decode, CHAT, body) as chunks:
            first = answer_of(list(chunks))

        assert (first.finish_reason, first.params) == ("stop", None)
        assert wait_until(lambda: holds_nothing(pair.decode))
        history = continued(messages, first)
        second = legs.turn(pair.prefill, pair.decode, history, COLD_PREFILL_PARAMS, cache_salt=salt)
        assert second.answer_ids == legs.cold(pair.other_prefill, pair.decode, history).answer_ids
        assert second.handle.num_tokens == len(second.retained_ids) - 1


class TestStreams:
    @pytest.mark.parametrize("usage", [False, True], ids=["", "usage"])
    @pytest.mark.parametrize("ids", [False, True], ids=["", "ids"])
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
    def test_handle_is_on_the_finish_chunk(self, pair: Pair, legs: Legs, path: str, ids: bool, usage: bool) -> None:
        body = request_for(path, "a streamed answer", cache_salt=fresh_salt())
        of_prefill = client.post(
            pair.prefill.url + path, {**body, "max_tokens": 1, "kv_transfer_params": COLD_PREFILL_PARAMS}
        )
        extra: dict[str, Any] = {"return_token_ids": True} if ids else {}
        extra |= {"stream_options": {"include_usage": True}} if usage else {}

        with streamed(
            pair.decode, path, {**body, **extra, "kv_transfer_params": of_prefill.json["kv_transfer_params"]}
        ) as chunks:
            seen = list(chunks)

        legs.account(answer_of(seen), pair.prefill, pair.decode)
        carrying = [chunk for chunk in seen if chunk.get("kv_transfer_params")]
        assert len(carrying) == 1
        assert carrying[0]["choices"][0]["finish_reason"] == "length"
        assert ("usage" in seen[-1] and seen[-1]["choices"] == []) is usage
        assert (seen[0].get("prompt_token_ids") or seen[0]["choices"][0].get("prompt_token_ids") or []) != [] or not ids

    def test_streamed_answer_is_the_whole_one(self, pair: Pair, legs: Legs) -> None:
        messages = story("streamed or not")
        whole = legs.cold(pair.prefill, pair.decode, messages)
        salt = fresh_salt()
        of_prefill = legs.prefill(pair.prefill, messages, cache_salt=salt)

        body = chat(
            messages,
            cache_salt=salt,
            return_token_ids=True,
            kv_transfer_params=of_prefill.json["kv_transfer_params"],
        )
        with streamed(pair.decode, CHAT, body) as chunks:
            answer = legs.account(answer_of(list(chunks)), pair.prefill, pair.decode)

        assert answer.retained_ids == whole.retained_ids
        assert answer.text == whole.text
        assert answer.handle.num_tokens == whole.handle.num_tokens

    def test_handle_of_a_stream_is_read_back(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("read back from a stream"), fresh_salt()
        of_prefill = legs.prefill(pair.prefill, messages, cache_salt=salt)
        body = chat(
            messages, cache_salt=salt, return_token_ids=True, kv_transfer_params=of_prefill.json["kv_transfer_params"]
        )
        with streamed(pair.decode, CHAT, body) as chunks:
            first = legs.account(answer_of(list(chunks)), pair.prefill, pair.decode)
        history = continued(messages, first)
        handle = pair.reusable(first, tokenize(pair.decode, history))
        before = pair.other_prefill.metrics()

        second = legs.turn(pair.other_prefill, pair.decode, history, handle.params, cache_salt=salt)

        assert (pair.other_prefill.metrics() - before).external_hits == handle.tokens
        assert second.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids


class TestSecondTurn:
    def test_other_prefill_pulls_all_that_is_proven(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("a second turn elsewhere"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        history = continued(messages, first)
        prompt = tokenize(pair.decode, history)
        assert common_prefix(prompt, first.retained_ids) == len(first.retained_ids), "the template is append-only"
        handle = pair.reusable(first, prompt)
        before = pair.other_prefill.metrics()

        second = legs.turn(pair.other_prefill, pair.decode, history, handle.params, cache_salt=salt)

        counted = pair.other_prefill.metrics() - before
        assert counted.reads == 1
        assert counted.bytes_read > 0
        assert counted.local_hits == 0
        assert counted.external_hits == handle.tokens
        assert counted.computed == len(prompt) - handle.tokens
        assert second.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids

    def test_same_prefill_looks_in_its_own_cache_first(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("a second turn at home"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt, max_tokens=4 * BLOCK)
        history = continued(messages, first)
        handle = pair.reusable(first, tokenize(pair.decode, history))
        before = pair.prefill.metrics()

        second = legs.turn(pair.prefill, pair.decode, history, handle.params, cache_salt=salt)

        counted = pair.prefill.metrics() - before
        assert counted.local_hits == len(first.prompt_ids) // BLOCK * BLOCK
        assert counted.external_hits == handle.tokens - counted.local_hits
        assert counted.reads == 1
        assert second.answer_ids == legs.cold(pair.other_prefill, pair.decode, history).answer_ids

    def test_reading_frees_the_retained_blocks(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("reading frees"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        assert not holds_nothing(pair.decode)
        history = continued(messages, first)
        handle = pair.reusable(first, tokenize(pair.decode, history))

        legs.prefill(pair.other_prefill, history, handle.params, cache_salt=salt)

        assert wait_until(lambda: holds_nothing(pair.decode))

    @pytest.mark.parametrize("reader", [0, 1])
    @pytest.mark.parametrize("issuer", [0, 1])
    def test_any_prefill_reads_from_any_decode_on_behalf_of_the_other(
        self, pair: Pair, legs: Legs, reader: int, issuer: int
    ) -> None:
        prefills, decodes = (pair.prefill, pair.other_prefill), (pair.decode, pair.forgetful_decode)
        messages, salt = story("here and there"), fresh_salt()
        first = legs.cold(prefills[1 - reader], decodes[issuer], messages, cache_salt=salt)
        history = continued(messages, first)
        handle = pair.reusable(first, tokenize(pair.decode, history))
        before = prefills[reader].metrics()

        second = legs.turn(prefills[reader], decodes[1 - issuer], history, handle.params, cache_salt=salt)

        assert (prefills[reader].metrics() - before).external_hits == handle.tokens
        assert second.answer_ids == legs.cold(prefills[1 - reader], decodes[issuer], history).answer_ids

    def test_conversation_of_four_turns_stays_right(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("four turns"), fresh_salt()
        answer = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        for number in range(3):
            messages = continued(messages, answer, f"And then, {number}?")
            handle = pair.reusable(answer, tokenize(pair.decode, messages))
            prefill = (pair.other_prefill, pair.prefill)[number % 2]
            answer = legs.turn(prefill, pair.decode, messages, handle.params, cache_salt=salt)
            assert answer.answer_ids == legs.cold(pair.prefill, pair.decode, messages).answer_ids


class TestThreshold:
    """The default threshold is 64 tokens; compared are the tokens that the prefill engine misses."""

    @pytest.mark.parametrize(("tokens", "pulled"), [(63, 0), (64, 64), (96, 96)], ids=["below", "at", "above"])
    def test_fewer_tokens_are_computed_and_no_fewer_are_pulled(
        self, pair: Pair, legs: Legs, tokens: int, pulled: int
    ) -> None:
        messages, salt = story("the threshold"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        history = continued(messages, first)
        params = {**first.handle.params, "remote_num_tokens": tokens}
        if not pair.kind.verifies:
            params["remote_block_ids"] = [list(first.handle.block_ids[0][: -(-tokens // BLOCK)])]
        before = pair.other_prefill.metrics()

        second = legs.turn(pair.other_prefill, pair.decode, history, params, cache_salt=salt)

        counted = pair.other_prefill.metrics() - before
        assert counted.external_hits == pulled
        assert counted.computed == len(second.prompt_ids) - pulled
        assert second.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids
        # Decode was told, also where nothing was pulled.
        legs.settle()
        assert holds_nothing(pair.decode)


def request_for(path: str, topic: str, **fields: Any) -> dict[str, Any]:
    messages = story(topic)
    return chat(messages, **fields) if path == CHAT else completion(messages[-1]["content"], **fields)
