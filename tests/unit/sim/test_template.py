"""The chat template is append-only, unless it strips reasoning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_sim import tokenizer
from kvloop_sim.template import TemplateOptions, UnsupportedContent, render

contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def prompt(messages: list[dict[str, Any]], options: TemplateOptions | None = None) -> list[int]:
    return tokenizer.encode(render(messages, None, options or TemplateOptions()))


@given(st.lists(contents, min_size=1, max_size=4), contents, contents)
def test_prompt_and_answer_are_a_prefix_of_the_next_prompt(said: list[str], answer: str, more: str) -> None:
    messages = [{"role": "user", "content": text} for text in said]
    first = prompt(messages)
    following = prompt([*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": more}])

    assert following[: len(first)] == first
    retained = first + tokenizer.encode(answer) + [tokenizer.MESSAGE_END]
    assert following[: len(retained)] == retained


def test_reasoning_of_earlier_answers_is_dropped_where_the_template_strips() -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>hm hm</think>two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "<think>ah</think>four"},
    ]
    text = render(messages, None, TemplateOptions(strip_reasoning=True))

    assert "hm hm" not in text
    assert "<|im_start|>assistant\ntwo<|im_end|>" in text
    assert "<think>ah</think>four" in text


def test_tools_precede_the_messages_and_change_the_prompt() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = render(messages, [{"type": "function", "function": {"name": "look"}}], TemplateOptions())

    assert text.startswith("<|im_start|>system\nbe brief\n# Tools\n")
    assert text.count("be brief") == 1


def test_tool_calls_and_reasoning_fields_are_rendered() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "reasoning": "why",
        "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}],
    }
    text = render([message], None, TemplateOptions())

    assert "<think>\nwhy\n</think>" in text
    assert '<tool_call>\n{"name": "look", "arguments": "{}"}\n</tool_call>' in text


@pytest.mark.parametrize(
    ("options", "end"),
    [
        (TemplateOptions(), "<|im_start|>assistant\n"),
        (TemplateOptions(add_generation_prompt=False), "hi<|im_end|>\n"),
        (TemplateOptions(continue_final_message=True, add_generation_prompt=False), "hi"),
        (TemplateOptions(enable_thinking=False), "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_end_of_the_prompt(options: TemplateOptions, end: str) -> None:
    assert render([{"role": "user", "content": "hi"}], None, options).endswith(end)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": 3},
        {"content": "no role"},
    ],
)
def test_what_is_not_text_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedContent):
        render([message], None, TemplateOptions())
