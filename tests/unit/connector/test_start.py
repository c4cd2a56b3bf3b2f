from __future__ import annotations

from typing import Any

import pytest

from kvloop_connector.engine.start import checked_start
from kvloop_connector.errors import UnsupportedEngine
from kvloop_connector.lease_ranks import renewable_seconds
from kvloop_connector.settings import (
    HASH_ALGORITHM,
    KEY_FILE,
    LONGEST_LEASE,
    RETAINED_SHARE,
    REVISION,
    KVTransferSettings,
    Retention,
    Role,
    Verification,
    transfer_config,
)

EXTRA = {"bidirectional_kv_xfer": True, REVISION: "0123456789", KEY_FILE: "/key"}
FILES = {"/key": b"k" * 32 + b"\n", "/short": b"k" * 15 + b"\n"}
GOOD: dict[str, Any] = {
    "version": "0.32.0+cpu",
    "kv_role": "kv_producer",
    "extra": EXTRA,
    "algorithm": "sha256_cbor",
    "context_parallel": 1,
}


def read_key(path: str) -> bytes:
    try:
        return FILES[path]
    except KeyError:
        raise FileNotFoundError(2, "No such file or directory", path) from None


@pytest.mark.parametrize(("kv_role", "role"), [("kv_producer", Role.PREFILL), ("kv_consumer", Role.DECODE)])
def test_an_engine_that_was_tried_starts(kv_role: str, role: Role) -> None:
    start = checked_start(**{**GOOD, "kv_role": kv_role}, read_key=read_key)

    assert (start.role, start.revision, start.key.secret) == (role, "0123456789", b"k" * 32)
    assert start.retained_share is None


@pytest.mark.parametrize(
    ("change", "cause", "remedy"),
    [
        ({"version": "0.34.0"}, "0.34.0", "use such an image, or NixlConnector"),
        ({"version": "0.32.1"}, "0.32.1", "use such an image, or NixlConnector"),
        ({"version": "dev"}, "dev", "use such an image, or NixlConnector"),
        ({"kv_role": "kv_both"}, "kv_both", "kv_producer"),
        ({"kv_role": None}, "None", "kv_producer"),
        ({"algorithm": "sha256"}, "sha256", "--prefix-caching-hash-algo sha256_cbor"),
        ({"algorithm": "xxhash_cbor"}, "xxhash_cbor", "--prefix-caching-hash-algo sha256_cbor"),
        ({"context_parallel": 2}, "context parallelism", "NixlConnector"),
        ({"extra": {**EXTRA, "bidirectional_kv_xfer": False}}, "bidirectional_kv_xfer", "NixlConnector"),
        ({"extra": {**EXTRA, REVISION: ""}}, REVISION, "equal on both roles"),
        ({"extra": {**EXTRA, KEY_FILE: None}}, KEY_FILE, "equal content on both roles"),
        ({"extra": {**EXTRA, KEY_FILE: "/none"}}, "/none", "No such file"),
        ({"extra": {**EXTRA, LONGEST_LEASE: 479}}, LONGEST_LEASE, "(480) or more"),
        ({"extra": {**EXTRA, LONGEST_LEASE: "1 h"}}, "1 h", "a number of seconds"),
        ({"extra": {**EXTRA, LONGEST_LEASE: float("inf")}}, LONGEST_LEASE, "a number of seconds"),
        ({"extra": {**EXTRA, RETAINED_SHARE: 1.5}}, RETAINED_SHARE, "from 0 to 1"),
        ({"extra": {**EXTRA, RETAINED_SHARE: "30%"}}, "30%", "from 0 to 1"),
        ({"extra": {**EXTRA, KEY_FILE: "/short"}}, "/short", "16 to 64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_other_is_refused_with_the_cause_and_the_remedy(change: dict[str, Any], cause: str, remedy: str) -> None:
    with pytest.raises(UnsupportedEngine) as raised:
        checked_start(**{**GOOD, **change}, read_key=read_key)

    assert cause in str(raised.value)
    assert remedy in str(raised.value)
    assert b"k" * 15 not in str(raised.value).encode()


@pytest.mark.parametrize(
    ("extra", "seconds"),
    [
        ({}, 3600 - 480),
        ({"decoder_kv_blocks_ttl": 8}, 3592),
        ({"decoder_kv_blocks_ttl": 7200}, 0),
        ({"decoder_kv_blocks_ttl": 100, LONGEST_LEASE: 100}, 0),
        ({"decoder_kv_blocks_ttl": 100, LONGEST_LEASE: 150.5}, 50.5),
    ],
)
def test_renewals_add_as_much_as_is_left_of_the_longest_lease(extra: dict[str, Any], seconds: float) -> None:
    assert renewable_seconds(extra) == seconds


@pytest.mark.parametrize("role", Role)
def test_an_engine_with_the_settings_that_kvloop_renders_starts(role: Role) -> None:
    verification = Verification(key_file="/key", revision="0123456789")
    config = transfer_config(KVTransferSettings(), role, verification=verification)

    start = checked_start(
        version="0.32.0",
        kv_role=config["kv_role"],
        extra=config["kv_connector_extra_config"],
        algorithm=HASH_ALGORITHM,
        context_parallel=1,
        read_key=read_key,
    )

    assert (start.role, start.revision) == (role, "0123456789")
    assert (start.renewable, start.retained_share) == (3600 - 480, None)


@pytest.mark.parametrize("role", Role)
def test_an_engine_keeps_to_the_retention_that_kvloop_renders(role: Role) -> None:
    verification = Verification(key_file="/key", revision="0123456789")
    retention = Retention(longest_lease_seconds=600, share_limit=0.3)
    config = transfer_config(KVTransferSettings(), role, verification=verification, retention=retention)

    start = checked_start(**{**GOOD, "extra": config["kv_connector_extra_config"]}, read_key=read_key)

    assert (start.renewable, start.retained_share) == (120, 0.3)
