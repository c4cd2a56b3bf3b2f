"""The oracle of what could be reused, by its rules one at a time, and with a mistake planted in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from tests.truth import oracle
from tests.truth.oracle import Gone, Rules, Turn, reusable

BLOCK = 4
RULES = Rules(block_size=BLOCK, threshold=8, router_ttl=30, engine_ttl={"long": 55, "short": 7})
TEXT = list(range(100, 200))


def turn(sent: float, prompt: list[int], **changes: object) -> Turn:
    """A turn of one second, the router's clock being the engines'."""
    made = Turn(
        tenant=0,
        conversation=None,
        prompt=prompt,
        answer=[1, 2, 3, 4],
        decode="long",
        process="p1",
        sent=sent,
        ended=sent + 1,
        router_sent=sent,
        router_ended=sent + 1,
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # by name, one field or another


def after(first: Turn, sent: float, **changes: object) -> Turn:
    """A turn that grows on an earlier one."""
    return turn(sent, [*first.prompt, *first.answer, *TEXT[50:60]], **changes)


FIRST = turn(0, TEXT[:30])
WHOLE = 32
"""30 of the prompt and 4 of the answer, less the last, in blocks of 4."""


def test_growth_reuses_all_whole_blocks_but_the_last_token() -> None:
    assert reusable([FIRST, after(FIRST, 2)], [], RULES) == [0, WHOLE]


@pytest.mark.parametrize("edited", range(30))
def test_edit_reuses_the_blocks_before_it(edited: int) -> None:
    prompt = [*TEXT[:edited], 7, *TEXT[edited + 1 : 30]]
    expected = edited // BLOCK * BLOCK

    assert reusable([FIRST, turn(2, prompt)], [], RULES)[1] == (expected if expected >= RULES.threshold else 0)


def test_prompt_that_ends_within_what_is_retained_reuses_its_own_blocks() -> None:
    assert reusable([FIRST, turn(2, TEXT[:18])], [], RULES)[1] == 16


def test_threshold_counts_from_its_own_value_on() -> None:
    assert reusable([FIRST, turn(2, TEXT[:8])], [], RULES)[1] == 8
    assert reusable([FIRST, turn(2, TEXT[:8])], [], replace(RULES, threshold=9))[1] == 0


def test_handle_has_one_use() -> None:
    assert reusable([FIRST, turn(2, TEXT[:30]), turn(4, TEXT[:30])], [], RULES)[1:] == [28, 28]
    assert reusable([FIRST, turn(2, TEXT[:30]), turn(2, TEXT[:30])], [], RULES)[1:] == [28, 0]


def test_longest_is_taken_and_the_shorter_one_stays() -> None:
    longer = turn(0.5, TEXT[:40], answer=[9, 9])
    turns = [FIRST, longer, turn(3, TEXT[:50]), turn(3, TEXT[:50])]

    assert reusable(turns, [], RULES)[2:] == [40, 28]


def test_newest_answer_under_an_id_is_the_one_that_counts() -> None:
    of_one_id = [replace(FIRST, conversation="a"), turn(2, TEXT[60:90], conversation="a")]
    third = turn(4, TEXT[:30])

    assert reusable([*of_one_id, third], [], RULES)[2] == 0
    assert reusable([*of_one_id, third], [], replace(RULES, ids_believed=False))[2] == 28
    assert reusable([of_one_id[0], replace(of_one_id[1], conversation="b"), third], [], RULES)[2] == 28
    assert reusable([of_one_id[0], replace(of_one_id[1], answer=[]), third], [], RULES)[2] == 28
    assert reusable([of_one_id[0], replace(of_one_id[1], tenant=1), third], [], RULES)[2] == 28


def test_ids_that_differ_are_two_conversations() -> None:
    named, other = replace(FIRST, conversation="a"), turn(2, TEXT[:30], conversation="b")

    assert reusable([named, other], [], RULES)[1] == 0
    assert reusable([named, other], [], replace(RULES, ids_believed=False))[1] == 28
    assert reusable([named, replace(other, conversation="a")], [], RULES)[1] == 28
    assert reusable([FIRST, other], [], RULES)[1] == 28
    assert reusable([named, replace(other, conversation=None)], [], RULES)[1] == 28


def test_answer_that_left_no_handle_gives_nothing() -> None:
    assert reusable([replace(FIRST, answer=[]), after(FIRST, 2)], [], RULES)[1] == 0


@pytest.mark.parametrize(
    ("sent", "changes", "gone", "reused"),
    [
        (2, {"tenant": 1}, [], 0),
        (0.5, {}, [], 0),
        (30.9, {}, [], WHOLE),
        (31, {}, [], 0),
        (2, {"router_sent": 31}, [], 0),
        (2, {}, [Gone("p1", 1.5)], 0),
        (2, {}, [Gone("p1", 2.5)], WHOLE),
        (2, {}, [Gone("p2", 1.5)], WHOLE),
    ],
)
def test_handle_is_used_while_it_is_alive(
    sent: float, changes: dict[str, object], gone: list[Gone], reused: int
) -> None:
    assert reusable([FIRST, after(FIRST, sent, **changes)], gone, RULES)[1] == reused


def test_engine_that_forgets_sooner_than_the_router_believes() -> None:
    first = replace(FIRST, decode="short")

    assert reusable([first, after(first, 7.9)], [], RULES)[1] == WHOLE
    assert reusable([first, after(first, 8)], [], RULES)[1] == 0


def chance_turns(seed: int) -> list[Turn]:
    """Turns of two tenants and two engines that often begin alike."""
    chance = Random(seed)
    turns = []
    for number in range(30):
        shared = chance.choice([0, 10, 20, 30, 40])
        prompt = TEXT[:shared] + [chance.randrange(1000, 2000) for _ in range(chance.randrange(1, 12))]
        turns.append(
            turn(
                number * chance.uniform(0.5, 1.5),
                prompt,
                tenant=chance.choice([0, 0, 1]),
                decode=chance.choice(["long", "short"]),
            )
        )
    return turns


@pytest.mark.parametrize("seed", range(30))
def test_never_more_than_the_prompt_and_always_in_blocks(seed: int) -> None:
    turns = chance_turns(seed)
    found = reusable(turns, [Gone("p1", 15)], RULES)

    assert all(tokens % BLOCK == 0 and tokens <= len(each.prompt) for tokens, each in zip(found, turns, strict=True))
    assert all(tokens == 0 or tokens >= RULES.threshold for tokens in found)


MISTAKES: dict[str, tuple[str, Callable[..., object]]] = {
    "the last token counts": (
        "common_blocks",
        lambda earlier, turn, block: oracle_common([*earlier.prompt, *earlier.answer], turn.prompt, block),
    ),
    "no whole blocks": (
        "common_blocks",
        lambda earlier, turn, block: oracle_common([*earlier.prompt, *earlier.answer][:-1], turn.prompt, 1),
    ),
    "answers are forgotten": (
        "common_blocks",
        lambda earlier, turn, block: oracle_common(earlier.prompt, turn.prompt, block),
    ),
    "everything lives for ever": ("_usable", lambda earlier, turn, ended, rules: earlier.ended <= turn.sent),
    "an id has one handle, and none is given": ("_superseded", lambda turn, turns: turn.ended),
    "nothing lives": ("_usable", lambda earlier, turn, ended, rules: False),
}


def oracle_common(retained: list[int], prompt: list[int], block: int) -> int:
    common = next((i for i, (a, b) in enumerate(zip(retained, prompt, strict=False)) if a != b), None)
    return (min(len(retained), len(prompt)) if common is None else common) // block * block


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    first = turn(0, TEXT[:27], answer=[1, 2, 3, 4, 5])
    turns = [first, after(first, 2), turn(40, TEXT[:27]), turn(50, TEXT[:27], tenant=1)]
    right = reusable(turns, [], RULES)
    assert right == [0, 28, 0, 0]
    monkeypatch.setattr(oracle, *MISTAKES[mistake])

    assert reusable(turns, [], RULES) != right
