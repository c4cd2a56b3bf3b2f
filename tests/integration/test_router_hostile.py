"""Clients that mean harm, or send what no client should: no engine is steered, nothing is told, nothing breaks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from tests.integration.router_process import MODEL, TOKEN, RouterUnderTest, chat_body, scripted
from tests.integration.scripted_engine import ANSWER, ScriptedEngine, fails, handle, stream_events, streams

LONG = "a question that is long enough to be worth a pull"
ESCAPED = rb'"\u006bv_transfer_params"'
STEERING = b'{"model": "tiny", "input": "x", %s: {"do_remote_prefill": true}}' % ESCAPED
FORM = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n%s--x--\r\n'


def part(name: bytes, value: bytes) -> bytes:
    return FORM % (b"--x\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (name, value))


async def raw(url: str, head: str, body: bytes) -> tuple[int, bytes]:
    """Status and all bytes of the answer to a request of these very bytes."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    writer.write(f"{head}\r\nHost: router\r\nConnection: close\r\n{length}\r\n".encode("latin-1") + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(answer.split(b" ", 2)[1]), answer


@pytest.mark.parametrize("content_type", ["", "Content-Type: text/plain\r\n", "Content-Type: application/x+json\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/tokenize"])
async def test_no_content_type_lets_an_escaped_name_through(
    router: RouterUnderTest, decode: ScriptedEngine, path: str, encoding: str, content_type: str
) -> None:
    body = STEERING.decode().encode(encoding)

    status, _ = await raw(router.url, f"POST {path} HTTP/1.1\r\n{content_type}".rstrip("\r\n"), body)

    assert status == 400
    assert decode.asked == []


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data; boundary=x", part(b'name="vllm_xargs"', b"{%s: 1}" % ESCAPED)),
        ("multipart/form-data; boundary=x", part(b"name*=utf-8''vllm%5Fxargs", b"{%s: 1}" % ESCAPED)),
        ("multipart/form-data; boundary=x", part(b"name*=utf-8''kv%5ftransfer_params", b"{}")),
        ("application/x-www-form-urlencoded", b"model=tiny&kv%5Ftransfer_params=%7B%7D"),
        ("application/x-www-form-urlencoded", b"model=tiny&vllm_xargs=%7B%22%5Cu006bv_transfer_params%22%3A1%7D"),
        ("multipart/form-data", b"no boundary"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nnever ends"),
        ("application/octet-stream", b"neither a form nor JSON"),
    ],
)  # fmt: skip
async def test_no_form_steers_an_engine(
    router: RouterUnderTest, decode: ScriptedEngine, content_type: str, body: bytes
) -> None:
    got = await router.post("/v1/audio/transcriptions", body, {"Content-Type": content_type})

    assert got.status == 400
    assert decode.asked == []


async def test_a_good_form_reaches_a_decode_engine_whole(router: RouterUnderTest, decode: ScriptedEngine) -> None:
    sound = bytes(range(256)) * 1000
    form = aiohttp.FormData({"model": MODEL, "language": "fran\u00e7ais", "vllm_xargs": '{"a": 1}'})
    form.add_field("file", sound, filename="s\u00f6und.wav", content_type="audio/wav")

    async with router.session.post(router.url + "/v1/audio/transcriptions", data=form) as response:
        assert (response.status, await response.json()) == (200, {"text": ANSWER})

    assert [asked.body for asked in decode.asked] == [
        {"model": MODEL, "language": "fran\u00e7ais", "vllm_xargs": '{"a": 1}', "file": sound}
    ]


async def test_token_ids_in_a_list_of_one_prompt_are_that_prompt(
    router: RouterUnderTest, prefill: ScriptedEngine
) -> None:
    prompt = list(LONG.encode()) * 3
    first = await router.post("/v1/completions", {"model": MODEL, "prompt": [prompt]})
    again = [*prompt, *first.content.encode(), *b" and more"]
    second = await router.post("/v1/completions", {"model": MODEL, "prompt": [again]})

    assert (first.status, second.status) == (200, 200)
    assert second.path == "warm"
    assert prefill.legs[-1].body["prompt"] == again


async def test_a_token_id_that_no_model_has_is_the_engines_to_refuse(
    router: RouterUnderTest, prefill: ScriptedEngine
) -> None:
    named = {"model": MODEL, "conversation_id": "c"}
    await router.post("/v1/completions", {**named, "prompt": list(LONG.encode())})
    prefill.script = [fails(400, "out of vocabulary")]

    got = await router.post("/v1/completions", {**named, "prompt": [2**40, *LONG.encode()]})

    assert got.status == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_what_is_nested_too_deeply_is_refused(router: RouterUnderTest, decode: ScriptedEngine, path: str) -> None:
    deep = b"[" * 400 + b"]" * 400
    body = json.dumps(chat_body("x", conversation_id="c", input="x")).encode()[:-1] + b', "metadata": %s}' % deep

    got = await router.post(path, body)

    assert got.status == 400, got.text
    assert decode.asked == []


