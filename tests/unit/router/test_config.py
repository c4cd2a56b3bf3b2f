"""The router's configuration file: what is refused, and how it is said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvloop_router.config import Config, load, parse
from kvloop_router.errors import InvalidConfig
from kvloop_router.secret_files import read_digest_key, read_token

COMPLETE: dict[str, Any] = {
    "listen": {"host": "127.0.0.1", "port": 8000},
    "admin": {"host": "127.0.0.1", "port": 8081, "tokenFile": "/etc/kvloop/secret/admin-token"},
    "model": {"id": "Qwen/Qwen3-32B", "servedName": "qwen3-32b"},
    "discovery": {"file": "/var/run/kvloop/engines.json"},
    "digestKeyFile": "/etc/kvloop/secret/digest-key",
    "handleTtlSeconds": 450,
    "kvTransfer": {
        "connector": "NixlConnector",
        "bidirectionalKvXfer": True,
        "kvRecomputeThreshold": 64,
        "decoderKvBlocksTtlSeconds": 480,
    },
    "engine": {"promptTokenIds": True, "streamHandles": True, "multiGroupReuse": True},
    "cacheSalt": True,
    "sessionHeaders": ["X-Session-ID"],
    "limits": {"bodyBytes": 33554432},
    "timeouts": {"connectSeconds": 5, "prefillSeconds": 600, "drainSeconds": 600},
    "handleStore": {"kind": "memory", "maxHandles": 20000},
    "canary": {"enabled": True},
    "truthSampling": {"everyNthWarmTurn": 1000, "leastToleranceNats": 0.5},
    "pathChoice": {"mode": "Auto", "decodeDelayWeight": 1.0},
    "reuse": True,
    "apiKeysFile": None,
}


def parsed(document: dict[str, Any], environment: dict[str, str] | None = None) -> Config:
    return parse(yaml.safe_dump(document), environment or {})


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(COMPLETE)
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    place[last] = value
    return document


def test_a_complete_file_is_taken_as_it_is() -> None:
    config = parsed(COMPLETE)

    assert config.model.served_name == "qwen3-32b"
    assert config.kv_transfer.kv_recompute_threshold == 64
    assert config.session_headers == ("X-Session-ID",)
    assert config.timeouts.connect_seconds == 5.0


def test_what_has_a_default_can_be_left_out() -> None:
    needed = ("admin", "model", "discovery", "digestKeyFile", "engine")

    config = parsed({name: COMPLETE[name] for name in needed})

    assert config.handle_ttl_seconds == 450
    assert config.handle_store.max_handles == 20_000
    assert config.reuse
    assert config.truth_sampling.every_nth_warm_turn == 1000


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        pytest.param("resuse", True, "resuse", id="an unknown key"),
        pytest.param("timeouts.prefilSeconds", 1, "timeouts.prefilSeconds", id="an unknown key of a section"),
        pytest.param("reuse", "yes", "reuse", id="a wrong type"),
        pytest.param("listen.port", 70000, "listen.port", id="a port out of range"),
        pytest.param("handleStore.kind", "etcd", "handleStore.kind", id="an unknown kind of store"),
        pytest.param("handleStore.kind", "valkey", "handleStore: url and kind", id="a shared store without a URL"),
        pytest.param("handleStore", {"url": "valkey://h"}, "handleStore: url and kind", id="a URL for the memory"),
        pytest.param("handleStore", {"kind": "valkey", "url": "http://h"}, "handleStore.url", id="no such scheme"),
        pytest.param("handleStore", {"kind": "valkey", "url": "valkey://h/x"}, "handleStore.url", id="no database"),
        pytest.param("handleStore", {"kind": "valkey", "url": "valkey://h:99999"}, "handleStore: ", id="no port"),
        pytest.param("kvTransfer.decoderKvBlocksTtlSeconds", 0, "decoderKvBlocksTtlSeconds", id="no retention"),
        pytest.param("handleTtlSeconds", 451, "handleTtlSeconds", id="a handle that outlives its blocks"),
        pytest.param("truthSampling.everyNthWarmTurn", -1, "everyNthWarmTurn", id="less than no turn"),
        pytest.param("truthSampling.leastToleranceNats", 0, "leastToleranceNats", id="no tolerance"),
        pytest.param("pathChoice.mode", "warm", "pathChoice.mode", id="an unknown way to choose"),
        pytest.param("pathChoice.decodeDelayWeight", -1, "decodeDelayWeight", id="a weight below nothing"),
        pytest.param("model.servedName", "", "model.servedName", id="an empty name"),
        pytest.param("discovery", {}, "exactly one", id="no discovery"),
        pytest.param(
            "discovery.kubernetes", {"deployment": "d", "namespace": "n"}, "exactly one", id="two discoveries"
        ),
        pytest.param(
            "discovery", {"kubernetes": {"deployment": "d"}}, "discovery.kubernetes.namespace", id="no namespace"
        ),
        pytest.param(
            "discovery", {"kubernetes": {"namespace": "n"}}, "discovery.kubernetes.deployment", id="no deployment"
        ),
    ],
)
def test_a_fault_is_refused_and_names_its_field(path: str, value: Any, named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        parsed(changed(path, value))


def test_every_fault_is_named_at_once() -> None:
    document = changed("reuse", 1) | {"other": 1}

    with pytest.raises(InvalidConfig) as refused:
        parsed(document)

    assert "reuse" in str(refused.value)
    assert "other" in str(refused.value)


@pytest.mark.parametrize("text", ["[", "- a list", "text"])
def test_a_file_that_is_no_map_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig):
        parse(text, {})


def test_a_host_is_expanded_from_the_environment_as_kubernetes_does() -> None:
    document = changed("listen.host", "$(POD_IP)")

    assert parsed(document, {"POD_IP": "127.0.10.5"}).listen.host == "127.0.10.5"
    assert parsed(document).listen.host == "$(POD_IP)"


@pytest.mark.parametrize(("given", "namespace"), [({}, "mine"), ({"namespace": "theirs"}, "theirs")])
def test_pods_are_looked_for_in_the_routers_own_namespace_unless_told_otherwise(
    given: dict[str, str], namespace: str
) -> None:
    document = changed("discovery", {"kubernetes": {"deployment": "demo", **given}})

    pods = parsed(document, {"POD_NAMESPACE": "mine"}).discovery.kubernetes

    assert pods is not None
    assert (pods.deployment, pods.namespace) == ("demo", namespace)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="absent"):
        load(tmp_path / "absent.yaml", {})


@pytest.mark.parametrize(
    ("content", "key"),
    [
        pytest.param(b"ab" * 16 + b"\n", bytes.fromhex("ab" * 16), id="hexadecimal text"),
        pytest.param(b"0123456789abcdefgh", b"0123456789abcdefgh", id="bytes as they are"),
        pytest.param(b"ab" * 12, b"ab" * 12, id="hexadecimal text too short to be a key"),
        pytest.param(bytes(range(100, 200)), bytes(range(100, 164)), id="more bytes than a key has"),
    ],
)
def test_a_digest_key_is_hexadecimal_or_raw(tmp_path: Path, content: bytes, key: bytes) -> None:
    (tmp_path / "key").write_bytes(content)

    assert read_digest_key(tmp_path / "key") == key


def test_secrets_that_protect_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("too short")
    (tmp_path / "empty").write_text("\n")

    with pytest.raises(InvalidConfig, match="digestKeyFile"):
        read_digest_key(tmp_path / "short")
    with pytest.raises(InvalidConfig, match="tokenFile"):
        read_token(tmp_path / "empty")
