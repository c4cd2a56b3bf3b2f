"""Conversations that nobody goes on with: how much of a decode engine's memory they may keep from a new request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from kvloop_connector.lease_requests import RELEASE_PATH
from tests.contract.legs import (
    BLOCK,
    COMPLETIONS,
    Answer,
    Legs,
    answer_of,
    fresh_salt,
    holds_nothing,
    ids_of,
    ids_request,
)
from tests.contract.test_leases import outcomes
from tests.harness import client
from tests.harness.engines import Engine, Engines, start_beside, wait_until
from tests.harness.fixtures import KVLOOP_SPECS, REAL_ENGINES, RETAINED_SHARE

pytestmark = [*REAL_ENGINES, pytest.mark.long]

CONVERSATIONS = 100
SHORT = BLOCK + 8
"""Tokens of a prompt that, with its answer, takes two blocks: all of them together most of an engine's."""

OF_ONE = 2 / 255
"""What one of them retains of an engine's memory; the first block of 256 is never used."""

LONG = 75 * BLOCK
SIDE_BY_SIDE = 8


@pytest.fixture(scope="module")
def capped(vllm_kvloop_engines: Engines) -> Iterator[Engine]:
    """A decode engine that keeps to a share of its memory for what it retains, for as long as those that do not."""
    spec = replace(KVLOOP_SPECS[2], transfer_config={"kvloop_retained_share_limit": RETAINED_SHARE})
    with start_beside(vllm_kvloop_engines, [spec]) as more:
        yield more.decode[0]


@pytest.fixture
def legs() -> Iterator[Legs]:
    """Sends legs; in the end decode is told by name what it need not retain, and retains nothing."""
    made = Legs()
    yield made
    for decode in {decode for _, _, decode in made.issued.values()}:
        names = [name for name, (_, _, issuer) in made.issued.items() if issuer is decode]
        assert client.post(decode.url + RELEASE_PATH, {"remote_request_ids": names}).status == 200
        assert wait_until(partial(holds_nothing, decode))


def test_with_a_cap_a_new_long_request_waits_for_nobody(
    vllm_kvloop_engines: Engines, capped: Engine, legs: Legs
) -> None:
    prefill = vllm_kvloop_engines.prefill[0]
    answers = idle_conversations(legs, prefill, capped)
    assert wait_until(lambda: RETAINED_SHARE - 0.05 < capped.metrics().kv_usage <= RETAINED_SHARE)
    retained = capped.metrics().kv_usage
    assert 0 < len(legs.issued) < len(answers), "what would pass the cap has no handle"

    prompt = ids_of(prefill, "a new long request", LONG)
    answer = legs.complete(prefill, capped, prompt, salt=fresh_salt())

    assert answer.params is None
    assert wait_until(lambda: capped.metrics().kv_usage == retained), "what is retained is retained still"
    assert capped.metrics().expired == 0
    elsewhere = legs.complete(prefill, vllm_kvloop_engines.decode[0], prompt, salt=fresh_salt())
    assert answer.answer_ids == elsewhere.answer_ids


def test_without_one_it_waits_for_memory_until_handles_are_released(vllm_kvloop_engines: Engines, legs: Legs) -> None:
    prefill, decode = vllm_kvloop_engines.prefill[0], vllm_kvloop_engines.decode[0]
    before = decode.metrics()
    answers = idle_conversations(legs, prefill, decode)
    assert len(legs.issued) == len(answers)
    assert decode.metrics().kv_usage > 2 * RETAINED_SHARE

    prompt, salt = ids_of(prefill, "a new long request", LONG), fresh_salt()
    of_prefill = legs.prefill_ids(prefill, prompt, salt=salt)
    body = ids_request(prompt, salt, return_token_ids=True, kv_transfer_params=of_prefill)
    with client.sent(decode.url + COMPLETIONS, body) as reply:
        assert wait_until(lambda: decode.metrics().waiting_for_memory == 1)
        assert outcomes(decode, RELEASE_PATH, answers[0]) == ["released"]
        assert wait_until(lambda: (decode.metrics() - before).kv_usage < (CONVERSATIONS - 0.5) * OF_ONE)
        assert decode.metrics().waiting_for_memory == 1, "two blocks are not enough"
        assert set(outcomes(decode, RELEASE_PATH, *answers[1 : CONVERSATIONS // 2])) == {"released"}
        answer = legs.account(answer_of([reply().json]), prefill, decode)

    assert set(outcomes(decode, RELEASE_PATH, *answers[CONVERSATIONS // 2 :])) == {"released"}
    assert answer.answer_ids == legs.complete(prefill, decode, prompt, salt=fresh_salt()).answer_ids


def idle_conversations(legs: Legs, prefill: Engine, decode: Engine) -> list[Answer]:
    """The first turns of conversations of which no second one comes."""

    def first_turn(number: int) -> Answer:
        prompt = ids_of(prefill, f"idle conversation {number}", SHORT)
        return legs.complete(prefill, decode, prompt, salt=fresh_salt())

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(first_turn, range(CONVERSATIONS)))
