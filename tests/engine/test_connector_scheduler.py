"""The connector on vLLM's own classes: what a prefill engine's worker is told, without starting an engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.inside import answer_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Cases = dict[str, Any]
NOBODY = {"matched": 0, "waits": False, "contacted": None, "told": None, "local": None}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """What came of each case of ``scheduler_side.py``."""
    return answer_of("scheduler_side.py", tmp_path_factory.mktemp("connector"))


def reuse(outcome: str, tokens: int = 0) -> dict[str, Any]:
    return {"outcome": outcome, "tokens": tokens}


@pytest.mark.parametrize(
    ("case", "tokens", "matched"),
    [
        # 300 tokens of history, of which 299 are computed: nine whole blocks of 32.
        ("grown", 288, 288),
        ("grown, half cached", 288, 192),
        # Parts from it at token 100; cut at token 150.
        ("edited", 96, 96),
        ("truncated", 128, 128),
        ("same salt", 288, 288),
        ("first use", 288, 288),
    ],
)
def test_the_worker_is_told_to_read_exactly_the_common_blocks(
    cases: Cases, case: str, tokens: int, matched: int
) -> None:
    assert cases[case] == {
        "matched": matched,
        "waits": True,
        "contacted": "127.0.0.1",
        "told": [tokens, [list(range(tokens // 32))]],
        "local": [matched // 32],
        "reuse": reuse("read", tokens),
    }


@pytest.mark.parametrize("case", ["nothing in common", "other salt"])
def test_a_genuine_handle_with_nothing_in_common_is_released_and_not_read(cases: Cases, case: str) -> None:
    told = cases[case]

    assert (told["matched"], told["contacted"], told["local"]) == (0, "127.0.0.1", [])
    assert told["told"][0] == 0
    assert told["reuse"] == reuse("diverged")


@pytest.mark.parametrize("case", ["all cached", "below the threshold"])
def test_what_need_not_be_read_is_released(cases: Cases, case: str) -> None:
    told = cases[case]

    assert (told["matched"], told["contacted"], told["local"]) == (0, "127.0.0.1", [])


def test_a_request_that_ends_before_it_is_scheduled_has_its_handle_released(cases: Cases) -> None:
    told = cases["aborted in the queue"]

    assert (told["contacted"], told["local"], told["reuse"]) == ("127.0.0.1", [], None)


@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        ("second use", "spent"),
        ("forged", "forged"),
        ("stock", "unproven"),
        ("other revision", "other_revision"),
        ("hybrid handle", "other_revision"),
        ("cold", "no_handle"),
    ],
)
def test_whatever_else_comes_makes_the_worker_contact_nobody(cases: Cases, case: str, outcome: str) -> None:
    assert cases[case] == {**NOBODY, "reuse": reuse(outcome)}


def test_a_request_without_parameters_stays_one(cases: Cases) -> None:
    assert cases["no parameters"] == {**NOBODY, "reuse": None}


def test_several_groups_are_read_wholly_or_not_at_all(cases: Cases) -> None:
    grown, edited = cases["hybrid, grown"], cases["hybrid, edited"]

    assert (grown["matched"], grown["reuse"]) == (299, reuse("read", 299))
    # Ten blocks of full attention; of the window's, the last three.
    assert grown["told"] == [299, [list(range(10)), [107, 108, 109]]]
    assert (edited["matched"], edited["local"], edited["reuse"]) == (0, [], reuse("diverged"))


def test_a_turn_that_decode_serves_alone_retains_its_blocks_for_a_time_and_has_a_handle(cases: Cases) -> None:
    alone = cases["decode alone"]

    assert (alone["kept"], alone["in batch"], alone["has a deadline"]) == (True, True, True)
    # 303 tokens, of which 302 are computed.
    assert alone["leg"]["told"] == [288, [list(range(9))]]
    assert alone["leg"]["reuse"] == reuse("read", 288)


@pytest.mark.parametrize("case", ["handle on decode", "decode leg on prefill", "half a decode leg", "neither"])
def test_parameters_for_another_role_are_dropped(cases: Cases, case: str) -> None:
    assert cases["arrival"][case] is None


def test_an_engine_that_lacks_a_setting_does_not_start(cases: Cases) -> None:
    assert "UnsupportedEngine: kv_connector_extra_config.kvloop_revision is missing" in cases["start without revision"]
    assert "UnsupportedEngine: the seal key cannot be read" in cases["start without key"]


def test_an_engine_of_a_version_that_was_not_tried_does_not_start(cases: Cases) -> None:
    refusal = cases["start on another vLLM"]

    assert refusal.startswith(
        "UnsupportedEngine: KvloopConnector was tried with vLLM 0.32.0, 0.33.0, and this is 0.99.0"
    )
    assert refusal.endswith("use such an image, or NixlConnector")
