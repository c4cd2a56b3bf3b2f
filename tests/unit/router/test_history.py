"""Which handles a message history may find."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.digest import DIGEST_BYTES, DigestKey
from kvloop_router.history import Kinship, Trail, apart, common_messages, kinship, outgrown, trail
from kvloop_router.request import Api, Request

KEY = DigestKey(b"k" * 32, b"tenant and model")
SYSTEM = ("system", "Be brief.")


def chat(*messages: tuple[str, str], key: DigestKey = KEY) -> Trail:
    body: dict[str, Any] = {"messages": [{"role": role, "content": content} for role, content in messages]}
    return trail(key, Request(Api.CHAT, body, "tiny", None, False))


def kin(recorded: Trail, new: Trail, *, named: bool | None = None) -> Kinship:
    return kinship(recorded, new, named=named)


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


@pytest.mark.parametrize("setting", ["tools", "documents", "chat_template"])
def test_the_same_messages_in_another_setting_take_nothing_from_a_conversation(setting: str) -> None:
    def told(**fields: Any) -> Trail:
        body = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}], **fields}
        return trail(KEY, Request(Api.CHAT, body, "tiny", None, False))

    recorded = told(**{setting: ["a"]})

    assert common_messages(recorded, told(**{setting: ["a"]})) == 2
    for other in (told(), told(**{setting: ["b"]})):
        assert common_messages(recorded, other) == 0
        assert kin(recorded, other) is Kinship.NONE
        assert not outgrown(recorded, other, named=None)
        assert not outgrown(recorded, other, named=True)


def test_a_history_that_grew_is_the_same_conversation() -> None:
    recorded = chat(SYSTEM, ("user", "one"))

    assert kin(recorded, chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two"))) is Kinship.SAME


def test_an_edited_history_may_be_the_same_conversation() -> None:
    recorded = chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two"))

    assert kin(recorded, chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "TWO"))) is Kinship.LIKE


def test_a_shared_system_prompt_makes_no_conversation() -> None:
    recorded = chat(SYSTEM, ("developer", "Rules."), ("user", "one"))

    assert not kin(recorded, chat(SYSTEM, ("developer", "Rules."), ("user", "other")))
    assert not kin(chat(SYSTEM), chat(SYSTEM))


def test_another_conversations_equal_beginning_is_no_reason_to_take_its_handle() -> None:
    recorded = chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two"))

    assert not kin(recorded, chat(SYSTEM, ("user", "one")))


def test_the_very_same_question_may_want_another_answer() -> None:
    recorded = chat(SYSTEM, ("user", "one"))

    assert kin(recorded, recorded) is Kinship.LIKE


def test_an_id_selects_whatever_was_said() -> None:
    assert kin(chat(SYSTEM, ("user", "one")), chat(SYSTEM, ("user", "two")), named=True) is Kinship.SAME


def test_under_another_id_nearly_all_that_was_recorded_has_to_be_the_beginning() -> None:
    recorded = chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two"))
    grown = chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"), ("user", "three"))
    edited = chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "TWO"))
    edited_early = chat(SYSTEM, ("user", "one"), ("assistant", "I"), ("user", "two"))

    assert kin(recorded, grown, named=False) is Kinship.LIKE
    assert kin(recorded, edited, named=False) is Kinship.LIKE
    assert not kin(recorded, edited_early, named=False)


def test_threads_that_share_only_a_system_prompt_may_be_apart_under_one_id() -> None:
    recorded = chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two"))

    assert apart(recorded, chat(SYSTEM, ("user", "other")), named=True)
    assert not apart(recorded, chat(SYSTEM, ("user", "one"), ("assistant", "I")), named=True)


@pytest.mark.parametrize(
    ("new", "named", "gone"),
    [
        ([("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"), ("user", "three")], None, True),
        ([("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"), ("user", "three")], True, True),
        ([("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"), ("user", "three")], False, False),
        ([("user", "one"), ("assistant", "1"), ("user", "two")], True, True),
        ([("user", "one"), ("assistant", "1"), ("user", "TWO")], True, False),
        ([("user", "other")], True, False),
    ],
)
def test_what_a_newer_history_holds_all_of_is_outgrown(
    new: list[tuple[str, str]], named: bool | None, gone: bool
) -> None:
    recorded = chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two"))

    assert outgrown(recorded, chat(SYSTEM, *new), named=named) is gone


def test_an_answer_that_is_made_anew_is_of_the_same_conversation() -> None:
    recorded = chat(SYSTEM, ("user", "one"), ("assistant", "1"), ("user", "two"))

    assert kin(recorded, recorded) is Kinship.SAME


def test_the_order_of_keys_in_a_message_means_nothing() -> None:
    one = trail(KEY, Request(Api.CHAT, {"messages": [{"role": "user", "content": "x"}]}, "tiny", None, False))
    other = trail(KEY, Request(Api.CHAT, {"messages": [{"content": "x", "role": "user"}]}, "tiny", None, False))

    assert one == other


def test_another_context_shares_nothing() -> None:
    other = DigestKey(b"k" * 32, b"another tenant")

    assert common_messages(chat(("user", "x")), chat(("user", "x"), key=other)) == 0


def test_a_completion_that_grew_is_found_by_all_of_its_pieces() -> None:
    recorded = completion("word " * 200)

    assert kin(recorded, completion("word " * 200 + "and more"))
    assert not kin(recorded, completion("word " * 150 + "but another end " * 20))


def test_a_completion_of_token_ids_has_a_trail_too() -> None:
    assert kin(completion(list(range(200))), completion(list(range(300))))


def test_a_short_completion_has_no_trail() -> None:
    assert len(completion("short")) == 0
    assert completion("short").whole == completion("short").start == b""


def test_a_trail_says_nothing_of_the_text_and_is_small() -> None:
    recorded = chat(SYSTEM, ("user", "a long secret " * 100))

    assert len(recorded.digests) == 2 * DIGEST_BYTES
