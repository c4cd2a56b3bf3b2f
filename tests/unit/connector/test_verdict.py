from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.handle import COLD_PREFILL_PARAMS, KVHandle
from kvloop_connector.proof import FIELD, Term
from kvloop_connector.settings import READ_MARGIN_SECONDS
from kvloop_connector.verdict import Decision, Outcome, Prompt, SpentHandles, judge, leg_params
from tests.unit.connector.proofs import (
    ENDS,
    KEY,
    NOW,
    OTHER_KEY,
    TERM,
    Issuer,
    hashes,
    judged,
    prompt,
    reader,
    renewed,
    scheme,
)
from tests.unit.connector.test_digest import common_prefix
from tests.unit.connector.test_proof import json_values

TOKENS = list(range(18))
HANDLE = Issuer(tokens=TOKENS).handle()
REFUSALS = set(Outcome) - {Outcome.READ, Outcome.DIVERGED}

# Few token ids and short blocks, so that sequences often share a prefix and often part in the middle of a block.
block_sizes = st.integers(1, 4)


@st.composite
def related(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A history, and one that continues, edits, cuts or has nothing to do with it."""
    history = draw(st.lists(st.integers(0, 2), min_size=1, max_size=16))
    return history, history[: draw(st.integers(0, 16))] + draw(st.lists(st.integers(0, 2), max_size=16))


class TestCommonPrefix:
    @given(sequences=related(), block_size=block_sizes)
    def test_exactly_the_whole_blocks_that_are_equal_and_computed_are_read(
        self, sequences: tuple[list[int], list[int]], block_size: int
    ) -> None:
        history, new = sequences

        decision = judged(Issuer(tokens=history, block_size=block_size).handle(), new, reader(block_size))

        expected = common_prefix(history[:-1], new) // block_size * block_size
        assert decision == Decision(Outcome.READ if expected else Outcome.DIVERGED, expected, release=expected == 0)

    @given(sequences=related(), block_size=block_sizes, computed=st.integers(0, 24))
    def test_tokens_that_were_computed_and_do_not_exist_are_never_read(
        self, sequences: tuple[list[int], list[int]], block_size: int, computed: int
    ) -> None:
        """A speculating engine says that it computed more tokens than there are."""
        history, new = sequences

        decision = judged(
            Issuer(tokens=history, block_size=block_size, computed=computed).handle(), new, reader(block_size)
        )

        if computed:
            assert decision.tokens == common_prefix(history[:-1][:computed], new) // block_size * block_size

    @given(sequences=related(), allowed=st.integers(0, 20), block_size=block_sizes)
    def test_its_carrier_may_lower_what_is_read(
        self, sequences: tuple[list[int], list[int]], allowed: int, block_size: int
    ) -> None:
        history, new = sequences
        issuer = Issuer(tokens=history, block_size=block_size)
        whole = judged(issuer.handle(), new, reader(block_size)).tokens

        lowered = judged({**issuer.handle(), "remote_num_tokens": allowed}, new, reader(block_size))

        if issuer.bare()["remote_block_ids"] != [[]]:
            assert lowered.tokens == min(whole, allowed // block_size * block_size)

    @given(sequences=related(), block_size=block_sizes, groups=st.integers(2, 3))
    def test_several_groups_are_read_wholly_or_not_at_all(
        self, sequences: tuple[list[int], list[int]], block_size: int, groups: int
    ) -> None:
        history, new = sequences
        issuer = Issuer(tokens=history, block_size=block_size, groups=groups)

        decision = judged(issuer.handle(), new, reader(block_size, groups=groups))

        retained = history[:-1]
        equal = len(new) > len(retained) >= block_size and new[: len(retained)] == retained
        assert decision.tokens == (len(retained) if equal else 0)

    def test_several_groups_are_not_read_in_part_if_the_carrier_lowers_the_count(self) -> None:
        handle = {**Issuer(tokens=TOKENS, groups=2).handle(), "remote_num_tokens": 16}

        assert judged(handle, TOKENS, reader(groups=2)) == Decision(Outcome.DIVERGED, release=True)

    def test_several_groups_are_not_read_where_tokens_were_computed_that_do_not_exist(self) -> None:
        handle = Issuer(tokens=TOKENS, groups=2, computed=21).handle()

        assert judged(handle, [*TOKENS, *range(9)], reader(groups=2)).outcome is Outcome.DIVERGED

    def test_several_groups_are_not_read_where_ids_do_not_say_all_about_the_prompt(self) -> None:
        unclear = Prompt(hashes(TOKENS, 4), len(TOKENS), None)
        handle = Issuer(tokens=TOKENS, groups=2).handle()

        decision = judge(reader(groups=2), handle, unclear, spent=SpentHandles(), now=NOW)

        assert decision.outcome is Outcome.DIVERGED

    def test_what_the_hashes_tell_apart_beside_tokens_counts(self) -> None:
        """Another tenant's salt makes other hashes of the same tokens."""
        assert judged(Issuer(tokens=TOKENS, salt="tenant").handle(), TOKENS).outcome is Outcome.DIVERGED

    def test_reads_cover_whole_kv_blocks_where_hashes_cover_less(self) -> None:
        who = replace(reader(4), block_size=8)

        assert judged(Issuer(tokens=TOKENS).handle(), TOKENS[:15], who).tokens == 8


CHANGED_SEAL = copy.deepcopy(HANDLE)
CHANGED_SEAL[FIELD]["seal"] = CHANGED_SEAL[FIELD]["term"]["seal"]
WITHOUT_HOST = {name: value for name, value in HANDLE.items() if name != "remote_host"}

REFUSED = [
    (dict(COLD_PREFILL_PARAMS), Outcome.NO_HANDLE),
    ({**HANDLE, "remote_block_ids": None}, Outcome.NO_HANDLE),
    (Issuer(tokens=TOKENS).bare(), Outcome.UNPROVEN),
    (WITHOUT_HOST, Outcome.MALFORMED),
    ({**HANDLE, FIELD: None}, Outcome.MALFORMED),
    ({**HANDLE, FIELD: {**HANDLE[FIELD], "format": 2}}, Outcome.MALFORMED),
    (Issuer(tokens=TOKENS, key=OTHER_KEY).handle(), Outcome.FOREIGN_ENGINE),
    ({**HANDLE, "remote_host": "10.9.9.9"}, Outcome.FORGED),
    ({**HANDLE, "remote_block_ids": [[7, 8, 9, 10, 11]]}, Outcome.FORGED),
    ({**HANDLE, "remote_blocks_expiry_time": 10_000.0}, Outcome.FORGED),
    ({**HANDLE, "remote_blocks_expiry_time": None}, Outcome.FORGED),
    ({**HANDLE, FIELD: {**HANDLE[FIELD], "tokens": 99}}, Outcome.FORGED),
    (CHANGED_SEAL, Outcome.FORGED),
    (Issuer(tokens=TOKENS, engine_id="prefill").handle(), Outcome.OWN_ENGINE),
    (Issuer(tokens=TOKENS, revision="9876543210").handle(), Outcome.OTHER_REVISION),
    (Issuer(tokens=TOKENS, groups=2).handle(), Outcome.OTHER_REVISION),
]


def again_term(seconds: float) -> Term:
    """The term after a renewal by ``seconds``."""
    return Term(TERM.deadline + seconds, TERM.expiry + seconds, 1)


class TestRefusals:
    @pytest.mark.parametrize(("handle", "outcome"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
    def test_what_is_not_genuine_makes_the_engine_contact_nobody(
        self, handle: dict[str, Any], outcome: Outcome
    ) -> None:
        decision = judged(handle, TOKENS)

        assert decision == Decision(outcome)
        assert leg_params(decision, handle, reader()) == COLD_PREFILL_PARAMS

    @pytest.mark.parametrize(
        "other",
        [{"algorithm": "sha256"}, {"none_hash": b"other"}],
        ids=["algorithm", "seed"],
    )
    def test_a_genuine_handle_with_other_hashes_is_released(self, other: dict[str, Any]) -> None:
        assert judged(Issuer(tokens=TOKENS, **other).handle(), TOKENS) == Decision(Outcome.OTHER_HASH, release=True)

    def test_a_genuine_handle_with_hashes_of_another_size_is_released(self) -> None:
        assert judged(HANDLE, TOKENS, reader(4, scheme=scheme(2))) == Decision(Outcome.OTHER_HASH, release=True)

    @pytest.mark.parametrize("before", [READ_MARGIN_SECONDS, 1, 0, -1, -1000])
    def test_a_handle_that_ends_before_a_read_would_is_left_alone(self, before: float) -> None:
        assert judged(HANDLE, TOKENS, now=TERM.deadline - before) == Decision(Outcome.EXPIRED)

    def test_a_handle_is_read_until_the_margin(self) -> None:
        assert judged(HANDLE, TOKENS, now=TERM.deadline - READ_MARGIN_SECONDS - 0.001).outcome is Outcome.READ

    def test_no_deadline_lies_beyond_its_end(self) -> None:
        late = Issuer(tokens=TOKENS, term=Term(ENDS + 1000, 5.0, 8)).handle()

        assert judged(late, TOKENS, now=ENDS).outcome is Outcome.EXPIRED

    def test_a_second_use_is_refused_and_frees_nothing(self) -> None:
        spent = SpentHandles()

        assert judged(HANDLE, TOKENS, spent=spent).outcome is Outcome.READ
        assert judged(HANDLE, TOKENS, spent=spent) == Decision(Outcome.SPENT)

    def test_a_renewal_makes_no_second_use_of_it(self) -> None:
        spent = SpentHandles()
        judged(HANDLE, TOKENS, spent=spent)
        again = renewed(KEY, HANDLE, again_term(900))
        # Another one, at a time at which what has ended is forgotten.
        other = Issuer(tokens=TOKENS, request_id="turn-2", term=again_term(900)).handle()
        assert judged(other, TOKENS, spent=spent, now=TERM.deadline + 1).outcome is Outcome.READ

        assert judged(again, TOKENS, spent=spent, now=TERM.deadline + 1) == Decision(Outcome.SPENT)

    def test_what_was_released_counts_as_used(self) -> None:
        spent = SpentHandles()

        assert judged(HANDLE, [9, 9, 9, 9, 9], spent=spent).outcome is Outcome.DIVERGED
        assert judged(HANDLE, TOKENS, spent=spent).outcome is Outcome.SPENT

    def test_a_forgery_does_not_spend_what_it_imitates(self) -> None:
        spent = SpentHandles()
        judged({**HANDLE, "remote_host": "10.9.9.9"}, TOKENS, spent=spent)

        assert judged(HANDLE, TOKENS, spent=spent).outcome is Outcome.READ

    def test_every_refusal_can_be_told(self) -> None:
        told = {outcome for _, outcome in REFUSED}

        assert told | {Outcome.OTHER_HASH, Outcome.EXPIRED, Outcome.SPENT} == REFUSALS

    @given(name=st.sampled_from(sorted({*HANDLE, FIELD})), value=json_values)
    def test_whatever_a_request_carries_there_is_a_decision(self, name: str, value: Any) -> None:
        decision = judged({**HANDLE, name: value}, TOKENS)

        assert decision.tokens in (0, 16)
        leg_params(decision, {**HANDLE, name: value}, reader())


class TestSpentHandles:
    def test_handles_are_forgotten_only_when_nobody_can_come_with_them(self) -> None:
        spent = SpentHandles()
        for number in range(3):
            spent.add(KVHandle.parse(Issuer(tokens=TOKENS, request_id=f"turn-{number}").bare()), 10.0 + number, now=0.0)
        newest = KVHandle.parse(Issuer(tokens=TOKENS, request_id="newest").bare())

        spent.add(newest, 50.0, now=11.0)

        assert len(spent) == 2
        assert spent.has(KVHandle.parse(Issuer(tokens=TOKENS, request_id="turn-2").bare()))


class TestLegParams:
    def test_a_read_names_the_blocks_of_the_proven_tokens_only(self) -> None:
        decision = judged(HANDLE, [*TOKENS[:13], 99, 99, 99, 99])

        params = leg_params(decision, HANDLE, reader())

        assert params["remote_num_tokens"] == 12
        assert params["remote_block_ids"] == [[100, 101, 102]]
        assert params["do_remote_decode"]
        assert not params["do_remote_prefill"]
        assert params["remote_blocks_expiry_time"] == TERM.expiry

    def test_a_read_of_several_groups_names_all_blocks(self) -> None:
        handle = Issuer(tokens=TOKENS, groups=2).handle()
        decision = judged(handle, TOKENS, reader(groups=2))

        params = leg_params(decision, handle, reader(groups=2))

        assert (params["remote_num_tokens"], params["remote_block_ids"]) == (17, handle["remote_block_ids"])

    def test_a_release_reads_nothing_and_names_the_issuer(self) -> None:
        params = leg_params(judged(HANDLE, [5]), HANDLE, reader())

        assert params["remote_num_tokens"] == 0
        assert params["remote_block_ids"] == HANDLE["remote_block_ids"]
        assert params["remote_request_id"] == HANDLE["remote_request_id"]

    def test_nothing_that_is_not_sealed_gets_through(self) -> None:
        handle = {**HANDLE, "do_remote_prefill": True, "_remote_blocks_processed": True}

        params = leg_params(judged(handle, TOKENS), handle, reader())

        assert params.keys() == HANDLE.keys() - {FIELD}
        assert params["do_remote_prefill"] is False


def test_prompts_of_no_whole_block_read_nothing() -> None:
    assert judge(reader(), HANDLE, prompt([0, 1, 2]), spent=SpentHandles(), now=NOW).tokens == 0
