from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest

from tests.truth.turns import (
    LONGEST,
    PAST_ROUTER,
    SLOTS,
    Ask,
    Kind,
    Step,
    Talk,
    answers,
    deal,
    draw,
    follow,
)

SEEDS = range(10)


def plain(step: Step, ask: Ask) -> str:
    return f" the answer to {step.number}"


@cache
def play(seed: int, turns: int, answer: Callable[[Step, Ask], str] = plain) -> list[tuple[Step, dict[int, Talk]]]:
    """The steps of a part, each with the conversations before it."""
    kinds = deal(seed, turns, expiries=1, restarts=1)
    talks: dict[int, Talk] = {}
    played: list[tuple[Step, dict[int, Talk]]] = []
    while kinds:
        step, kinds = draw(seed, len(played), kinds, talks)
        played.append((step, talks))
        talks = follow(step, talks, [answer(step, ask) for ask in step.asks])
    return played


def of(kind: Kind) -> list[tuple[Step, Talk]]:
    """Steps of this kind, each with the conversation that it is about."""
    return [(step, talks[step.about]) for seed in SEEDS for step, talks in play(seed, 60) if step.kind is kind]


def said(talk: Talk) -> list[str]:
    return [message["content"] for message in talk.messages]


class TestDeal:
    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("turns", [40, 41, 100])
    def test_has_as_many_answers_as_are_wanted_and_every_kind(self, seed: int, turns: int) -> None:
        kinds = deal(seed, turns, expiries=1, restarts=1)

        assert sum(map(answers, kinds)) == turns
        assert set(kinds) == set(Kind)

    def test_has_as_many_expiries_and_restarts_as_are_asked_for(self) -> None:
        kinds = Counter(deal(1, 100, expiries=3, restarts=2))

        assert (kinds[Kind.EXPIRE], kinds[Kind.RESTART]) == (3, 2)

    def test_leaves_out_what_goes_past_the_router(self) -> None:
        kinds = deal(1, 100, past_router=False)

        assert sum(map(answers, kinds)) == 100
        assert not PAST_ROUTER & set(kinds)

    def test_another_seed_deals_otherwise(self) -> None:
        assert len({deal(seed, 40) for seed in SEEDS}) == len(SEEDS)


