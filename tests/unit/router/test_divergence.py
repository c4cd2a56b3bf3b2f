"""What is told of a history that differs from the one before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from kvloop_connector.digest import DigestKey
from kvloop_router import history
from kvloop_router.divergence import Change, How, Tokens, changes, equal_messages, same_conversation
from kvloop_router.outline import Outline, outline
from kvloop_router.request import Api, Request

KEY = DigestKey(b"k" * 32, b"tenant and model")
NOTHING = Tokens()


def of(*messages: dict[str, Any], conversation: str | None = None, key: DigestKey = KEY, **fields: Any) -> Outline:
    request = Request(Api.CHAT, {"messages": list(messages), **fields}, "tiny", conversation, False)
    return outline(key, request, history.trail(key, request))


def completion(prompt: Any) -> Outline:
    request = Request(Api.COMPLETIONS, {"prompt": prompt}, "tiny", None, False)
    return outline(KEY, request, history.trail(KEY, request))


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


SYSTEM = said("system", "Be brief.")
TALK = tuple(said(("user", "assistant")[number % 2], f"piece {number} of a long talk") for number in range(9))
NEXT = said("user", "and now?")


def only(before: Outline, new: Outline, tokens: Tokens = NOTHING, *, reasoned: bool | None = None) -> Change:
    (change,) = changes(before, new, tokens, reasoned=reasoned)
    return change


@pytest.mark.parametrize(
    ("new", "how", "message"),
    [
        ((SYSTEM, *TALK[:3], said("user", "other"), *TALK[4:], NEXT), How.EDITED, 5),
        ((said("system", "Be kind."), *TALK, NEXT), How.EDITED, 1),
        ((SYSTEM, *TALK[:4], said("user", "other")), How.EDITED, 6),
        ((SYSTEM, said("user", "in short: ..."), *TALK[6:], NEXT), How.COMPACTED, 2),
        ((SYSTEM, said("user", "in short: ..."), NEXT), How.COMPACTED, 2),
        ((SYSTEM, *TALK[4:], NEXT), How.REMOVED, 2),
        ((SYSTEM, *TALK[:3], said("user", "by the way"), *TALK[3:], NEXT), How.INSERTED, 5),
        ((SYSTEM, TALK[1], TALK[0], *TALK[2:], NEXT), How.REORDERED, 2),
        ((SYSTEM, *TALK[:5]), How.SHORTENED, 7),
    ],
    ids=lambda value: value.value if isinstance(value, How) else "",
)
def test_how_a_history_was_changed_and_where(new: tuple[dict[str, Any], ...], how: How, message: int) -> None:
    change = only(of(SYSTEM, *TALK), of(*new))

    assert (change.how, change.message) == (how, message)


def test_a_message_that_lost_or_changed_what_is_not_its_text() -> None:
    call = [{"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}]
    thought = said("assistant", "yes", reasoning_content="hm", tool_calls=call)

    def after(changed: dict[str, Any]) -> Change:
        return only(of(TALK[0], thought, TALK[2]), of(TALK[0], changed, TALK[2], TALK[3], NEXT))

    stripped = {name: value for name, value in thought.items() if name != "reasoning_content"}
    assert after(stripped) == Change(
        How.REASONING_STRIPPED, 2, "assistant", "its reasoning is gone; its text is the same"
    )
    assert after({**thought, "reasoning_content": "ah"}).how is How.REASONING_CHANGED
    assert after({**thought, "tool_calls": [{**call[0], "id": "2"}]}).how is How.TOOL_CALLS_CHANGED
    assert after({**thought, "name": "me"}).how is How.EDITED


def test_what_is_rendered_in_front_of_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    before = of(*TALK, tools=tools)
    new = of(*TALK, said("assistant", "an answer"), NEXT, chat_template_kwargs={"enable_thinking": False})

    hows = [change.how for change in changes(before, new, NOTHING, reasoned=None)]

    assert hows == [How.TOOLS_CHANGED, How.TEMPLATE_ARGUMENTS_CHANGED]


ANSWERED = (of(*TALK), of(*TALK, said("assistant", "an answer"), NEXT))


@pytest.mark.parametrize(
    ("tokens", "reasoned", "how"),
    [
        (NOTHING, None, None),
        (Tokens(prompt_before=100, retained=150, proven=144), False, None),
        (Tokens(prompt_before=100, retained=150, proven=96), False, How.ANSWER_CHANGED),
        (Tokens(prompt_before=100, retained=150, proven=96), True, How.REASONING_STRIPPED),
        (Tokens(prompt_before=100, retained=150, proven=48), None, How.RENDERED_OTHERWISE),
    ],
)
def test_what_became_of_the_answer_is_judged_by_its_tokens(
    tokens: Tokens, reasoned: bool | None, how: How | None
) -> None:
    found = changes(*ANSWERED, tokens, reasoned=reasoned)

    assert [change.how for change in found] == ([how] if how else [])


def test_an_answer_that_was_left_out() -> None:
    assert only(of(TALK[0]), of(TALK[0], NEXT)).how is How.ANSWER_MISSING


def test_the_same_request_again_has_no_change() -> None:
    assert changes(of(*TALK), of(*TALK), NOTHING, reasoned=None) == []


def test_of_a_completions_prompt_the_place_is_told() -> None:
    text = "a" * 600

    assert changes(completion(text), completion(text + "b"), NOTHING, reasoned=None) == []
    assert "character 256 on" in only(completion(text), completion(text[:300] + "c" * 300)).detail


def test_which_turns_are_of_one_conversation() -> None:
    before = of(SYSTEM, *TALK, conversation="mine")

    surely = same_conversation(before, of(SYSTEM, NEXT, conversation="mine"))
    by_history = same_conversation(before, of(SYSTEM, *TALK, NEXT))
    by_the_same_messages = same_conversation(before, of(SYSTEM, said("user", "in short"), *TALK[6:], NEXT))

    assert surely > by_history > by_the_same_messages > 0
    assert same_conversation(before, of(SYSTEM, *TALK, conversation="yours")) == 0
    assert same_conversation(before, of(SYSTEM, NEXT)) == 0
    assert same_conversation(before, of(SYSTEM, *TALK, key=DigestKey(b"k" * 32, b"another tenant"))) == 0


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abtextype", max_size=4), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.builds(
        lambda role, content, more: {"role": role, "content": content, **more},
        st.sampled_from(["system", "user", "assistant", "tool", "a role of one's own"]),
        values,
        st.dictionaries(st.sampled_from(["reasoning", "tool_calls", "name"]), values, max_size=2),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=50)
@given(messages, messages, st.booleans())
def test_any_two_histories_can_be_compared(
    left: list[dict[str, Any]], right: list[dict[str, Any]], reasoned: bool
) -> None:
    before, new = of(*left), of(*right)
    found = changes(before, new, NOTHING, reasoned=reasoned)

    assert (equal_messages(before, new) < len(left)) <= bool(found)
    assert changes(before, before, NOTHING, reasoned=reasoned) == []


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=4, max_size=40), st.integers(1, 400))
def test_an_outline_holds_nothing_of_a_text_and_takes_29_bytes_a_message(text: str, times: int) -> None:
    made = of(said("user", text * times), said("assistant", [{"type": "text", "text": text}]), conversation=text)

    assert len(made.packed) == 2 * 29
    assert text.encode() not in made.packed + made.trail.digests + made.conversation
    assert [message.length for message in made.messages] == [len(text) * times, len(text)]
