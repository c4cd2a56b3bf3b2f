"""How many tokens a turn has, where the router knows them and where it can only tell by characters."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_connector.digest import DigestKey
from kvloop_router import sizes
from kvloop_router.cost_model import Work
from kvloop_router.history import trail
from kvloop_router.path_choice import Sizes
from kvloop_router.request import Api, Request

KEY = DigestKey(b"k" * 16, b"c")
ASKED: dict[str, Any] = {"role": "user", "content": "a question of forty characters, no more.."}
ANSWERED: dict[str, Any] = {"role": "assistant", "content": "an answer"}
MORE: dict[str, Any] = {"role": "user", "content": "x" * 400}


def chat(*messages: Any, **fields: Any) -> Request:
    return Request(Api.CHAT, {"messages": list(messages), **fields}, "m", None, False)


def completion(prompt: Any) -> Request:
    return Request(Api.COMPLETIONS, {"prompt": prompt}, "m", None, False)


def known(before: Request, now: Request, token_ids: list[int] | None = None, held: int = 64) -> Sizes | None:
    recorded, new = trail(KEY, before), trail(KEY, now)
    return sizes.sizes(now, token_ids, held=held, recorded=recorded, trail=new, rate=0.25)


def test_token_ids_tell_exactly() -> None:
    assert known(chat(ASKED), chat(ASKED, ANSWERED, MORE), [1] * 100) == Sizes(100, 64, 300)


def test_without_them_the_new_messages_are_measured() -> None:
    assert known(chat(ASKED), chat(ASKED, ANSWERED, MORE)) == Sizes(64 + 105, 64, 300)


def test_tool_calls_and_parts_are_measured_as_they_are_written() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "y" * 4_000}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "z" * 4_000}]}
    found = known(chat(ASKED), chat(ASKED, ANSWERED, MORE, call, parts))

    assert found is not None
    assert 2_000 < found.rest < 2_300


def test_a_history_that_differs_has_no_size() -> None:
    assert known(chat(MORE), chat(ASKED, ANSWERED, MORE)) is None
    assert known(chat(ASKED, ANSWERED, MORE), chat(ASKED)) is None


def test_an_answer_is_as_long_as_the_client_lets_it_be() -> None:
    found = known(chat(ASKED), chat(ASKED, ANSWERED, MORE, max_tokens=7))

    assert found is not None
    assert found.answer == 7


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (chat(ASKED, MORE), 110),
        (completion("x" * 400), 100),
        (completion(["x" * 400]), 100),
        (completion([1, 2, 3]), 3),
        (completion([[1, 2, 3]]), 3),
    ],
)
def test_a_prompt_is_estimated(request_: Request, tokens: int) -> None:
    assert sizes.estimated(request_, None, 0.25) == tokens


def test_a_leg_reads_what_is_held_and_computes_the_rest() -> None:
    assert sizes.prefill_work(chat(ASKED), [1] * 100, 64, 0.25) == Work(36, 64, 64)
    assert sizes.prefill_work(chat(ASKED), [1] * 100, 0, 0.25) == Work(100)
