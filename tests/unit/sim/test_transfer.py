"""What the connector does with parameters, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.handle import KVHandle
from kvloop_sim import transfer
from kvloop_sim.transfer import ConnectorSettings, EngineFatal, Location, Retention, Start

LOCATED = {
    "remote_engine_id": "them",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2, 3]],
    "remote_num_tokens": 48,
}
HANDLE = {**LOCATED, "do_remote_decode": True, "do_remote_prefill": False}
OF_PREFILL = {**LOCATED, "do_remote_decode": False, "do_remote_prefill": True}


def connector(**changes: Any) -> ConnectorSettings:
    return ConnectorSettings(**{"engine_id": "us", "role": "kv_both", "bidirectional": True, **changes})


def without(params: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != name}


@pytest.mark.parametrize(
    ("params", "prompt", "local", "tokens"),
    [
        (None, 100, 0, 0),
        ({}, 100, 0, 0),
        (HANDLE, 200, 0, 48),
        (HANDLE, 40, 0, 40),
        (HANDLE, 200, 32, 16),
        (HANDLE, 200, 33, 0),
        (HANDLE, 200, 48, 0),
        (without(HANDLE, "remote_num_tokens"), 200, 0, 0),
        (without(HANDLE, "remote_port"), 200, 0, 0),
        ({**HANDLE, "remote_block_ids": []}, 200, 0, 0),
        (OF_PREFILL, 200, 16, 184),
        (OF_PREFILL, 10, 0, 10),
    ],
)
def test_tokens_that_come_from_outside(params: dict[str, Any] | None, prompt: int, local: int, tokens: int) -> None:
    settings = connector(recompute_threshold=16)

    assert transfer.external_tokens(params, prompt_tokens=prompt, local_tokens=local, settings=settings) == tokens


@pytest.mark.parametrize(
    ("params", "external", "bidirectional", "start", "tracked"),
    [
        (None, 0, True, Start.COMPUTE, False),
        ({"do_remote_decode": True}, 0, True, Start.COMPUTE, True),
        (HANDLE, 48, True, Start.READ, True),
        (HANDLE, 0, True, Start.NOTIFY, True),
        (HANDLE, 48, False, Start.HANG, True),
        (HANDLE, 0, False, Start.COMPUTE, True),
        (without(HANDLE, "remote_host"), 0, True, Start.COMPUTE, True),
        (OF_PREFILL, 9, True, Start.READ, True),
        (OF_PREFILL, 9, False, Start.READ, False),
        (OF_PREFILL, 0, True, Start.NOTIFY, True),
        (without(OF_PREFILL, "remote_host"), 9, True, Start.HANG, True),
        ({"neither": 1}, 0, True, Start.COMPUTE, False),
    ],
)
def test_how_a_request_starts(
    params: dict[str, Any] | None, external: int, bidirectional: bool, start: Start, tracked: bool
) -> None:
    plan = transfer.on_allocated(params, external, connector(bidirectional=bidirectional))

    assert (plan.start, plan.tracked) == (start, tracked)


@pytest.mark.parametrize(
    ("params", "external"),
    [
        ({"do_remote_prefill": True}, 9),
        ({**HANDLE, "remote_engine_id": "us"}, 48),
        ({**HANDLE, "remote_engine_id": "us"}, 0),
        ({**HANDLE, "remote_block_ids": [["x"]]}, 48),
        ({**HANDLE, "remote_port": None}, 48),
    ],
)
def test_what_no_engine_survives(params: dict[str, Any], external: int) -> None:
    with pytest.raises(EngineFatal):
        transfer.on_allocated(params, external, connector())


@given(st.lists(st.integers(1, 99), max_size=20), st.integers(0, 25))
def test_remote_blocks_are_trimmed_from_the_end(blocks: list[int], needed: int) -> None:
    if needed > len(blocks):
        with pytest.raises(EngineFatal):
            transfer.trim(blocks, needed)
    else:
        kept = transfer.trim(blocks, needed)
        assert len(kept) == needed
        assert blocks[len(blocks) - needed :] == kept


@pytest.mark.parametrize(
    ("expires", "ahead", "now", "declined"),
    [(100.0, 0.0, 94.9, False), (100.0, 0.0, 95.0, True), (100.0, 50.0, 45.0, True), (None, 0.0, 1e9, False)],
)
def test_late_reads_are_declined(expires: float | None, ahead: float, now: float, declined: bool) -> None:
    location = Location.of({**HANDLE, "remote_blocks_expiry_time": expires})

    assert transfer.is_declined(location, peer_clock_ahead=ahead, now=now, settings=connector()) is declined
    assert not transfer.is_declined(location, peer_clock_ahead=ahead, now=now, settings=connector(bidirectional=False))


@pytest.mark.parametrize("for_decode", [True, False])
@pytest.mark.parametrize("newest", [True, False])
def test_handle_is_what_the_contract_reads(for_decode: bool, newest: bool) -> None:
    params = transfer.handle(
        Retention(30.0, for_decode=for_decode),
        connector(host="10.0.0.1", registration_generation=newest),
        request_id="r",
        block_ids=[4, 5],
        tokens=31,
        deadline=77.0,
        cached_tokens=16,
    )
    handle = KVHandle.parse(params)

    assert (handle.engine_id, handle.request_id, handle.num_tokens, handle.block_ids) == ("us", "r", 31, ((4, 5),))
    assert params["do_remote_prefill"] is for_decode
    assert params["remote_blocks_expiry_time"] == (None if for_decode else 77.0)
    assert ("remote_registration_generation" in params) is newest
