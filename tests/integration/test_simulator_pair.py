"""Simulated engines as real processes: turns, and what becomes of handles when engines disagree, age or go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloop_connector.settings import Role
from tests.harness import client
from tests.harness.engines import Engine, Engines, Kind, start, wait_until
from tests.integration.simulated import QUESTION, advance, continued, leg, pairs, spec, state, text_of, turn


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    specs = [
        spec(Role.PREFILL),
        spec(Role.PREFILL),
        spec(Role.DECODE),
        spec(Role.DECODE, "--sim-version", "0.32.0"),
    ]
    with start(Kind.SIM, tmp_path_factory.mktemp("pair"), specs) as started:
        yield started


def test_says_that_it_is_simulated_but_speaks_as_the_real_version(engines: Engines) -> None:
    decode = engines.decode[0]

    assert client.get(f"{decode.url}/version").json == {"version": "0.33.0", "simulated": True}
    assert "SIMULATED" in decode.log.read_text()


def test_conversation_pulls_back_what_decode_kept(engines: Engines) -> None:
    prefill, other, decode = engines.prefill[0], engines.prefill[1], engines.decode[0]
    first = turn(prefill, decode, QUESTION, cache_salt="conversation")
    handle = first["kv_transfer_params"]
    held = state(decode)["retained"]
    before = other.metrics()

    second = turn(other, decode, continued(QUESTION, first), handle, cache_salt="conversation")

    counted = other.metrics() - before
    assert [record["request_id"] for record in held] == [handle["remote_request_id"]]
    assert (counted.reads, counted.external_hits) == (1, handle["remote_num_tokens"])
    assert second["kv_transfer_params"]["remote_request_id"] != handle["remote_request_id"]
    assert text_of(second) == text_of(turn(prefill, decode, continued(QUESTION, first), cache_salt="fresh"))
    assert {pair["engine_id"] for pair in pairs(other)} == {handle["remote_engine_id"]}


def test_edited_history_gives_the_old_answer_and_poisons_both_caches(engines: Engines) -> None:
    _, other, decode = engines.prefill[0], engines.prefill[1], engines.decode[0]
    first = turn(other, decode, QUESTION, cache_salt="poison")
    old = continued(QUESTION, first)
    edited = [{"role": "user", "content": "told" + QUESTION[0]["content"][4:]}, *old[1:]]
    right_to_old = text_of(turn(other, decode, old, cache_salt="right"))
    right = text_of(turn(other, decode, edited, cache_salt="also right"))

    wrong = text_of(turn(other, decode, edited, first["kv_transfer_params"], cache_salt="poisoned"))
    later = text_of(turn(other, decode, edited, cache_salt="poisoned"))

    assert wrong == right_to_old != right
    assert later == wrong


def test_engines_of_two_versions_refuse_one_another(engines: Engines) -> None:
    prefill, newer, older = engines.prefill[0], engines.decode[0], engines.decode[1]
    before = older.metrics()

    # The decode engine recomputes what it cannot read.
    answer = turn(prefill, older, QUESTION, cache_salt="versions")

    assert text_of(answer) == text_of(turn(prefill, newer, QUESTION, cache_salt="versions"))
    assert (older.metrics() - before).failed_transfers == 1
    refused = leg(prefill, continued(QUESTION, answer), answer["kv_transfer_params"], max_tokens=1, cache_salt="other")
    assert refused.status == 500
    (of_older,) = pairs(older)[:1]
    assert (of_older["accepted"], of_older["reason"]) == (False, "NIXL compatibility hash mismatch")
    assert next(pair for pair in pairs(prefill) if pair["version"] == "0.32.0")["accepted"] is False


@pytest.fixture
def own_pair(tmp_path: Path) -> Iterator[Engines]:
    with start(Kind.SIM, tmp_path, [spec(Role.PREFILL), spec(Role.DECODE)]) as started:
        yield started


def test_time_runs_out_for_a_handle(own_pair: Engines) -> None:
    (prefill,), (decode,) = own_pair.prefill, own_pair.decode
    handle = turn(prefill, decode, QUESTION)["kv_transfer_params"]

    # Before the engines shook hands in this direction, so that the reader knows the decode engine's clock.
    advance(decode, 476)
    declined = leg(prefill, QUESTION, handle, max_tokens=1, cache_salt="late")
    assert declined.status == 500
    assert declined.json["error"]["type"] == "InternalServerError"
    assert prefill.metrics().expired == 1
    assert len(state(decode)["retained"]) == 1

    advance(decode, 5)
    assert state(decode)["retained"] == []
    assert state(decode)["blocks"]["held"] == 0
    assert decode.metrics().expired == 1


def test_handle_outlives_its_issuer_in_vain(own_pair: Engines) -> None:
    (prefill,), (decode,) = own_pair.prefill, own_pair.decode
    first = turn(prefill, decode, QUESTION)
    history = continued(QUESTION, first)
    used = turn(prefill, decode, history, first["kv_transfer_params"])
    decode.restart()

    gone = leg(prefill, continued(history, used), used["kv_transfer_params"], max_tokens=1, cache_salt="gone")
    again = turn(prefill, decode, history)

    assert gone.status == 500
    assert text_of(again) == text_of(used)
    assert again["kv_transfer_params"]["remote_engine_id"] != used["kv_transfer_params"]["remote_engine_id"]


def test_draining_engine_answers_abort_and_stays_for_the_handle(tmp_path: Path) -> None:
    with start(Kind.SIM, tmp_path, [spec(Role.PREFILL), spec(Role.DECODE, "--shutdown-timeout", "300")]) as engines:
        (prefill,), (decode,) = engines.prefill, engines.decode
        first = turn(prefill, decode, QUESTION)
        decode.ask_to_stop()
        assert wait_until(lambda: bool(state(decode)["draining"]))

        refused = leg(decode, QUESTION, None)
        assert refused.status == 200
        assert refused.json["choices"][0]["finish_reason"] == "abort"
        assert refused.json["choices"][0]["message"]["content"] == ""
        assert client.get(f"{decode.url}/health").status == 200

        read = leg(prefill, continued(QUESTION, first), first["kv_transfer_params"], max_tokens=1, cache_salt="last")
        assert read.status == 200
        assert prefill.metrics().reads == 1
        assert wait_until(lambda: has_ended(decode))


def has_ended(engine: Engine) -> bool:
    try:
        engine.check_alive()
    except AssertionError:
        return True
    return False
