"""APIs beside the two that are turns, API keys, tenants' limits: in the shape that each API's clients expect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.integration.router_process import MODEL, RouterUnderTest, chat_body, scripted
from tests.integration.scripted_engine import ScriptedEngine, fails, resets, starts_then_waits, waits

RESPONSES = {"model": MODEL, "input": "hello"}
MESSAGES = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
EVENTS = [
    b'event: message_start\ndata: {"type":"message_start"}\n\n',
    b'event: content_block_delta\ndata: {"delta": {"text": "\xc3\xa9 kv_transfer_params"}}\n',
    b"\n: a comment\n\nevent: message_stop\ndata: {}\n\n",
]


async def odd_stream(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for part in EVENTS:
        await response.write(part)
    await response.write_eof()
    return response


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)])
async def test_streams_of_other_apis_pass_byte_for_byte_and_say_why_they_are_cold(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    decode.script = [odd_stream]

    got = await router.post(path, {**body, "stream": True})

    assert got.text.encode() == b"".join(EVENTS)
    assert (got.status, got.path, got.reason) == (200, "cold", "api")
    assert got.headers["Content-Type"].startswith("text/event-stream")
    assert prefill.asked == []
    assert "kv_transfer_params" not in decode.asked[-1].body
    assert await router.metric('kvloop_router_turns_total{path="cold",reason="api"}') == 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"])
async def test_a_salt_of_the_clients_own_reaches_no_engine(
    router: RouterUnderTest, decode: ScriptedEngine, path: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {"/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
    body = bodies.get(path, {"model": MODEL, "input": "x", "prompt": "x"})
    for salt in (None, "mine", "another", "mine"):
        await router.post(path, body if salt is None else {**body, "cache_salt": salt, "conversation_id": "c"})

    salts = [asked.body.get("cache_salt") for asked in decode.asked]
    assert "mine" not in salts
    assert salts == [None] * 4 if path == "/tokenize" else len(set(salts)) == 3 and salts[1] == salts[3]
    assert not any("conversation_id" in asked.body for asked in decode.asked)


@pytest.mark.parametrize("failure", [fails(500), resets])
async def test_an_engine_that_fails_before_an_answer_is_replaced_by_another(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, failure: Any
) -> None:
    decode.script = [failure]
    other = ScriptedEngine("decode-1", decode.role, script=[failure])
    async with scripted(tmp_path, prefill, decode, other) as router:
        first = await router.post("/v1/responses", RESPONSES)
        other.script, decode.script = [failure], []
        got = [await router.post("/v1/responses", RESPONSES) for _ in range(4)]

    assert (first.status, first.error["code"]) == (502, "engine_failed")
    assert [each.status for each in got] == [200] * 4


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("previous_response_id", "resp_1", "previous_response_not_found"),
        ("conversation", {"id": "conv_1"}, "unsupported_value"),
        ("background", True, "unsupported_value"),
        ("stream", "yes", "invalid_type"),
        ("cache_salt", 5, "invalid_type"),
        ("model", ["tiny"], "invalid_type"),
        ("model", None, "missing_required_parameter"),
    ],
)
async def test_what_a_response_cannot_be_is_refused(
    router: RouterUnderTest, decode: ScriptedEngine, field: str, value: Any, code: str
) -> None:
    got = await router.post("/v1/responses", {**RESPONSES, field: value})

    assert (got.status, got.error["param"], got.error["code"]) == (400, field, code)
    assert decode.asked == []


async def test_no_response_is_stored(router: RouterUnderTest, decode: ScriptedEngine) -> None:
    for method, path in (
        ("GET", "resp_1"),
        ("DELETE", "resp_1"),
        ("POST", "resp_1/cancel"),
        ("GET", "resp_1/input_items"),
    ):
        async with router.session.request(method, f"{router.url}/v1/responses/{path}") as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "response_not_found")
        assert "resp_1" in error["message"]

    assert decode.asked == []


async def test_one_model_is_told_by_its_name(router: RouterUnderTest) -> None:
    one, other = await router.get(f"/v1/models/{MODEL}"), await router.get("/v1/models/organisation/name")

    assert (one.status, one.json["id"], one.json["max_model_len"]) == (200, MODEL, 4096)
    assert (other.status, other.error["code"]) == (404, "model_not_found")


class TestAnthropicsErrors:
    @pytest.mark.parametrize(
        ("body", "status", "kind"),
        [
            (b"{", 400, "invalid_request_error"),
            ({**MESSAGES, "kv_transfer_params": {}}, 400, "invalid_request_error"),
            ({**MESSAGES, "model": "other"}, 404, "not_found_error"),
            (b"[" * 500 + b"]" * 500, 400, "invalid_request_error"),
        ],
    )
    async def test_bad_input(
        self, router: RouterUnderTest, decode: ScriptedEngine, body: Any, status: int, kind: str
    ) -> None:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            got = await router.post(path, body)

            assert (got.status, got.json["type"], got.error["type"]) == (status, "error", kind)
            assert got.json["request_id"] == got.headers["X-Request-Id"]
            assert got.error["message"]
        assert decode.asked == []

    async def test_too_large_a_body(self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
        async with scripted(tmp_path, prefill, decode, limits={"bodyBytes": 1024}) as router:
            got = await router.post("/v1/messages", {**MESSAGES, "system": "x" * 2048})

        assert (got.status, got.error["type"]) == (413, "request_too_large")

    async def test_no_engine(self, tmp_path: Path, prefill: ScriptedEngine) -> None:
        async with scripted(tmp_path, prefill) as router:
            got = await router.post("/v1/messages", MESSAGES)

        assert (got.status, got.error["type"], got.headers["Retry-After"]) == (503, "overloaded_error", "1")

    async def test_a_method_that_is_none(self, router: RouterUnderTest) -> None:
        got = await router.get("/v1/messages")

        assert (got.status, got.json["type"], got.headers["Allow"]) == (405, "error", "POST")


class TestKeys:
    @pytest.fixture
    async def keys(self, tmp_path: Path) -> Path:
        path = tmp_path / "keys"
        path.write_text("a: sk-a\nb: {key: sk-b, concurrentRequests: 1}\n")
        return path

    @pytest.fixture
    async def router(
        self, tmp_path: Path, keys: Path, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> AsyncIterator[RouterUnderTest]:
        async with scripted(tmp_path, prefill, decode, apiKeysFile=str(keys)) as under_test:
            yield under_test

    @pytest.mark.parametrize(
        "headers",
        [{"Authorization": "Bearer sk-a"}, {"X-Api-Key": "sk-a"}, {"Authorization": "Bearer x", "x-api-key": "sk-a"}],
    )
    async def test_a_key_is_taken_where_either_client_puts_it(
        self, router: RouterUnderTest, headers: dict[str, str]
    ) -> None:
        for path, body in (("/v1/messages", MESSAGES), ("/v1/chat/completions", chat_body("x"))):
            assert (await router.post(path, body, headers)).status == 200

    @pytest.mark.parametrize("headers", [{}, {"X-Api-Key": "sk-"}, {"Authorization": "Basic sk-a"}])
    async def test_without_one_each_client_gets_its_own_error(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, headers: dict[str, str]
    ) -> None:
        openais = await router.post("/v1/chat/completions", chat_body("x"), headers)
        anthropics = await router.post("/v1/messages", MESSAGES, headers)
        stored = await router.get("/v1/responses/x")

        assert (openais.status, openais.error["code"]) == (401, "invalid_api_key")
        assert (anthropics.status, anthropics.error["type"]) == (401, "authentication_error")
        assert stored.status == 401
        assert openais.headers["WWW-Authenticate"] == "Bearer"
        assert prefill.asked == decode.asked == []

    async def test_a_changed_file_changes_the_keys_and_a_bad_one_does_not(
        self, router: RouterUnderTest, keys: Path
    ) -> None:
        async def status(key: str) -> int:
            return (await router.post("/v1/chat/completions", chat_body("x"), {"X-Api-Key": key})).status

        assert router.router is not None
        await asyncio.to_thread(keys.write_text, "c: sk-c\n")
        router.router.reloading.look()
        assert (await status("sk-c"), await status("sk-a")) == (200, 401)
        await asyncio.to_thread(keys.write_text, "{broken")
        router.router.reloading.look()
        assert (await status("sk-c"), await status("sk-a")) == (200, 401)
        for outcome in ("ok", "failed"):
            series = f'kvloop_router_reloads_total{{file="apiKeysFile",outcome="{outcome}"}}'
            assert await router.metric(series) == 1

    async def test_a_tenant_at_its_limit_is_told_to_come_back_and_holds_up_no_other(
        self, router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        go_on = asyncio.Event()
        prefill.script = [waits(go_on)]

        async def chat(key: str) -> Any:
            return await router.post("/v1/chat/completions", chat_body("x"), {"X-Api-Key": key})

        async with asyncio.TaskGroup() as tasks:
            running_one = tasks.create_task(chat("sk-b"))
            await prefill.arrived.wait()
            over = await chat("sk-b")
            messages = await router.post("/v1/messages", MESSAGES, {"X-Api-Key": "sk-b"})
            others = await chat("sk-a")
            go_on.set()

        assert (over.status, over.error["code"], over.headers["Retry-After"]) == (429, "rate_limit_exceeded", "1")
        assert (messages.status, messages.error["type"]) == (429, "rate_limit_error")
        assert (others.status, running_one.result().status) == (200, 200)
        assert (await chat("sk-b")).status == 200
        assert await router.metric("kvloop_router_over_limit_total") == 2

    async def test_names_are_logged_and_keys_are_not(
        self, router: RouterUnderTest, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG")
        await router.post("/v1/chat/completions", chat_body("x"), {"X-Api-Key": "sk-a"})

        (line,) = (record for record in caplog.records if record.name == "kvloop_router.turn_log")
        assert vars(line)["tenant"] == "a"
        assert not [record for record in caplog.records if "sk-a" in f"{record.getMessage()} {vars(record)}"]


async def test_the_same_name_twice_says_what_the_engine_reads_too(
    router: RouterUnderTest, decode: ScriptedEngine
) -> None:
    """Engines read the last of them; so does the router, and what it sends on has it once."""
    twice = b'{"model": "tiny", "input": "x", "previous_response_id": "r", "previous_response_id": null, "store": true}'

    got = await router.post("/v1/responses", twice)

    assert got.status == 200
    assert decode.asked[-1].body["store"] is False


async def test_a_huge_header_is_refused_clearly(router: RouterUnderTest, decode: ScriptedEngine) -> None:
    got = await router.post("/v1/responses", RESPONSES, {"X-Api-Key": "k" * 100_000})

    assert got.status == 400
    assert decode.asked == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_silent_stream_is_kept_alive_and_is_otherwise_the_same(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, path: str
) -> None:
    go_on = asyncio.Event()
    decode.script = [starts_then_waits(go_on)]
    body = {**chat_body("hello"), "max_tokens": 5, "stream": True}
    async with scripted(tmp_path, prefill, decode, timeouts={"keepAliveSeconds": 0.01}) as router:
        async with router.session.post(router.url + path, json=body) as response:
            begun = await response.content.readuntil(b": keep-alive\n\n")
            go_on.set()
            silent = begun + await response.read()
        usual = await router.post(path, body)

    assert silent.startswith(b"data: {")
    assert silent.replace(b": keep-alive\n\n", b"") == usual.text.encode()
