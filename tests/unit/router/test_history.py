"""Which handles a message history may find."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from kvloop_connector.digest import DIGEST_BYTES, DigestKey
from kvloop_router.history import Trail, common_messages, same_conversation, trail
from kvloop_router.request import Api, Request

KEY = DigestKey(b"k" * 32, b"tenant and model")
SYSTEM = ("system", "Be brief.")


def chat(*messages: tuple[str, str], key: DigestKey = KEY) -> Trail:
    body: dict[str, Any] = {"messages": [{"role": role, "content": content} for role, content in messages]}
    return trail(key, Request(Api.CHAT, body, "tiny", None, False))


def completion(prompt: str | list[int]) -> Trail:
    return trail(KEY, Request(Api.COMPLETIONS, {"prompt": prompt}, "tiny", None, False))


messages = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.sampled_from("abc")), min_size=1, max_size=6
)


@given(messages, messages)
def test_trails_share_as_many_digests_as_histories_share_messages(
    left: list[tuple[str, str]], right: list[tuple[str, str]]
) -> None:
    equal = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        equal += 1

    assert common_messages(chat(*left), chat(*right)) == equal


def test_a_history_that_grew_is_the_same_conversation() -> None:
    recorded = chat(SYSTEM, ("user", "one"))

    assert same_conversation(recorded, chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two")))


def test_an_edited_history_is_still_the_same_conversation() -> None:
    recorded = chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two"))

    assert same_conversation(recorded, chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "TWO")))


def test_a_shared_system_prompt_makes_no_conversation() -> None:
    recorded = chat(SYSTEM, ("developer", "Rules."), ("user", "one"))

    assert not same_conversation(recorded, chat(SYSTEM, ("developer", "Rules."), ("user", "other")))
    assert not same_conversation(chat(SYSTEM), chat(SYSTEM))


def test_another_conversations_equal_beginning_is_no_reason_to_take_its_handle() -> None:
    recorded = chat(SYSTEM, ("user", "one"))

    assert not same_conversation(recorded, chat(SYSTEM, ("user", "one")))


def test_an_answer_that_is_made_anew_is_of_the_same_conversation() -> None:
    recorded = chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two"))

    assert same_conversation(recorded, recorded)


def test_the_order_of_keys_in_a_message_means_nothing() -> None:
    one = trail(KEY, Request(Api.CHAT, {"messages": [{"role": "user", "content": "x"}]}, "tiny", None, False))
    other = trail(KEY, Request(Api.CHAT, {"messages": [{"content": "x", "role": "user"}]}, "tiny", None, False))

    assert one == other


def test_another_context_shares_nothing() -> None:
    other = DigestKey(b"k" * 32, b"another tenant")

    assert common_messages(chat(("user", "x")), chat(("user", "x"), key=other)) == 0


def test_a_completion_that_grew_is_found_by_all_of_its_pieces() -> None:
    recorded = completion("word " * 200)

    assert same_conversation(recorded, completion("word " * 200 + "and more"))
    assert not same_conversation(recorded, completion("word " * 150 + "but another end " * 20))


def test_a_completion_of_token_ids_has_a_trail_too() -> None:
    assert same_conversation(completion(list(range(200))), completion(list(range(300))))


def test_a_short_completion_has_no_trail() -> None:
    assert len(completion("short")) == 0
    assert completion("short").whole == completion("short").start == b""


def test_a_trail_says_nothing_of_the_text_and_is_small() -> None:
    recorded = chat(SYSTEM, ("user", "a long secret " * 100))

    assert len(recorded.digests) == 2 * DIGEST_BYTES
