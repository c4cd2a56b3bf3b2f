"""What KvloopConnector makes of handles that vLLM's own connector reads, hangs on or dies of: it serves the request,
reads what is proven and nothing else, and says what became of the handle.

The counterpart of ``test_wrong_reuse`` and of what ``test_release`` marks as failures of the stock connector: the same
cases, the handles sent untouched. Turns of a conversation share a salt here: to the connector another salt is another
history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvloop_connector.handle import KVHandle
from kvloop_connector.proof import FIELD, HashScheme, Proof, SealKey, Term, seal
from tests.contract.conftest import Pair, with_kvloops_connector
from tests.contract.legs import (
    BLOCK,
    Answer,
    Legs,
    common_prefix,
    continued,
    fresh_salt,
    holds_nothing,
    story,
    tokenize,
)
from tests.contract.test_wrong_reuse import History, edited, regenerated, shortened
from tests.harness.engines import KV_REVISION, wait_until

pytestmark = with_kvloops_connector

Forgery = Callable[[KVHandle, KVHandle], dict[str, Any]]


class TestHistoryThatDiffers:
    @pytest.mark.parametrize("change", [edited, shortened, regenerated])
    def test_untouched_handle_gives_the_right_text(self, pair: Pair, legs: Legs, change: History) -> None:
        messages, salt = story(f"a history that is {change.__name__}"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        history = change(messages, first)
        common = common_prefix(tokenize(pair.decode, history), first.retained_ids) // BLOCK * BLOCK
        before = pair.other_prefill.metrics()

        answer = legs.turn(pair.other_prefill, pair.decode, history, first.handle.params, cache_salt=salt)

        counted = pair.other_prefill.metrics() - before
        assert answer.reuse == {"outcome": "read" if common else "diverged", "tokens": common}
        assert counted.external_hits == (common if common >= 64 else 0)
        assert answer.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids

    def test_nothing_wrong_stays_in_the_prefix_caches(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("no poisoned cache"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        history = edited(messages, first)
        legs.turn(pair.other_prefill, pair.decode, history, first.handle.params, cache_salt=salt)

        later = legs.cold(pair.other_prefill, pair.decode, history, cache_salt=salt)

        assert later.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids

    def test_other_salt_is_another_history_and_decode_frees(self, pair: Pair, legs: Legs) -> None:
        messages = story("another tenant")
        first = legs.cold(pair.prefill, pair.decode, messages)
        before = pair.other_prefill.metrics()

        answer = legs.turn(
            pair.other_prefill, pair.decode, continued(messages, first), first.handle.params, cache_salt=fresh_salt()
        )

        assert answer.reuse == {"outcome": "diverged", "tokens": 0}
        assert (pair.other_prefill.metrics() - before).reads == 0
        legs.settle()
        assert holds_nothing(pair.decode)


class TestHandleThatIsRefused:
    def test_spent_by_the_same_engine(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("spent twice at one engine"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        history = continued(messages, first)
        legs.turn(pair.other_prefill, pair.decode, history, first.handle.params, cache_salt=salt)

        self.refused(pair, legs, first.handle.params, history, salt, outcome="spent")

    def test_expired(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("too late for the connector"), fresh_salt()
        before = pair.forgetful_decode.metrics()
        first = legs.cold(pair.prefill, pair.forgetful_decode, messages, cache_salt=salt)
        assert wait_until(lambda: (pair.forgetful_decode.metrics() - before).expired >= 1, seconds=60)
        legs.issued.clear()

        self.refused(pair, legs, first.handle.params, continued(messages, first), salt, outcome="expired")

    @pytest.mark.parametrize(
        "forgery",
        [
            lambda own, other: {**own.params, "remote_host": "127.254.254.254"},
            lambda own, other: {**own.params, "remote_port": 5999},
            lambda own, other: {**own.params, "remote_engine_id": "somebody-else"},
            lambda own, other: {**own.params, "remote_block_ids": other.params["remote_block_ids"]},
            lambda own, other: {**other.params, FIELD: own.params[FIELD]},
            lambda own, other: {
                **own.params,
                "remote_blocks_expiry_time": own.params["remote_blocks_expiry_time"] + 1000,
            },
            lambda own, other: dict(own.trimmed(BLOCK, BLOCK).params),
        ],
        ids=["host", "port", "engine id", "block ids", "another handle's proof", "deadline", "trimmed"],
    )
    def test_forged_and_the_handle_itself_stays_good(self, pair: Pair, legs: Legs, forgery: Forgery) -> None:
        messages, salt = story("a forged handle"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        other = legs.cold(pair.prefill, pair.decode, story("somebody else's blocks"))
        history = continued(messages, first)

        self.refused(pair, legs, forgery(first.handle, other.handle), history, salt, outcome="forged")
        legs.account(other, pair.prefill, pair.decode)
        again = legs.turn(pair.other_prefill, pair.decode, history, first.handle.params, cache_salt=salt)

        assert again.reuse is not None
        assert again.reuse["outcome"] == "read"

    def test_sealed_with_another_key(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("a foreign handle"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)

        foreign = sealed_anew(first.handle, SealKey(b"x" * 32))
        self.refused(pair, legs, foreign, continued(messages, first), salt, outcome="foreign_engine")
        legs.account(first, pair.prefill, pair.decode)

    def test_issued_without_a_proof(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("a stock engine's handle"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        bare = {name: value for name, value in first.handle.params.items() if name != FIELD}

        self.refused(pair, legs, bare, continued(messages, first), salt, outcome="unproven")
        legs.account(first, pair.prefill, pair.decode)

    def refused(
        self, pair: Pair, legs: Legs, params: dict[str, Any] | Any, history: Any, salt: str, *, outcome: str
    ) -> None:
        before = pair.other_prefill.metrics()

        answer = legs.turn(pair.other_prefill, pair.decode, history, params, cache_salt=salt)

        counted = pair.other_prefill.metrics() - before
        assert answer.reuse == {"outcome": outcome, "tokens": 0}
        assert (counted.reads, counted.external_hits, counted.failed_transfers) == (0, 0, 0)
        assert answer.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids


class TestParametersForTheOtherRole:
    """The stock connector ends its engine on the first two, and retains blocks for ever on the last."""

    def test_decode_leg_on_prefill(self, pair: Pair, legs: Legs) -> None:
        messages = story("misled to prefill")
        reply = legs.prefill(pair.prefill, messages, cache_salt=fresh_salt())

        misled = legs.prefill(pair.other_prefill, messages, reply.json["kv_transfer_params"], cache_salt=fresh_salt())

        assert misled.status == 200
        legs.decode(pair.prefill, pair.decode, messages, reply.json["kv_transfer_params"])
        pair.other_prefill.check_alive()

    @pytest.mark.parametrize("which", ["its own handle", "half a leg", "something"])
    def test_on_decode(self, pair: Pair, legs: Legs, which: str) -> None:
        messages = story("misled to decode")
        first = legs.cold(pair.prefill, pair.decode, messages)
        params = {
            "its own handle": dict(first.handle.params),
            "half a leg": {"do_remote_prefill": True},
            "something": {"something": 1},
        }[which]

        answer = legs.decode(pair.prefill, pair.decode, messages, params, cache_salt=fresh_salt())

        assert answer.params is None
        assert answer.answer_ids == first.answer_ids
        legs.settle()
        assert holds_nothing(pair.decode)


class TestProof:
    @pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
    def test_decode_seals_a_digest_for_each_whole_block(self, pair: Pair, legs: Legs, caching: bool) -> None:
        decode = pair.decode if caching else pair.forgetful_decode
        assert decode.spec.prefix_caching is caching

        answer = legs.cold(pair.prefill, decode, story("what is sealed"))

        proof = Proof.parse(answer.handle.params[FIELD])
        assert proof.tokens == len(answer.retained_ids) - 1
        assert len(proof.chain) // 8 == proof.tokens // BLOCK
        assert proof.revision == KV_REVISION
        assert proof.scheme.startswith(f"sha256_cbor:{BLOCK}:")

    def test_streamed_and_whole_answers_prove_the_same_tokens(self, pair: Pair, legs: Legs) -> None:
        # The chain is keyed and depends on the tokens and the salt alone.
        messages, salt = story("the same proof"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        second = legs.cold(pair.other_prefill, pair.decode, messages, cache_salt=salt)

        assert chain(first) == chain(second)
        assert chain(first) != chain(legs.cold(pair.prefill, pair.decode, messages))


class TestCountThatIsLowered:
    @pytest.mark.parametrize(("asked", "read"), [(64, 64), (65, 64), (95, 64), (96, 96)])
    def test_no_more_is_read_than_the_router_allows(self, pair: Pair, legs: Legs, asked: int, read: int) -> None:
        messages, salt = story("no more than allowed"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        history = continued(messages, first)
        before = pair.other_prefill.metrics()

        answer = legs.turn(
            pair.other_prefill,
            pair.decode,
            history,
            {**first.handle.params, "remote_num_tokens": asked},
            cache_salt=salt,
        )

        assert answer.reuse == {"outcome": "read", "tokens": read}
        assert (pair.other_prefill.metrics() - before).external_hits == read

    def test_raising_it_reads_no_more_than_is_retained(self, pair: Pair, legs: Legs) -> None:
        messages, salt = story("more than there is"), fresh_salt()
        first = legs.cold(pair.prefill, pair.decode, messages, cache_salt=salt)
        history = continued(messages, first)

        answer = legs.turn(
            pair.other_prefill,
            pair.decode,
            history,
            {**first.handle.params, "remote_num_tokens": 10_000},
            cache_salt=salt,
        )

        assert answer.reuse == {"outcome": "read", "tokens": first.handle.num_tokens // BLOCK * BLOCK}
        assert answer.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids


def chain(answer: Answer) -> bytes:
    return Proof.parse(answer.handle.params[FIELD]).chain


def sealed_anew(handle: KVHandle, key: SealKey) -> dict[str, Any]:
    """The handle as an engine of another deployment would have sealed it."""
    proof = Proof.parse(handle.params[FIELD])
    algorithm, block_size, seed = proof.scheme.split(":")
    return seal(
        key,
        handle.params,
        scheme=HashScheme(algorithm, int(block_size), seed),
        revision=proof.revision,
        tokens=proof.tokens,
        hashes=[bytes([number]) for number in range(proof.tokens // BLOCK)],
        rest=None,
        ends=proof.ends,
        term=Term(proof.term.deadline, proof.term.expiry),
    )
