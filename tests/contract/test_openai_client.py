"""OpenAI's own Python client talks to the router unchanged, before simulated and before real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from kvloop_connector.settings import Connector
from tests.contract.conftest import Pair
from tests.contract.legs import ANSWER_TOKENS, holds_nothing
from tests.harness.engines import SERVED_MODEL, Engines, wait_until
from tests.integration.router_process import RouterUnderTest, routing

QUESTION = " ".join(["The agent reads the ticket, looks at the code and runs the tests."] * 8)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS, "extra_body": {"ignore_eos": True}}


@dataclass(frozen=True, slots=True)
class Connected:
    """OpenAI's client, and the router that it talks to."""

    client: AsyncOpenAI
    router: RouterUnderTest


@asynccontextmanager
async def connecting(directory: Path, engines: Engines, pair: Pair) -> AsyncIterator[Connected]:
    wanted = {pair.prefill.name, pair.decode.name}
    connector = Connector.KVLOOP if pair.kind.verifies else Connector.NIXL
    async with routing(
        directory,
        [entry for entry in engines.as_discovery_file() if entry["name"] in wanted],
        kvTransfer={"connector": connector.value},
    ) as router:
        conversation = {"X-Conversation-ID": "talk"}
        client = AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key="a key", default_headers=conversation, max_retries=0, timeout=120
        )
        async with client:
            yield Connected(client, router)
        authorization = {"Authorization": "Bearer a key"}
        async with router.session.delete(f"{router.url}/kvloop/v1/conversations/talk", headers=authorization) as ended:
            assert ended.status == 200
        assert await asyncio.to_thread(wait_until, lambda: holds_nothing(pair.decode))


async def test_chat(engines: Engines, pair: Pair, tmp_path: Path) -> None:
    async with connecting(tmp_path, engines, pair) as connected:
        answer = await connected.client.chat.completions.create(
            model=SERVED_MODEL, messages=[{"role": "user", "content": QUESTION}], **GREEDY
        )

    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == ANSWER_TOKENS
    assert not {"kv_transfer_params", "prompt_token_ids"} & (answer.model_extra or {}).keys()


async def test_second_turn_of_a_streamed_chat_is_warm(engines: Engines, pair: Pair, tmp_path: Path) -> None:
    async with connecting(tmp_path, engines, pair) as connected:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
        paths = []
        for _ in range(2):
            raw = await connected.client.chat.completions.with_raw_response.create(
                model=SERVED_MODEL,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                **GREEDY,
            )
            paths.append(raw.headers["X-Kvloop-Path"])
            text, usage, reasons = "", None, []
            async for chunk in raw.parse():
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reasons += [choice.finish_reason] if choice.finish_reason else []
            assert reasons == ["length"]
            assert usage is not None
            assert usage.completion_tokens == ANSWER_TOKENS
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": QUESTION}]

    assert paths == ["cold", "warm"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_completions(engines: Engines, pair: Pair, tmp_path: Path, stream: bool) -> None:
    async with connecting(tmp_path, engines, pair) as connected:
        create = connected.client.completions.create
        if stream:
            text = ""
            async for chunk in await create(model=SERVED_MODEL, prompt=QUESTION, stream=True, **GREEDY):
                text += "".join(choice.text for choice in chunk.choices)
        else:
            text = (await create(model=SERVED_MODEL, prompt=QUESTION, **GREEDY)).choices[0].text

    assert text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_responses(engines: Engines, pair: Pair, tmp_path: Path, stream: bool) -> None:
    limits: dict[str, Any] = {
        "temperature": 0.0,
        "max_output_tokens": ANSWER_TOKENS,
        "extra_body": {"ignore_eos": True},
    }
    async with connecting(tmp_path, engines, pair) as connected:
        create: Any = connected.client.responses.with_raw_response.create
        raw = await create(
            model=SERVED_MODEL,
            instructions="Answer the question.",
            input=[{"role": "user", "content": QUESTION}],
            stream=stream,
            **limits,
        )
        assert (raw.headers["X-Kvloop-Path"], raw.headers["X-Kvloop-Reason"]) == ("cold", "api")
        if stream:
            events = [event async for event in raw.parse()]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[0].type == "response.created"
            assert events[-1].type == "response.completed"
            response = events[-1].response
            deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert deltas == response.output_text
        else:
            response = raw.parse()

    assert response.output_text
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == ANSWER_TOKENS
    assert (response.model_extra or {}).get("kv_transfer_params") is None


async def test_responses_have_no_memory(engines: Engines, pair: Pair, tmp_path: Path) -> None:
    async with connecting(tmp_path, engines, pair) as connected:
        responses = connected.client.responses
        with pytest.raises(openai.BadRequestError) as previous:
            await responses.create(model=SERVED_MODEL, input="hello", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError) as stored:
            await responses.retrieve("resp_1")
        with pytest.raises(openai.NotFoundError):
            await responses.delete("resp_1")

    assert previous.value.code == "previous_response_not_found"
    assert stored.value.code == "response_not_found"


async def test_models(engines: Engines, pair: Pair, tmp_path: Path) -> None:
    async with connecting(tmp_path, engines, pair) as connected:
        models = await connected.client.models.list()
        one = await connected.client.models.retrieve(SERVED_MODEL)

    assert [model.id for model in models.data] == [one.id] == [SERVED_MODEL]


async def test_errors_are_those_that_the_client_knows(engines: Engines, pair: Pair, tmp_path: Path) -> None:
    async with connecting(tmp_path, engines, pair) as connected:
        create = connected.client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as unknown:
            await create(model="another", messages=[{"role": "user", "content": "hello"}])
        with pytest.raises(openai.BadRequestError) as steering:
            await create(
                model=SERVED_MODEL,
                messages=[{"role": "user", "content": "hello"}],
                extra_body={"kv_transfer_params": {"do_remote_prefill": True}},
            )
        with pytest.raises(openai.BadRequestError) as too_long:
            await create(model=SERVED_MODEL, messages=[{"role": "user", "content": QUESTION * 60}])

    assert unknown.value.code == "model_not_found"
    assert steering.value.param == "kv_transfer_params"
    # A router that asks for no token ids leaves this to the engine, whose errors have the status as their code.
    assert too_long.value.code == ("400" if pair.kind.verifies else "context_length_exceeded")
