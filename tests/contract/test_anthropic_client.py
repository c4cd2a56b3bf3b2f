"""Anthropic's own Python client talks to the router unchanged, before simulated and before real engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from kvloop_connector.settings import Connector
from tests.contract.conftest import Pair
from tests.contract.legs import ANSWER_TOKENS, holds_nothing
from tests.harness.engines import SERVED_MODEL, Engines
from tests.integration.router_process import routing

QUESTION = " ".join(["The agent reads the ticket, looks at the code and runs the tests."] * 8)
ASKED: Any = {
    "model": SERVED_MODEL,
    "max_tokens": ANSWER_TOKENS,
    "system": "Answer the question.",
    "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
}


@asynccontextmanager
async def connecting(directory: Path, engines: Engines, pair: Pair) -> AsyncIterator[AsyncAnthropic]:
    wanted = {pair.prefill.name, pair.decode.name}
    connector = Connector.KVLOOP if pair.kind.verifies else Connector.NIXL
    entries = [entry for entry in engines.as_discovery_file() if entry["name"] in wanted]
    (directory / "keys").write_text("somebody: a key\n")
    async with (
        routing(
            directory,
            entries,
            kvTransfer={"connector": connector.value},
            apiKeysFile=str(directory / "keys"),
        ) as router,
        AsyncAnthropic(base_url=router.url, api_key="a key", max_retries=0, timeout=120) as client,
    ):
        yield client
        assert holds_nothing(pair.decode)


async def test_a_message(engines: Engines, pair: Pair, tmp_path: Path) -> None:
    async with connecting(tmp_path, engines, pair) as client:
        raw = await client.messages.with_raw_response.create(**ASKED)
        message = await raw.parse()

    assert (raw.headers["X-Kvloop-Path"], raw.headers["X-Kvloop-Reason"]) == ("cold", "api")
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert 0 < message.usage.output_tokens <= ANSWER_TOKENS
    assert "kv_transfer_params" not in (message.model_extra or {})


async def test_a_streamed_message(engines: Engines, pair: Pair, tmp_path: Path) -> None:
    async with connecting(tmp_path, engines, pair) as client:
        async with client.messages.stream(**ASKED) as stream:
            text = "".join([part async for part in stream.text_stream])
            message = await stream.get_final_message()
        counted = await client.messages.count_tokens(
            model=SERVED_MODEL, system=ASKED["system"], messages=ASKED["messages"]
        )

    assert text == "".join(block.text for block in message.content if block.type == "text")
    assert 0 < message.usage.output_tokens <= ANSWER_TOKENS
    assert message.usage.input_tokens == counted.input_tokens


async def test_errors_are_those_that_the_client_knows(engines: Engines, pair: Pair, tmp_path: Path) -> None:
    async with connecting(tmp_path, engines, pair) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**{**ASKED, "model": "another"})
        with pytest.raises(anthropic.BadRequestError) as steering:
            await client.messages.create(**ASKED, extra_body={"kv_transfer_params": {"do_remote_prefill": True}})
        with pytest.raises(anthropic.BadRequestError) as too_long:
            await client.messages.create(**{**ASKED, "system": QUESTION * 60})
        with pytest.raises(anthropic.AuthenticationError) as stranger:
            await client.with_options(api_key="another key").messages.create(**ASKED)

    bodies: list[Any] = [error.value.body for error in (unknown, steering, stranger)]
    kinds = [body["error"]["type"] for body in bodies]
    assert kinds == ["not_found_error", "invalid_request_error", "authentication_error"]
    assert unknown.value.request_id
    assert "maximum context length" in str(too_long.value)
