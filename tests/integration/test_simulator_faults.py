"""Faults that a test orders of a simulated engine, and the ends that no test orders."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.handle import COLD_PREFILL_PARAMS
from kvloop_connector.settings import Role
from tests.harness import client
from tests.harness.engines import SERVED_MODEL, Engine, Engines, Kind, start, wait_until
from tests.integration.simulated import CHAT, QUESTION, continued, leg, order, spec, state, turn
from tests.integration.test_simulator_pair import has_ended


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with start(Kind.SIM, tmp_path_factory.mktemp("faults"), [spec(Role.PREFILL), spec(Role.DECODE)]) as started:
        yield started


@pytest.fixture
def decode(engines: Engines) -> Iterator[Engine]:
    yield engines.decode[0]
    order(engines.decode[0])


def is_unhealthy(engine: Engine) -> bool:
    try:
        return client.get(f"{engine.url}/health").status == 503
    except OSError:
        return True


def stream_body(**fields: Any) -> dict[str, Any]:
    return {"model": SERVED_MODEL, "messages": QUESTION, "max_tokens": 8, "ignore_eos": True, **fields}


def test_requests_fail_as_often_as_ordered(decode: Engine) -> None:
    order(decode, fail_requests=2)

    assert [leg(decode, QUESTION, None).status for _ in range(3)] == [500, 500, 200]


def test_connection_is_reset_in_the_middle_of_a_stream(decode: Engine) -> None:
    order(decode, reset_after_chunks=3)

    with client.stream(decode.url + CHAT, stream_body()) as payloads, pytest.raises(ConnectionResetError):
        list(payloads)

    assert wait_until(lambda: state(decode)["blocks"]["held"] == 0)


def test_stream_stalls_until_the_client_leaves(decode: Engine) -> None:
    order(decode, stall_after_chunks=2)

    with client.stream(decode.url + CHAT, stream_body()) as payloads:
        assert len([next(payloads), next(payloads)]) == 2
        assert state(decode)["running"] == 1

    assert wait_until(lambda: state(decode)["running"] == 0)


def test_lost_notification_leaves_the_blocks_with_their_owner(engines: Engines) -> None:
    (prefill,), (decode,) = engines.prefill, engines.decode
    first = turn(prefill, decode, QUESTION, cache_salt="lost")
    order(prefill, lose_notifications=1)

    leg(prefill, continued(QUESTION, first), first["kv_transfer_params"], max_tokens=1, cache_salt="reader")

    (record,) = [
        record
        for record in state(decode)["retained"]
        if record["request_id"] == first["kv_transfer_params"]["remote_request_id"]
    ]
    assert record["state"] == "taken"


def test_unknown_fault_is_400(decode: Engine) -> None:
    assert client.post(f"{decode.url}/sim/faults", {"melt": 1}).status == 400


def test_every_answer_says_that_it_is_simulated(decode: Engine) -> None:
    host, port = decode.url.removeprefix("http://").split(":")
    for path in ("/health", "/v1/models", "/nowhere"):
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request("GET", path)
        with connection.getresponse() as answer:
            assert answer.headers["X-Kvloop-Simulated"] == "1"
        connection.close()


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"do_remote_prefill": True}, id="partial"),
        pytest.param({**COLD_PREFILL_PARAMS, "own": True}, id="its own handle"),
    ],
)
def test_what_kills_an_engine_shows_in_health_and_then_ends_it(tmp_path: Path, params: dict[str, Any]) -> None:
    with start(Kind.SIM, tmp_path, [spec(Role.PREFILL), spec(Role.DECODE, "--sim-dead-seconds", "2")]) as engines:
        (prefill,), (decode,) = engines.prefill, engines.decode
        if "own" in params:
            params = turn(prefill, decode, QUESTION)["kv_transfer_params"]

        killed = leg(decode, QUESTION, params)

        assert killed.status == 500
        assert wait_until(lambda: is_unhealthy(decode))
        assert wait_until(lambda: has_ended(decode))
        assert "AssertionError" in decode.log.read_text()


def test_partial_parameters_kill_even_where_the_model_is_unknown(tmp_path: Path) -> None:
    with start(Kind.SIM, tmp_path, [spec(Role.DECODE, "--sim-dead-seconds", "0")]) as engines:
        (decode,) = engines.decode

        refused = leg(decode, QUESTION, {"do_remote_prefill": True}, model="another")

        assert refused.status == 404
        assert wait_until(lambda: has_ended(decode))


def test_crash_ends_the_process_at_once(tmp_path: Path) -> None:
    with start(Kind.SIM, tmp_path, [spec(Role.DECODE)]) as engines:
        (decode,) = engines.decode

        with pytest.raises((ConnectionError, http.client.HTTPException)):
            client.post(f"{decode.url}/sim/crash", {})

        assert wait_until(lambda: has_ended(decode))


@pytest.mark.parametrize(
    "config", ["{", "{}x", '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_rank": 0}']
)
def test_configuration_that_vllm_refuses_ends_with_a_message(config: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kvloop_sim", "serve", "m", "--kv-transfer-config", config],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
        check=False,
    )

    assert ended.returncode == 2
    assert "--kv-transfer-config" in ended.stderr


def test_port_in_use_ends_the_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "kvloop_sim", "serve", "m", "--host", "127.0.0.1", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    assert ended.returncode != 0
    assert "address already in use" in ended.stderr


def test_chunks_of_a_stream_are_json_and_end_with_done(decode: Engine) -> None:
    with client.stream(decode.url + CHAT, stream_body(stream_options={"include_usage": True})) as payloads:
        *chunks, last = list(payloads)

    assert last == "[DONE]"
    assert json.loads(chunks[-1])["usage"]["completion_tokens"] == 8
