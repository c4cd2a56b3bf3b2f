"""The edges of the API: bad input, other APIs, headers, limits, admin, shutdown."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import yaml

from tests.integration.router_process import (
    MODEL,
    TOKEN,
    RouterUnderTest,
    chat_body,
    configuration,
    scripted,
    until,
    write_engines,
)
from tests.integration.scripted_engine import ANSWER, ScriptedEngine, running, starts_then_waits

LONG = "a question that is long enough to be worth a pull"
LIMIT = 100_000


@pytest.fixture
async def router(tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine) -> AsyncIterator[RouterUnderTest]:
    async with scripted(tmp_path, prefill, decode, limits={"bodyBytes": LIMIT}) as under_test:
        yield under_test


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", b'{"model": "tiny", "messages": [', 400, None),
        ("/v1/chat/completions", b"\xff\xff", 400, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 400, "model"),
        ("/v1/chat/completions", {**chat_body("x"), "model": "other"}, 404, "model"),
        ("/v1/chat/completions", chat_body("x", stream="yes"), 400, "stream"),
        (
            "/v1/chat/completions",
            chat_body("x", kv_transfer_params={"do_remote_prefill": True}),
            400,
            "kv_transfer_params",
        ),
        ("/v1/chat/completions", chat_body("x", ec_transfer_params={}), 400, "ec_transfer_params"),
        (
            "/v1/chat/completions",
            chat_body("x", vllm_xargs={"kv_transfer_params": "{}"}),
            400,
            "vllm_xargs.kv_transfer_params",
        ),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ("/v1/responses", {"model": MODEL, "input": "x", "kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ("/v1/embeddings", {"model": MODEL, "input": "x", "kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ("/tokenize", {"model": MODEL, "prompt": "x", "kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ("/v1/load_lora_adapter", {}, 404, None),
        ("/metrics", {}, 405, None),
    ],
)
async def test_bad_input_gets_openais_error_and_nothing_reaches_an_engine(
    router: RouterUnderTest,
    prefill: ScriptedEngine,
    decode: ScriptedEngine,
    path: str,
    body: Any,
    status: int,
    param: str | None,
) -> None:
    got = await router.post(path, body)

    assert (got.status, got.error["param"]) == (status, param)
    assert set(got.error) == {"message", "type", "param", "code"}
    assert got.error["type"] == "invalid_request_error"
    assert got.headers["X-Request-Id"]
    assert prefill.asked == decode.asked == []


async def test_a_form_that_names_a_handle_is_refused(router: RouterUnderTest, decode: ScriptedEngine) -> None:
    form = aiohttp.FormData({"model": MODEL, "kv_transfer_params": "{}"})
    async with router.session.post(router.url + "/v1/audio/transcriptions", data=form) as response:
        assert response.status == 400

    assert decode.asked == []


@pytest.mark.parametrize("length_known", [True, False])
async def test_a_body_over_the_limit_is_refused_and_the_connection_ends_cleanly(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, length_known: bool
) -> None:
    body = json.dumps(chat_body("x" * 40 * LIMIT)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    data: Any = io.BytesIO(body) if length_known else pieces()
    async with router.session.post(router.url + "/v1/chat/completions", data=data) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"

    assert (await router.chat("the next one")).status == 200
    assert [leg.body["messages"][0]["content"] for leg in prefill.legs] == ["the next one"]


async def test_a_body_that_never_ends_does_not_keep_the_refusal_waiting(router: RouterUnderTest) -> None:
    parts = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 104857600\r\n\r\n" + b"x" * 2 * LIMIT
    )
    await writer.drain()
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"\r\n")
    writer.close()

    assert b" 413 " in answer


async def test_a_prompt_that_does_not_fit_sends_no_leg(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    long = await router.chat("x" * 5000)
    with_answer = await router.chat("x" * 2000, max_tokens=3000)
    completion = await router.post("/v1/completions", {"model": MODEL, "prompt": "x" * 5000})
    ids = await router.post("/v1/completions", {"model": MODEL, "prompt": [7] * 5000})

    for got in (long, with_answer, completion, ids):
        assert (got.status, got.error["code"]) == (400, "context_length_exceeded")
    assert with_answer.error["param"] == "max_tokens"
    assert prefill.legs == decode.legs == []


async def test_models_are_told_in_openais_shape(router: RouterUnderTest) -> None:
    models = (await router.get("/v1/models")).json

    assert models["object"] == "list"
    assert [(model["id"], model["object"], model["max_model_len"]) for model in models["data"]] == [
        (MODEL, "model", 4096)
    ]


async def test_other_apis_pass_to_a_decode_engine_alone(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    body = {"model": MODEL, "prompt": "x", "input": "x"}
    responses = await router.post("/v1/responses", body)
    tokenized = await router.post("/tokenize", {"prompt": "abc"})

    assert (responses.status, responses.path, responses.reason) == (200, "cold", "api")
    assert responses.headers["X-Kvloop-Decode"] == "decode-0"
    assert tokenized.json["tokens"] == list(b"abc")
    assert prefill.asked == []
    (of_responses, of_tokenize) = (asked.body for asked in decode.asked)
    assert of_responses.pop("cache_salt")
    assert (of_responses, of_tokenize) == ({**body, "store": False}, {"prompt": "abc"})


async def test_a_request_id_goes_along_the_whole_way(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    sent = {"X-Request-Id": "mine-1", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    got = await router.chat(LONG, headers=sent)
    bad = await router.post("/v1/chat/completions", b"{", {"X-Request-Id": "mine-2"})

    assert got.headers["X-Request-Id"] == "mine-1"
    assert bad.headers["X-Request-Id"] == "mine-2"
    for leg in (*prefill.legs, *decode.legs):
        assert leg.headers["X-Request-Id"] == "mine-1"
        assert leg.headers["traceparent"] == sent["traceparent"]


async def test_the_admin_api_needs_its_token(router: RouterUnderTest) -> None:
    for token in (None, "wrong"):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with router.session.get(router.admin_url + "/admin/v1/engines", headers=headers) as response:
            assert response.status == 401
    async with router.session.get(router.url + "/admin/v1/engines", headers={"Authorization": f"Bearer {TOKEN}"}) as it:
        assert it.status == 404


async def test_the_admin_api_tells_of_engines_and_turns_but_no_text(
    router: RouterUnderTest, decode: ScriptedEngine
) -> None:
    secret = "a very secret question, long enough"
    await router.chat(secret)
    second = await router.chat(secret, ANSWER, "and more", headers={"X-Request-Id": "second"})

    engines = await router.admin("/admin/v1/engines")
    turn = await router.admin("/admin/v1/turns/second")
    pairs = await router.admin("/admin/v1/pairs")

    of_decode = next(engine for engine in engines["engines"] if engine["name"] == "decode-0")
    assert of_decode["podUID"] == decode.pod_uid
    assert of_decode["liveHandles"] == 1
    assert 0 < of_decode["lastDeadlineSeconds"] <= 450
    assert (of_decode["healthy"], of_decode["blockSize"], of_decode["runningTurns"]) == (True, 4, 0)
    assert (turn["path"], turn["reused_tokens"]) == (second.path, second.reused)
    assert [pair["verdict"] for pair in pairs["pairs"]] == ["unknown"]
    assert "secret" not in json.dumps([engines, turn, pairs])


async def test_metrics_count_turns_and_tokens(router: RouterUnderTest) -> None:
    await router.chat(LONG)
    second = await router.chat(LONG, ANSWER, "and more")
    await router.post("/v1/chat/completions", b"{")

    assert await router.metric('kvloop_router_turns_total{path="cold",reason="miss"}') == 1
    assert await router.metric('kvloop_router_turns_total{path="warm",reason=""}') == 1
    assert await router.metric("kvloop_router_reused_tokens_total") == second.reused
    assert await router.metric('kvloop_router_handles_total{event="spent"}') == 1
    assert await router.metric("kvloop_router_live_handles") == 1
    assert await router.metric('kvloop_router_engine_healthy{engine="decode-0",kv_revision="a",role="decode"}') == 1
    assert await router.metric('kvloop_router_time_to_first_token_seconds_count{path="warm"}') == 1
    assert await router.metric('kvloop_router_requests_total{api="/v1/chat/completions",status="400"}') == 1


async def test_no_prompt_is_logged(router: RouterUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    await router.chat("a very secret question")
    await router.post("/v1/chat/completions", b'{"messages": "very secret"')

    lines = [record for record in caplog.records if record.name == "kvloop_router.turn_log"]
    assert len(lines) == 2
    assert not [record for record in caplog.records if "secret" in f"{record.getMessage()} {vars(record)}"]


async def test_an_engine_that_fails_its_checks_is_not_ready(router: RouterUnderTest, decode: ScriptedEngine) -> None:
    decode.healthy = False
    assert router.router is not None
    engines = router.router.engines
    await until(lambda: not engines.present(decode.pod_uid))

    ready = await router.get("/readyz")
    turn = await router.chat(LONG)

    assert (ready.status, ready.text.split(":")[0]) == (503, "decode_unhealthy")
    assert (turn.status, turn.error["code"]) == (503, "decode_unhealthy")
    assert (await router.get("/healthz")).status == 200


async def test_sigterm_lets_running_turns_end(tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
    go_on = asyncio.Event()
    decode.script = [starts_then_waits(go_on)]
    async with running(prefill), running(decode), aiohttp.ClientSession() as session:
        port = _free_port()
        document = configuration(tmp_path, listen={"port": port})
        write_engines(tmp_path / "engines.json", [prefill.entry(), decode.entry()])
        (tmp_path / "router.yaml").write_text(yaml.safe_dump(document))
        url = f"http://127.0.0.1:{port}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvloop_router", "--config", str(tmp_path / "router.yaml")),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            await _ready(session, url)
            async with session.post(url + "/v1/chat/completions", json=chat_body(LONG, stream=True)) as response:
                await response.content.readany()
                process.send_signal(signal.SIGTERM)
                await _until_status(session, url + "/readyz", 503)
                async with session.post(url + "/v1/chat/completions", json=chat_body(LONG)) as refused:
                    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
                go_on.set()
                rest = await response.read()
            assert rest.endswith(b"data: [DONE]\n\n")
            _, log = await asyncio.wait_for(process.communicate(), 20)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    assert process.returncode == 0
    lines = [json.loads(line) for line in log.decode().splitlines()]
    assert [line["path"] for line in lines if line["message"] == "turn" and line["status"] == 200] == ["cold"]


async def test_a_bad_configuration_ends_with_its_faults(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(yaml.safe_dump(configuration(tmp_path, handleTtlSeconds=470)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvloop_router", "--config", str(tmp_path / "router.yaml")),
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await asyncio.wait_for(process.communicate(), 60)

    assert process.returncode == 2
    assert b"handleTtlSeconds" in told
    assert b"Traceback" not in told


async def test_a_router_that_is_to_ask_an_api_server_says_where_nothing_leads_to_one(tmp_path: Path) -> None:
    document = configuration(tmp_path)
    document["discovery"] = {"kubernetes": {"deployment": "demo", "namespace": "team"}}
    (tmp_path / "router.yaml").write_text(yaml.safe_dump(document))
    outside = {name: value for name, value in os.environ.items() if not name.startswith("KUBE")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvloop_router", "--config", str(tmp_path / "router.yaml")),
        stderr=asyncio.subprocess.PIPE,
        env={**outside, "HOME": str(tmp_path)},
    )
    _, told = await asyncio.wait_for(process.communicate(), 60)

    assert process.returncode == 2
    assert b"discovery.kubernetes" in told
    assert b"Traceback" not in told


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                async with session.get(url + "/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)


async def _until_status(session: aiohttp.ClientSession, url: str, status: int) -> None:
    async with asyncio.timeout(20):
        while True:
            async with session.get(url) as response:
                if response.status == status:
                    return
            await asyncio.sleep(0.05)
