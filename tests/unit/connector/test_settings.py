from __future__ import annotations

import json
from typing import Any

import pytest

from kvloop_connector.errors import ConnectorError, InvalidSettings
from kvloop_connector.settings import (
    HANDLE_TTL_MARGIN_SECONDS,
    OWN_EXTRA_KEYS,
    READ_MARGIN_SECONDS,
    KVTransferSettings,
    Retention,
    Role,
    Verification,
    transfer_config,
    transfer_config_argument,
)


def test_prefill_produces_and_fails_a_read_that_fails() -> None:
    assert transfer_config(KVTransferSettings(), Role.PREFILL) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": True,
            "decoder_kv_blocks_ttl": 480,
            "kv_recompute_threshold": 64,
        },
    }


def test_decode_consumes_and_recomputes_after_a_read_that_fails() -> None:
    assert transfer_config(KVTransferSettings(), Role.DECODE) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": True,
            "decoder_kv_blocks_ttl": 480,
            "kv_recompute_threshold": 64,
        },
    }


def test_backends_and_further_keys_are_passed_on() -> None:
    settings = KVTransferSettings(
        bidirectional_kv_xfer=False,
        decoder_kv_blocks_ttl=31,
        kv_recompute_threshold=0,
        backends=("LIBFABRIC", "UCX"),
        extra={"engine_ttl": 60, "nested": {"a": [1]}},
    )

    assert transfer_config(settings, Role.DECODE)["kv_connector_extra_config"] == {
        "bidirectional_kv_xfer": False,
        "decoder_kv_blocks_ttl": 31,
        "kv_recompute_threshold": 0,
        "backends": ["LIBFABRIC", "UCX"],
        "engine_ttl": 60,
        "nested": {"a": [1]},
    }


@pytest.mark.parametrize("role", Role)
def test_kvloops_connector_is_the_stock_one_with_a_module_a_key_and_a_revision(role: Role) -> None:
    stock = transfer_config(KVTransferSettings(), role)

    config = transfer_config(
        KVTransferSettings(), role, verification=Verification(key_file="/key", revision="0123456789")
    )

    assert config == {
        **stock,
        "kv_connector_module_path": "kvloop_connector.engine.connector",
        "kv_connector_extra_config": {
            **stock["kv_connector_extra_config"],
            "kvloop_key_file": "/key",
            "kvloop_revision": "0123456789",
        },
    }


def test_the_stock_connector_is_told_of_leases_only_what_is_set() -> None:
    plain = transfer_config(KVTransferSettings(), Role.DECODE)
    extra = plain["kv_connector_extra_config"]

    cases: list[tuple[Retention, dict[str, Any]]] = [
        (Retention(), {}),
        (Retention(longest_lease_seconds=600), {"kvloop_longest_lease_seconds": 600}),
        (Retention(share_limit=0.3), {"kvloop_retained_share_limit": 0.3}),
    ]
    for retention, told in cases:
        config = transfer_config(KVTransferSettings(), Role.DECODE, retention=retention)
        assert config == {**plain, "kv_connector_extra_config": {**extra, **told}}


GOLDEN_ARGUMENTS = [
    (
        Role.PREFILL,
        '{"kv_connector":"NixlConnector","kv_connector_extra_config":{"backends":["LIBFABRIC"],'
        '"bidirectional_kv_xfer":true,"decoder_kv_blocks_ttl":480,"kv_recompute_threshold":64},'
        '"kv_load_failure_policy":"fail","kv_role":"kv_producer"}',
    ),
    (
        Role.DECODE,
        '{"kv_connector":"NixlConnector","kv_connector_extra_config":{"backends":["LIBFABRIC"],'
        '"bidirectional_kv_xfer":true,"decoder_kv_blocks_ttl":480,"kv_recompute_threshold":64},'
        '"kv_load_failure_policy":"recompute","kv_role":"kv_consumer"}',
    ),
]


@pytest.mark.parametrize(("role", "golden"), GOLDEN_ARGUMENTS)
def test_the_argument_is_exactly(role: Role, golden: str) -> None:
    assert transfer_config_argument(KVTransferSettings(backends=("LIBFABRIC",)), role) == golden


def test_equal_settings_give_equal_bytes() -> None:
    one = KVTransferSettings(extra={"engine_ttl": 60, "num_threads": 2})
    other = KVTransferSettings(extra={"num_threads": 2, "engine_ttl": 60})

    assert transfer_config_argument(one, Role.PREFILL) == transfer_config_argument(other, Role.PREFILL)


def test_the_roles_differ_in_nothing_but_role_and_failure_policy() -> None:
    settings = KVTransferSettings(backends=("UCX",), extra={"num_threads": 2})
    prefill, decode = (transfer_config(settings, role) for role in Role)

    assert {name for name in prefill if prefill[name] != decode[name]} == {"kv_role", "kv_load_failure_policy"}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("never", ["engine_id", "kv_rank", "kv_parallel_size", "kv_ip", "kv_buffer_size"])
def test_what_breaks_engines_is_never_set(role: Role, never: str) -> None:
    assert never not in json.loads(transfer_config_argument(KVTransferSettings(), role))


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"decoder_kv_blocks_ttl": 0}, "decoderKvBlocksTtlSeconds", "0"),
        ({"decoder_kv_blocks_ttl": 30}, "decoderKvBlocksTtlSeconds", "30"),
        ({"kv_recompute_threshold": -1}, "kvRecomputeThreshold", "-1"),
        *(({"extra": {key: 1}}, f"extraConfig.{key}", key) for key in sorted(OWN_EXTRA_KEYS)),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_remedy(settings: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(InvalidSettings) as refusal:
        KVTransferSettings(**settings)

    assert isinstance(refusal.value, ConnectorError)
    assert refusal.value.field == field
    assert str(refusal.value) == f"{field}: {refusal.value.fault}; {refusal.value.remedy}"
    assert value in str(refusal.value)
    assert refusal.value.remedy.startswith("use ")


def test_the_router_lets_go_before_prefill_declines() -> None:
    assert HANDLE_TTL_MARGIN_SECONDS > READ_MARGIN_SECONDS
