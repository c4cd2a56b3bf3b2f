"""Kept handles as bytes."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.digest import Retained
from kvloop_connector.handle import to_ranges
from kvloop_connector.proof import HashScheme, SealKey, Term, seal
from kvloop_router import records
from kvloop_router.history import Trail
from kvloop_router.leases import Pace
from tests.unit.router.kept_handles import kept

BLOCK_IDS = st.lists(st.integers(0, 40), max_size=30) | st.lists(st.integers(0, 2**40), max_size=3)


@given(
    groups=st.lists(BLOCK_IDS, min_size=1, max_size=3),
    digests=st.binary(max_size=64),
    exact=st.binary(max_size=8),
    trail=st.builds(Trail, digests=st.binary(max_size=40), shared=st.integers(0, 5), answered=st.booleans()),
    conversation=st.none() | st.text(st.characters()),
    times=st.tuples(*(st.floats(0, 1e9),) * 3),
    pace=st.builds(Pace, st.integers(0, 9), st.floats(0, 1e6), st.floats(0, 1e6)),
    step=st.sampled_from([1, 7, 512]),
    more=st.dictionaries(st.text(max_size=5), st.integers(-5, 5) | st.none() | st.text(max_size=5), max_size=3),
)
def test_a_record_gives_back_what_was_kept(
    groups: list[list[int]],
    times: tuple[float, ...],
    more: dict[str, Any],
    digests: bytes,
    exact: bytes,
    step: int,
    **facts: Any,
) -> None:
    facts["params"] = {**kept("name").params, **more}
    facts["blocks"] = tuple(to_ranges(group) for group in groups)
    facts["retained"] = Retained(digests=digests, tokens=7, exact=exact)
    handle = kept("name", deadline=times[0], since=times[1], ends=times[2], **facts)

    record = records.encode(handle, step=step)

    assert records.decode(record) == handle
    assert [tuple(run) for run in records.runs(record)] == list(handle.runs)
    assert len(record) % step == 0


def sealed() -> dict[str, Any]:
    """The params of a handle of 24,000 tokens that a decode engine with KvloopConnector gives."""
    key = SealKey(b"k" * 32)
    whole = seal(
        key,
        {**kept("name").params, "remote_num_tokens": 24_000, "remote_block_ids": [list(range(1500))]},
        scheme=HashScheme.of(key, algorithm="sha256_cbor", block_size=16, none_hash=bytes(32)),
        revision="a",
        tokens=24_000,
        hashes=[number.to_bytes(32, "big") for number in range(1500)],
        rest=(),
        ends=9e9,
        term=Term(8e9, 1.5),
    )
    return {name: value for name, value in whole.items() if name != "remote_block_ids"}


def test_a_sealed_handles_digests_take_eight_bytes_a_block() -> None:
    handle = kept("name", params=sealed(), blocks=(((0, 1500),),), retained=Retained(b"", 0, b""))

    record = records.encode(handle)

    assert records.decode(record) == handle
    assert len(record) < 1500 * 8 + 2000


@given(
    chain=st.sampled_from(["not base64", "AA", "AAB=", "AAAA=", "AAAA====", "", 3, None])
    | st.text(st.sampled_from("AQg/=- \n"), max_size=13)
    | st.binary(max_size=20).map(lambda digests: b64encode(digests).decode())
)
def test_a_chain_stays_as_it_came_whether_or_not_it_is_one_of_digests(chain: Any) -> None:
    handle = kept("name", params={**kept("name").params, "kvloop": {"chain": chain}})

    assert records.decode(records.encode(handle)) == handle


@pytest.mark.parametrize("ids", [range(1000, 2500), range(2499, 999, -1)])
def test_blocks_in_a_row_take_no_space_of_their_own(ids: range) -> None:
    def size(ids: range) -> int:
        return len(records.encode(kept("name", blocks=(to_ranges(ids),))))

    assert size(ids) < size(ids[:1]) + 8


def test_times_are_on_the_clock_of_who_reads() -> None:
    handle = kept("name", since=1000.0, ends=2000.0)

    read = records.decode(records.encode(handle, ahead=50.0), ahead=30.0)

    assert (read.since, read.deadline, read.ends) == (1020.0, 1470.0, 2020.0)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda record: b"", id="empty"),
        pytest.param(lambda record: bytes([records.VERSION + 1]) + record[1:], id="another version"),
        pytest.param(lambda record: record[:20], id="cut"),
        pytest.param(lambda record: record[:-3], id="without its end"),
        pytest.param(lambda record: record[:5] + b"{}" + record[7:], id="other fields"),
    ],
)
def test_what_cannot_be_read_is_refused(spoil: Any) -> None:
    with pytest.raises(records.UnknownRecord):
        records.decode(spoil(records.encode(kept("name"))))