class TestDraw:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_same_seed_and_same_answers_give_the_same_steps(self, seed: int) -> None:
        assert play.__wrapped__(seed, 60, plain) == play(seed, 60)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_what_is_answered_changes_no_choice(self, seed: int) -> None:
        other = play(seed, 60, answer=lambda step, ask: " quite another and a much longer answer")

        def choices(played: list[tuple[Step, dict[int, Talk]]]) -> list[object]:
            return [
                (step.kind, step.slot, step.about, step.choice, [said(ask.talk)[-1] for ask in step.asks])
                for step, _ in played
            ]

        assert choices(other) == choices(play(seed, 60))

    @pytest.mark.parametrize("seed", SEEDS)
    def test_every_request_is_one_that_a_client_may_send(self, seed: int) -> None:
        for step, _ in play(seed, 60):
            assert len(step.asks) == answers(step.kind)
            for ask in step.asks:
                roles = [message["role"] for message in ask.body()["messages"]]
                assert roles[0] == "system"
                assert roles[1:] == ["user", "assistant"] * (len(roles) // 2 - 1) + ["user"]
                assert len(roles) <= LONGEST + 2
                assert all(message["content"] for message in ask.body()["messages"])

    @pytest.mark.parametrize("seed", SEEDS)
    def test_no_more_conversations_than_slots(self, seed: int) -> None:
        assert {slot for _, talks in play(seed, 60) for slot in talks} <= set(range(SLOTS))


class TestKinds:
    def test_growth_leaves_all_that_was_said_and_asks_more(self) -> None:
        for kind in (Kind.GROW, Kind.SPECIAL, Kind.EXPIRE, Kind.RESTART, Kind.FOREIGN_ID):
            for step, talk in of(kind):
                assert said(step.asks[0].talk)[:-1] == said(talk)

    def test_edit_changes_one_user_message_and_nothing_else(self) -> None:
        for step, talk in of(Kind.EDIT):
            now = step.asks[0].talk.messages[:-1]
            changed = [new for new, old in zip(now, talk.messages, strict=True) if new != old]
            assert [message["role"] for message in changed] == ["user"]

    def test_truncation_takes_an_exchange_off_either_end(self) -> None:
        for step, talk in of(Kind.TRUNCATE_HEAD):
            assert said(step.asks[0].talk)[:-1] == [said(talk)[0], *said(talk)[3:]]
        for step, talk in of(Kind.TRUNCATE_TAIL):
            assert said(step.asks[0].talk)[:-1] == said(talk)[:-2]

    def test_compaction_keeps_the_ends(self) -> None:
        for step, talk in of(Kind.COMPACT):
            now = said(step.asks[0].talk)
            assert (now[0], now[3:5]) == (said(talk)[0], said(talk)[-2:])

    def test_stripping_leaves_the_end_of_the_last_answer(self) -> None:
        for step, talk in of(Kind.STRIP_REASONING):
            stripped = said(step.asks[0].talk)[-2]
            assert said(talk)[-1].endswith(stripped)
            assert stripped != said(talk)[-1]

    def test_regeneration_asks_the_same_again(self) -> None:
        for step, talk in of(Kind.REGENERATE):
            assert said(step.asks[0].talk) == said(talk)[:-1]

    def test_fork_goes_on_elsewhere_and_leaves_the_first_as_it_was(self) -> None:
        forks = of(Kind.FORK)
        for step, talk in forks:
            now = said(step.asks[0].talk)[:-1]
            assert now == said(talk)[: len(now)]
            assert step.slot != step.about
        assert {step.asks[0].conversation == talk.name for step, talk in forks} == {True, False}

    def test_foreign_id_is_that_of_another_conversation(self) -> None:
        steps = [item for seed in SEEDS for item in play(seed, 60) if item[0].kind is Kind.FOREIGN_ID]
        for step, talks in steps:
            assert step.asks[0].conversation in {talk.name for slot, talk in talks.items() if slot != step.about}

    def test_other_tenant_comes_with_the_same_id(self) -> None:
        swaps = of(Kind.SWAP_TENANT)
        for step, talk in swaps:
            (ask,) = step.asks
            assert ask.talk.tenant != talk.tenant
            assert ask.conversation == talk.name
        assert {said(step.asks[0].talk)[:-1] == said(talk) for step, talk in swaps} == {True, False}

    def test_race_asks_two_things_of_one_history(self) -> None:
        for step, talk in of(Kind.RACE):
            left, right = (said(ask.talk) for ask in step.asks)
            assert left[:-1] == right[:-1] == said(talk)
            assert left[-1] != right[-1]

    def test_what_the_template_is_given_changes(self) -> None:
        for step, talk in of(Kind.SYSTEM):
            assert said(step.asks[0].talk)[0] != said(talk)[0]
        for step, talk in of(Kind.TOOLS):
            assert step.asks[0].talk.tools != talk.tools
        for step, talk in of(Kind.TEMPLATE):
            assert step.asks[0].talk.arguments != talk.arguments

    def test_special_tokens_are_asked_for_in_one_answer_only(self) -> None:
        for step, _ in of(Kind.SPECIAL) + of(Kind.GROW):
            assert step.asks[0].special == (step.kind is Kind.SPECIAL)

    def test_double_spend_and_forgery_go_past_the_router_and_leave_the_conversation_alone(self) -> None:
        for kind in (Kind.DOUBLE_SPEND, Kind.FORGED):
            for step, talk in of(kind):
                assert step.direct
                assert step.slot is None
                assert said(step.asks[0].talk) == said(talk)[:-1]
                assert (step.forgery is None) == (kind is Kind.DOUBLE_SPEND)
