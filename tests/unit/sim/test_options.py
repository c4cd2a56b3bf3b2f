"""The command line is vLLM's: what is modelled is followed, what is not is ignored, what vLLM refuses is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvloop_connector.settings import KVTransferSettings, Role, transfer_config_argument
from kvloop_sim.options import Options, UsageError, parse
from kvloop_sim.transfer import Policy

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}


def options(*arguments: str, environment: dict[str, str] | None = None) -> Options:
    return parse(["serve", "org/model", *arguments], environment or {})


def with_config(config: dict[str, Any], *arguments: str) -> Options:
    return options("--kv-transfer-config", json.dumps(config), *arguments)


def test_defaults() -> None:
    parsed = options()

    assert parsed.served_names == ("org/model",)
    assert parsed.port == 8000
    assert parsed.engine.connector is None
    assert parsed.version == "0.33.0"
    assert parsed.stream_handles


def test_how_long_a_model_loads_is_said_in_seconds() -> None:
    assert options().load_seconds == 0
    assert options("--sim-load-seconds", "2.5").load_seconds == 2.5
    with pytest.raises(UsageError, match="--sim-load-seconds"):
        options("--sim-load-seconds", "long")


def test_flags_of_vllm_that_are_not_modelled_are_ignored_with_their_value() -> None:
    parsed = options(
        *("--tensor-parallel-size", "8", "--no-async-scheduling", "--gpu-memory-utilization=0.9"),
        *("-tp", "8", "--port", "81", "--enforce-eager", "--max_model_len", "4K", "--override-x", "-1"),
    )

    assert parsed.port == 81
    assert parsed.max_model_len == 4096


def test_certificates_are_given_as_vllm_takes_them() -> None:
    assert options().certificate_file == ""
    parsed = options("--enable-ssl-refresh", "--ssl-certfile", "/c", "--ssl-keyfile=/k")
    assert (parsed.certificate_file, parsed.key_file) == ("/c", "/k")
    assert options("--ssl-certfile", "/both").key_file == ""
    with pytest.raises(UsageError, match="--ssl-certfile"):
        options("--ssl-keyfile", "/k")


def test_several_served_names() -> None:
    assert options("--served-model-name", "a", "b", "--port", "1").served_names == ("a", "b")


@pytest.mark.parametrize("role", Role)
def test_what_the_contract_renders_is_accepted(role: Role) -> None:
    settings = KVTransferSettings(decoder_kv_blocks_ttl=99, kv_recompute_threshold=7, backends=("LIBFABRIC",))
    environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.9", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700"}
    parsed = options("--kv-transfer-config", transfer_config_argument(settings, role), environment=environment)
    connector = parsed.engine.connector

    assert connector is not None
    assert connector.bidirectional
    assert connector.decoder_ttl == 99
    assert connector.recompute_threshold == 7
    assert connector.backends == ("LIBFABRIC",)
    assert connector.policy is (Policy.FAIL if role is Role.PREFILL else Policy.RECOMPUTE)
    assert (connector.host, connector.port) == ("127.0.0.9", 5700)


def test_engine_id_is_fresh_unless_it_is_given() -> None:
    first, second = (with_config(NIXL).engine.connector for _ in range(2))
    given = with_config({**NIXL, "engine_id": "mine"}).engine.connector

    assert first is not None
    assert second is not None
    assert given is not None
    assert first.engine_id != second.engine_id
    assert given.engine_id == "mine"


@pytest.mark.parametrize(
    "config",
    [
        {**NIXL, "kv_rank": 0},
        {**NIXL, "kv_parallel_size": 2},
        {**NIXL, "kv_conector": "typo"},
        {"kv_connector": "NixlConnector"},
        {**NIXL, "kv_role": "prefill"},
        {**NIXL, "kv_load_failure_policy": "hope"},
        {**NIXL, "kv_connector_extra_config": []},
        {**NIXL, "kv_connector": "OtherConnector"},
        {**NIXL, "kv_connector_module_path": "other.module"},
    ],
)
def test_config_that_vllm_refuses_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        with_config(config)


def test_fields_that_went_with_0_32_are_fine_before() -> None:
    with_config({**NIXL, "kv_rank": 0}, "--sim-version", "0.31.0")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-transfer-config", "{"],
        ["--kv-transfer-config", "3"],
        ["--port", "http"],
        ["--block-size", "0"],
        ["--sim-version", "newest"],
        ["--sim-timing", '{"warp": 9}'],
        ["--shutdown-timeout", "-1"],
        ["--max-model-len", "1000", "--num-gpu-blocks-override", "10"],
    ],
)
def test_command_line_that_cannot_work_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        options(*arguments)


@pytest.mark.parametrize("arguments", [[], ["serve"], ["bench", "x"]])
def test_no_model_no_engine(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(arguments, {})


def test_versions_differ_in_what_they_can_do() -> None:
    old, plugged, older = (
        options("--sim-version", "0.32.0"),
        options("--sim-version", "0.32.0", "--sim-stream-handles"),
        options("--sim-version", "0.31.0"),
    )

    assert (old.stream_handles, old.prompt_token_ids) == (False, True)
    assert plugged.stream_handles
    assert not older.prompt_token_ids


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dtype", "float16"],
        ["--block-size", "32"],
        ["--kv-cache-dtype", "fp8"],
        ["--sim-version", "0.33.1"],
        ["--speculative-config", '{"method": "eagle"}'],
    ],
)
def test_what_kv_must_share_is_in_the_compatibility_digest(arguments: list[str]) -> None:
    assert options(*arguments).compatibility.digest != options().compatibility.digest


def test_what_kv_need_not_share_is_not() -> None:
    assert options("--port", "9", "--max-num-seqs", "3").compatibility.digest == options().compatibility.digest