@pytest.mark.parametrize("name", ["traceparent", "tracestate", "X-Conversation-ID", "Content-Type", "X-Request-Id"])
async def test_a_header_that_is_not_text_breaks_nothing(
    router: RouterUnderTest, prefill: ScriptedEngine, name: str
) -> None:
    body = json.dumps(chat_body(LONG)).encode()

    status, _ = await raw(router.url, f"POST /v1/chat/completions HTTP/1.1\r\n{name}: a\xe9\xff", body)
    passed, _ = await raw(router.url, f"POST /v1/embeddings HTTP/1.1\r\n{name}: a\xe9\xff", body)

    assert (status, passed) == (200, 200)


async def test_a_key_that_is_not_text_is_a_wrong_key(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    async with scripted(tmp_path, prefill, decode, apiKeysFile=str(keys)) as router:
        for url, path in ((router.url, "/v1/models"), (router.admin_url, "/admin/v1/engines")):
            status, _ = await raw(url, f"GET {path} HTTP/1.1\r\nAuthorization: Bearer \xe9\xff", b"")
            assert status == 401


async def test_a_conversation_whose_id_is_not_text_can_be_ended(router: RouterUnderTest) -> None:
    status, _ = await raw(router.url, "DELETE /kvloop/v1/conversations/%ED%B2%80%ff HTTP/1.1", b"")

    assert status == 200


async def test_a_conversation_id_has_a_bound(router: RouterUnderTest, decode: ScriptedEngine) -> None:
    got = await router.chat(LONG, conversation_id="c" * 10_000)

    assert (got.status, got.error["param"]) == (400, "conversation_id")
    assert decode.asked == []


async def test_a_refusal_that_repeats_what_the_leg_carried_is_not_passed_on(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    first = await router.chat(LONG)
    carried = handle(decode, 40)
    prefill.script = [fails(422, f"bad input: {{'messages': [], 'kv_transfer_params': {carried!r}}}")]

    got = await router.chat(LONG, first.content, "more")

    assert got.status == 422
    assert got.error["type"] == "invalid_request_error"
    assert decode.engine_id not in got.text
    assert "remote_host" not in got.text


async def test_a_compressed_body_is_read_and_a_broken_one_refused(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    headers = {"Content-Encoding": "gzip"}

    got = await router.post("/v1/chat/completions", b"\x1f\x8b\x08broken", headers)

    assert got.status == 400
    assert (prefill.asked, decode.asked) == ([], [])


async def test_a_hundred_thousand_messages_are_a_turn(router: RouterUnderTest) -> None:
    body = json.dumps(chat_body(*["x"] * 100_000)).encode()

    status, answer = await raw(router.url, "POST /v1/chat/completions HTTP/1.1", body)

    assert status == 400
    assert b"context_length_exceeded" in answer


async def test_an_answer_that_the_router_fails_over_does_not_end_cleanly(
    router: RouterUnderTest, decode: ScriptedEngine
) -> None:
    """For a client of HTTP/1.0 the end of the connection is the end of the answer."""
    seen = asyncio.Event()

    async def step(engine: ScriptedEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        role, text, *rest = stream_events(engine, request.path, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(role + text.replace(b'"token_ids":[', b'"token_ids":["not a number",'))
        await seen.wait()
        await response.write(b"".join(rest))
        await response.write_eof()
        return response

    decode.script = [step]
    address = urlsplit(router.url)
    body = json.dumps(chat_body(LONG, stream=True)).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert b"200 OK" in await reader.readuntil(ANSWER.encode())
    seen.set()

    with pytest.raises(ConnectionError):
        await reader.read()
    writer.close()


async def test_a_stream_that_breaks_upstream_breaks_for_a_client_of_an_older_http_too(
    router: RouterUnderTest, decode: ScriptedEngine
) -> None:
    decode.script = [streams(lambda events: events[:2], reset=True)]
    body = json.dumps(chat_body(LONG, stream=True)).encode()
    address = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with pytest.raises(ConnectionError):
        await reader.read()
    writer.close()


@pytest.mark.parametrize(
    "path",
    ["//v1/chat/completions", "/v1/chat/completions/", "/v1/../v1/load_lora_adapter", "/v1%2Fchat/completions"],
)
async def test_no_path_reaches_an_engine_by_another_name(
    router: RouterUnderTest, prefill: ScriptedEngine, decode: ScriptedEngine, path: str
) -> None:
    status, _ = await raw(router.url, f"POST {path} HTTP/1.1\r\nContent-Type: application/json", b"{}")

    assert status in (400, 404)
    assert (prefill.asked, decode.asked) == ([], [])


async def test_after_all_that_a_turn_is_a_turn(router: RouterUnderTest) -> None:
    got: Any = await router.chat(LONG)

    assert (got.status, got.content) == (200, ANSWER)
    assert TOKEN not in got.text
