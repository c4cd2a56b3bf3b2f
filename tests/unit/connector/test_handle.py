from __future__ import annotations

import copy
from enum import IntEnum
from itertools import chain, product
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.errors import InvalidHandle
from kvloop_connector.handle import COLD_PREFILL_PARAMS, KVHandle, from_ranges, to_ranges

BLOCK_SIZE = 16


def params(**changes: Any) -> dict[str, Any]:
    """What a decode engine of vLLM 0.33 returns for 60 tokens, with one field that no version has yet."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[7, 8, 9, 4]],
        "remote_engine_id": "engine-secret",
        "remote_request_id": "request-secret",
        "remote_host": "host-secret",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": 60,
        "remote_blocks_expiry_time": 1234.5,
        "remote_registration_generation": 3,
        "of_a_later_version": {"nested": [1, None]},
        **changes,
    }


def test_a_handle_is_read_by_field() -> None:
    handle = KVHandle.parse(params())

    assert handle.engine_id == "engine-secret"
    assert handle.request_id == "request-secret"
    assert handle.num_tokens == 60
    assert handle.block_ids == ((7, 8, 9, 4),)
    assert handle.kv_groups == 1
    assert handle.group_sizes == [4]


def test_what_came_is_what_is_forwarded() -> None:
    assert KVHandle.parse(params()).params == params()


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
def test_a_field_that_a_pull_needs_must_be_there(name: str) -> None:
    incomplete = params()
    del incomplete[name]

    with pytest.raises(InvalidHandle) as refusal:
        KVHandle.parse(incomplete)

    assert refusal.value.field == name


STRINGS = ("remote_engine_id", "remote_request_id", "remote_host")
NUMBERS = ("remote_port", "remote_num_tokens")
NOT_STRINGS: tuple[Any, ...] = ("", 5, None)
NOT_NUMBERS: tuple[Any, ...] = (-987, "987", 98.7, True, None)
NOT_BLOCKS: tuple[Any, ...] = (
    *(None, [], {}, "987", [987], ["987"], [""], [None]),
    *([[-987]], [["987"]], [[987.0]], [[True]]),
)


@pytest.mark.parametrize(
    ("name", "value"),
    [*product(STRINGS, NOT_STRINGS), *product(NUMBERS, NOT_NUMBERS), *product(["remote_block_ids"], NOT_BLOCKS)],
)
def test_a_refusal_names_the_field_and_never_a_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidHandle) as refusal:
        KVHandle.parse(params(**{name: value}))

    assert refusal.value.field == name
    assert str(refusal.value).startswith(f"kv_transfer_params.{name}: ")
    for shown in ("secret", "987", "98.7"):
        assert shown not in str(refusal.value)


@pytest.mark.parametrize("value", [None, [], "secret", 5])
def test_what_is_not_an_object_is_no_handle(value: Any) -> None:
    with pytest.raises(InvalidHandle) as refusal:
        KVHandle.parse(value)

    assert str(refusal.value) == "kv_transfer_params: not an object"


@given(
    tokens=st.integers(0, 80),
    blocks=st.lists(st.integers(0, 2**20), min_size=1, max_size=6),
    cut=st.integers(-1, 7).map(lambda blocks: blocks * BLOCK_SIZE),
)
def test_a_cut_changes_tokens_and_blocks_together_or_is_refused(tokens: int, blocks: list[int], cut: int) -> None:
    original = params(remote_num_tokens=tokens, remote_block_ids=[blocks])
    before = copy.deepcopy(original)

    if 0 <= cut <= min(tokens, len(blocks) * BLOCK_SIZE):
        trimmed = KVHandle.parse(original).trimmed(cut, BLOCK_SIZE)
        kept = blocks[: cut // BLOCK_SIZE]
        assert trimmed.params == {**before, "remote_num_tokens": cut, "remote_block_ids": [kept]}
    else:
        with pytest.raises(InvalidHandle) as refusal:
            KVHandle.parse(original).trimmed(cut, BLOCK_SIZE)
        assert refusal.value.field == "remote_num_tokens"
    assert original == before


def test_a_cut_inside_a_block_is_refused() -> None:
    with pytest.raises(InvalidHandle, match="not a multiple of the block size 16"):
        KVHandle.parse(params()).trimmed(17, BLOCK_SIZE)


def test_several_groups_cannot_be_cut() -> None:
    with pytest.raises(InvalidHandle, match="2 KV groups"):
        KVHandle.parse(params(remote_block_ids=[[1, 2], [3]])).trimmed(BLOCK_SIZE, BLOCK_SIZE)


@pytest.mark.parametrize("groups", [[[7, 8]], [[7, 8], [3]]])
def test_a_released_handle_pulls_nothing_and_is_otherwise_the_same(groups: list[list[int]]) -> None:
    original = params(remote_block_ids=groups)

    released = KVHandle.parse(original).released()

    assert released.params == {**original, "remote_num_tokens": 0}
    assert original["remote_num_tokens"] == 60


def test_a_cold_prefill_leg_has_no_remote_field_at_all() -> None:
    assert COLD_PREFILL_PARAMS == {"do_remote_decode": True, "do_remote_prefill": False}


def runs() -> st.SearchStrategy[list[int]]:
    """Block ids of a run that goes up or down."""
    up = st.builds(lambda first, count: list(range(first, first + count)), st.integers(0, 50), st.integers(0, 40))
    return up | up.map(lambda ids: ids[::-1])


@given(st.lists(st.integers(0, 30)) | st.lists(runs(), max_size=5).map(lambda parts: [*chain(*parts)]))
def test_ranges_give_back_the_block_ids_in_order(blocks: list[int]) -> None:
    assert from_ranges(to_ranges(blocks)) == blocks


class Number(IntEnum):
    ONE = 1


OTHERS = st.sampled_from([True, -1, -(2**70), 1.0, "1", None, (), Number.ONE])


@given(blocks=st.lists(st.integers(0, 2**70)), other=OTHERS, place=st.integers(0))
def test_one_that_is_no_block_id_is_found_at_any_place(blocks: list[int], other: Any, place: int) -> None:
    place %= len(blocks) + 1
    KVHandle.parse(params(remote_block_ids=[[1], blocks]))

    with pytest.raises(InvalidHandle):
        KVHandle.parse(params(remote_block_ids=[[1], [*blocks[:place], other, *blocks[place:]]]))


def test_neighbouring_blocks_make_one_range() -> None:
    assert to_ranges([5, 6, 7, 2, 3, 9]) == ((5, 3), (2, 2), (9, 1))
    assert to_ranges([9, 8, 7, 6, 2, 1, 2]) == ((9, -4), (2, -2), (2, 1))
