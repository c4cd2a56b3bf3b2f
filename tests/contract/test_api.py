"""What a router relies on beside the transfer of KV: rendering, metrics, health and the shape of errors."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvloop_connector.handle import COLD_PREFILL_PARAMS
from tests.contract.conftest import Pair
from tests.contract.legs import BLOCK, CHAT, COMPLETIONS, Legs, chat, fresh_salt, story, tokenize
from tests.harness import client, metrics
from tests.harness.engines import SERVED_MODEL

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


class TestRendering:
    @pytest.mark.parametrize("extra", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
    def test_tokenize_gives_the_ids_that_the_legs_use(self, pair: Pair, legs: Legs, extra: dict[str, Any]) -> None:
        messages = story("the same ids")

        # The engines run without a tool parser, so that only this choice is open to them.
        choice = {"tool_choice": "none"} if extra else {}
        answer = legs.cold(pair.prefill, pair.decode, messages, **extra, **choice)

        assert tokenize(pair.prefill, messages, **extra) == answer.prompt_ids
        assert tokenize(pair.decode, messages, **extra) == answer.prompt_ids

    def test_tools_and_generation_prompt_change_the_ids(self, pair: Pair) -> None:
        messages = story("what changes ids")
        plain = tokenize(pair.decode, messages)

        assert tokenize(pair.decode, messages, tools=TOOLS) != plain
        without = tokenize(pair.decode, messages, add_generation_prompt=False)
        assert plain[: len(without)] == without != plain

    def test_tokenize_takes_a_text_prompt(self, pair: Pair) -> None:
        reply = client.post(f"{pair.decode.url}/tokenize", {"model": SERVED_MODEL, "prompt": "by the river"})

        assert reply.status == 200
        assert reply.json["count"] == len(reply.json["tokens"]) > 0
        assert reply.json["max_model_len"] == pair.decode.spec.max_model_len

    def test_given_prompt_ids_are_used_instead_of_the_template(self, pair: Pair, legs: Legs) -> None:
        messages, others = story("rendered"), story("given instead")
        given = tokenize(pair.decode, others)
        salt = fresh_salt()
        of_prefill = legs.prefill(
            pair.prefill, messages, {**COLD_PREFILL_PARAMS, "prompt_token_ids": given}, cache_salt=salt
        )
        params = of_prefill.json["kv_transfer_params"]

        answer = legs.decode(
            pair.prefill, pair.decode, messages, {**params, "prompt_token_ids": given}, cache_salt=salt
        )

        assert params["remote_num_tokens"] == len(given)
        assert answer.prompt_ids == given
        assert answer.answer_ids == legs.cold(pair.prefill, pair.decode, others).answer_ids


class TestErrors:
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_unknown_model_is_404(self, pair: Pair, path: str) -> None:
        body = {"model": "another", "prompt": "x", "messages": story("unknown model"), "max_tokens": 1}

        self.check(client.post(pair.decode.url + path, body), 404, "NotFoundError")

    def test_prompt_past_the_models_length_is_400(self, pair: Pair) -> None:
        reply = client.post(pair.decode.url + CHAT, chat(story("far too long", words=20_000)))

        self.check(reply, 400, "BadRequestError")
        assert "maximum context length" in reply.json["error"]["message"]

    @pytest.mark.parametrize(
        "body",
        [b"{not json", b"[]", b'{"model": "tiny"}', b'{"model": "tiny", "messages": "hello"}'],
        ids=["not json", "not an object", "no messages", "messages of the wrong type"],
    )
    def test_malformed_body_is_400(self, pair: Pair, body: bytes) -> None:
        self.check(client.post(pair.decode.url + CHAT, body), 400)

    @pytest.mark.parametrize(
        "fields",
        [{"temperature": -1.0}, {"max_tokens": 0}, {"kv_transfer_params": "text"}, {"n": 2}],
        ids=["temperature", "max_tokens", "kv_transfer_params", "several greedy answers"],
    )
    def test_impossible_field_is_400(self, pair: Pair, fields: dict[str, Any]) -> None:
        self.check(client.post(pair.decode.url + CHAT, chat(story("impossible"), **fields)), 400)

    def check(self, reply: client.Reply, status: int, kind: str | None = None) -> None:
        assert reply.status == status, reply.text
        error = reply.json["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        assert error["code"] == status
        assert isinstance(error["message"], str)
        assert kind in (None, error["type"])


class TestObservation:
    def test_health_version_and_models(self, pair: Pair) -> None:
        assert client.get(f"{pair.decode.url}/health").status == 200
        assert client.get(f"{pair.decode.url}/ping").status == 200
        version = client.get(f"{pair.decode.url}/version").json["version"]
        assert re.match(r"\d+\.\d+\.\d+", version)
        models = client.get(f"{pair.decode.url}/v1/models").json
        assert models["object"] == "list"
        assert [model["id"] for model in models["data"]] == [SERVED_MODEL]
        assert models["data"][0]["max_model_len"] == pair.decode.spec.max_model_len

    def test_metrics_that_router_and_operator_read(self, pair: Pair, legs: Legs) -> None:
        legs.cold(pair.prefill, pair.decode, story("something to count"))
        expected = {
            "vllm:nixl_bytes_transferred_sum",
            "vllm:nixl_bytes_transferred_count",
            "vllm:nixl_xfer_time_seconds_sum",
            "vllm:nixl_post_time_seconds_sum",
            "vllm:nixl_num_descriptors_sum",
            "vllm:nixl_num_failed_transfers_total",
            "vllm:nixl_num_failed_notifications_total",
            "vllm:nixl_num_kv_expired_reqs_total",
            "vllm:nixl_num_notifications_after_expiry_total",
            "vllm:external_prefix_cache_queries_total",
            "vllm:external_prefix_cache_hits_total",
            "vllm:prefix_cache_queries_total",
            "vllm:prefix_cache_hits_total",
            "vllm:prompt_tokens_by_source_total",
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:num_requests_waiting_by_reason",
            "vllm:kv_cache_usage_perc",
            "vllm:num_preemptions_total",
            "vllm:time_to_first_token_seconds_sum",
            "vllm:e2e_request_latency_seconds_sum",
            "vllm:request_success_total",
            "vllm:cache_config_info",
        }

        for engine in (pair.prefill, pair.decode):
            assert expected - metrics.sample_names(engine.metrics_text()) == set()

    def test_cache_config_names_the_block_size(self, pair: Pair) -> None:
        config = metrics.cache_config(pair.decode.metrics_text())

        assert config["block_size"] == str(BLOCK)
        assert config["num_gpu_blocks"] == str(pair.decode.spec.kv_blocks)
