"""Tools and structured output, by the clients that people use, through the router to simulated engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from kvloop_connector.settings import Role
from tests.harness.engines import SERVED_MODEL, Engines, Kind, start
from tests.integration.router_process import RouterUnderTest, routing
from tests.integration.simulated import order, spec

WORK = "read the ticket, look at the code, run the tests and say what they tell you. " * 12
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "forecast", "parameters": PARAMETERS, "strict": True}]
MESSAGES_TOOLS: Any = [{"name": "forecast", "input_schema": PARAMETERS}]


class Verdict(BaseModel):
    """What an answer is to look like."""

    text: str
    sure: bool


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with start(Kind.SIM, tmp_path_factory.mktemp("engines"), [spec(Role.PREFILL), spec(Role.DECODE)]) as started:
        yield started


@pytest.fixture
async def router(engines: Engines, tmp_path: Path) -> AsyncIterator[RouterUnderTest]:
    async with routing(tmp_path, engines.as_discovery_file(), kvTransfer={"kvRecomputeThreshold": 64}) as under_test:
        yield under_test


@pytest.fixture
async def client(router: RouterUnderTest) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key="a key", max_retries=0, timeout=60) as opened:
        yield opened


@pytest.fixture
async def anthropics(router: RouterUnderTest) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=router.url, api_key="a key", max_retries=0, timeout=60) as opened:
        yield opened


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "forecast"}}])
async def test_a_conversation_with_a_tool_is_warm_again_after_its_call(client: AsyncOpenAI, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": f"{choice} {WORK}"}]
    create = client.chat.completions.with_raw_response.create
    first = await create(model=SERVED_MODEL, messages=messages, tools=CHAT_TOOLS, tool_choice=choice, max_tokens=40)
    message = first.parse().choices[0].message
    assert message.tool_calls
    (call,) = message.tool_calls
    assert call.type == "function"
    assert set(json.loads(call.function.arguments)) == {"place", "days"}

    messages += [
        {"role": "assistant", "tool_calls": [call.to_dict()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    second = await create(model=SERVED_MODEL, messages=messages, tools=CHAT_TOOLS, tool_choice=choice, max_tokens=40)

    assert (second.headers["X-Kvloop-Path"], second.headers.get("X-Kvloop-Reason")) == ("warm", None)
    assert second.parse().choices[0].message.tool_calls


async def test_a_streamed_tool_call_comes_whole(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model=SERVED_MODEL,
        messages=[{"role": "user", "content": WORK}],
        tools=CHAT_TOOLS,
        tool_choice="required",
        max_tokens=40,
    ) as stream:
        events = [event.type async for event in stream]
        final = await stream.get_final_completion()

    assert "tool_calls.function.arguments.done" in events
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"place", "days"}


async def test_structured_output_is_parsed_by_the_client(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.parse(
        model=SERVED_MODEL, messages=[{"role": "user", "content": WORK}], response_format=Verdict, max_tokens=40
    )
    response = await client.responses.parse(model=SERVED_MODEL, input=WORK, text_format=Verdict, max_output_tokens=40)

    assert isinstance(chat.choices[0].message.parsed, Verdict)
    assert isinstance(response.output_parsed, Verdict)


async def test_a_response_that_calls_a_tool_goes_on_with_its_result(client: AsyncOpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": WORK}]
    async with client.responses.stream(
        model=SERVED_MODEL, input=asked, tools=RESPONSES_TOOLS, tool_choice="required", max_output_tokens=40
    ) as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()
    (call,) = response.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"place", "days"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    given: Any = call.model_dump(exclude={"parsed_arguments"})
    after = await client.responses.create(model=SERVED_MODEL, input=[*asked, given, result], tools=RESPONSES_TOOLS)

    assert kinds.count("response.function_call_arguments.done") == 1
    assert after.output_text


async def test_logprobs_and_usage_come_as_they_are(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=SERVED_MODEL,
        messages=[{"role": "user", "content": WORK}],
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    told = [
        choice.logprobs.content
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs and choice.delta.content
    ]
    assert told
    assert all(content and len(content[0].top_logprobs) == 2 for content in told)
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


async def test_an_engines_own_error_is_the_clients(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await client.chat.completions.create(
            model=SERVED_MODEL, messages=[{"role": "user", "content": WORK}], temperature=-1
        )

    assert "temperature" in str(error.value)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "forecast"}])
async def test_a_message_that_uses_a_tool_goes_on_with_its_result(anthropics: AsyncAnthropic, choice: Any) -> None:
    asked: Any = [{"role": "user", "content": WORK}]
    common: Any = {"model": SERVED_MODEL, "max_tokens": 40, "tools": MESSAGES_TOOLS}
    whole = await anthropics.messages.create(**common, messages=asked, tool_choice=choice)
    async with anthropics.messages.stream(**common, messages=asked, tool_choice=choice) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        block: Any = message.content[0]
        assert block.type == "tool_use"
        assert (block.name, set(block.input)) == ("forecast", {"place", "days"})
        assert message.stop_reason == "tool_use"
    used: Any = whole.content[0].model_dump(include={"type", "id", "name", "input"})
    result: Any = {"type": "tool_result", "tool_use_id": used["id"], "content": "rain"}
    after = await anthropics.messages.create(
        **common,
        messages=[*asked, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}],
    )

    assert after.content[0].type == "text"


async def test_a_failure_that_may_pass_is_tried_again_by_either_client(
    router: RouterUnderTest, engines: Engines, client: AsyncOpenAI, anthropics: AsyncAnthropic
) -> None:
    order(engines.decode[0], fail_requests=2)

    chat = await client.with_options(max_retries=2).chat.completions.create(
        model=SERVED_MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=3
    )
    order(engines.decode[0], fail_requests=2)
    message = await anthropics.with_options(max_retries=2).messages.create(
        model=SERVED_MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=3
    )

    assert chat.choices[0].message.content
    assert message.content
