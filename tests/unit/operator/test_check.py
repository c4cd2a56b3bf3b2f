"""What the API server cannot know: the cluster, the operator's settings, and versions."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_operator.check import check, notes
from kvloop_operator.facts import POD_MONITOR_API, RESOURCE_CLAIM_API, OperatorSettings
from tests.unit.operator.documents import facts_of, resource


def found(settings: OperatorSettings | None = None, **changes: object) -> list[str]:
    parsed = resource(**changes)
    return [fault.field for fault in check(parsed, facts_of(parsed, settings))]


def test_pod_monitors_need_their_api() -> None:
    without = OperatorSettings(apis=frozenset({RESOURCE_CLAIM_API}))
    assert found(without, monitoring__podMonitor=True) == ["spec.monitoring.podMonitor"]
    assert found(monitoring__podMonitor=True) == []


def test_dynamic_allocation_needs_its_api() -> None:
    without = OperatorSettings(apis=frozenset({POD_MONITOR_API}))
    assert found(without, network__efa__mode="DRA") == ["spec.network.efa.mode"]


def test_kv_heads_that_the_operator_knows_count_too() -> None:
    known = OperatorSettings(kv_heads={"Qwen/Qwen3-32B": 4})
    assert found(known, decode__tensorParallelSize=4) == ["spec.prefill.tensorParallelSize"]
    assert found(known) == []
    assert found(known, model__kvHeads=8, decode__tensorParallelSize=4) == []


def test_a_template_that_a_newer_operator_left_behind_is_named() -> None:
    assert found(OperatorSettings(live_template_version="7")) == ["spec.rollout.engineTemplateVersion"]
    assert found(OperatorSettings(live_template_version="7"), rollout__engineTemplateVersion="1") == []


def test_no_efa_on_either_role_is_no_fault() -> None:
    small = {"instanceType": "g6e.4xlarge"}
    assert found(prefill=small, decode=small) == []


def test_a_role_that_gives_up_efa_by_hand_leaves_the_other_alone() -> None:
    assert found(decode__efaInterfaces=0) == ["spec.decode.instanceType"]
    assert found(decode__efaInterfaces=0, prefill__efaInterfaces=0) == []


@pytest.mark.parametrize(
    ("version", "fields"),
    [("0.25.9", ["spec.engine.version"]), ("0.26.0", []), ("0.33.0", []), ("0.40.0", []), ("1.2.0", [])],
)
def test_engines_are_refused_before_the_oldest_version_that_is_safe(version: str, fields: list[str]) -> None:
    assert found(engine__version=version) == fields


def test_fields_that_this_version_does_not_act_on_are_refused_and_not_ignored() -> None:
    asked = {"maxReplicas": 4, "metrics": [{"name": "vllm:num_requests_running", "averageValue": 8}]}
    assert found(decode__autoscaling=asked) == ["spec.decode.autoscaling"]


def test_without_a_cluster_nobody_makes_several_routers_a_server() -> None:
    local = OperatorSettings(discovery="file")
    assert found(local, router__replicas=2) == ["spec.router.replicas"]
    assert found(local, router__replicas=2, router__handleStore={"url": "valkey://store:6379"}) == []
    assert found(router__replicas=2) == []


def test_nor_does_anybody_make_several_workers_one() -> None:
    local = OperatorSettings(discovery="file")
    assert found(local, router__workers=2) == ["spec.router.workers"]
    assert found(local, router__workers=2, router__handleStore={"url": "valkey://store:6379"}) == []
    assert found(router__workers=2) == []


def test_without_a_cluster_nobody_has_the_engines_certificates() -> None:
    changes: Any = {"security__tls": {"engines": {"secretName": "mine"}}}
    assert found(OperatorSettings(discovery="file"), **changes) == ["spec.security.tls.engines.secretName"]
    assert found(**changes) == []


def test_nothing_is_mounted_over_the_engines_certificates() -> None:
    mounted: Any = {
        "decode__volumes": [{"name": "a", "emptyDir": {}}],
        "decode__volumeMounts": [{"name": "a", "mountPath": "/etc/kvloop/tls"}],
    }
    changes: Any = {"security__tls": {"engines": {"secretName": "mine"}}}
    assert found(**mounted) == []
    assert found(**changes, **mounted) == ["spec.decode.volumeMounts[0].mountPath"]


def test_the_handshake_cannot_be_switched_off() -> None:
    field = "spec.kvTransfer.extraConfig.enforce_handshake_compat"
    assert found(kvTransfer__extraConfig={"enforce_handshake_compat": "false"}) == [field]
    assert found(kvTransfer__extraConfig={"enforce_handshake_compat": "true", "num_threads": 2}) == []


def test_notes_say_what_an_older_engine_cannot_do() -> None:
    def texts(version: str) -> list[str]:
        parsed = resource(engine__version=version, kvTransfer__connector="NixlConnector")
        return [note.text for note in notes(parsed, facts_of(parsed))]

    assert texts("0.33.0") == []
    assert len(texts("0.32.0")) == 1
    assert "streamed answers" in texts("0.32.0")[0]
    assert len(texts("0.30.0")) == 3
    assert texts("0.41.0") == ["vLLM 0.41.0 was never run in kvloop's own tests"]


KVLOOP: Any = {"kvTransfer__connector": "KvloopConnector", "engine__version": "0.32.0"}


def test_kvloops_connector_is_an_own_choice_on_the_versions_that_it_was_tried_with() -> None:
    untried = "my-registry/vllm-efa:v0.34.0"

    assert found(**KVLOOP) == []
    assert found(**{**KVLOOP, "engine__version": "0.33.0"}) == []
    assert found(**{**KVLOOP, "engine__version": "0.33.1"}) == ["spec.engine.version"]
    assert found(kvTransfer__connector="KvloopConnector", engine__image=untried) == ["spec.engine.image"]


def test_kvloops_connector_is_refused_where_its_engines_would_not_start() -> None:
    assert found(**KVLOOP, kvTransfer__bidirectionalKvXfer=False) == ["spec.kvTransfer.bidirectionalKvXfer"]
    arguments = ["--enforce-eager", "--prefix-caching-hash-algo=sha256", "-dcp", "2"]
    assert found(**KVLOOP, engine__args=arguments) == ["spec.engine.args[1]", "spec.engine.args[2]"]
    assert found(engine__args=arguments) == []


def test_what_kvloops_connector_mounts_is_free_without_it() -> None:
    for path in ("/opt/kvloop-connector", "/etc/kvloop/seal"):
        mounted: Any = {
            "decode__volumes": [{"name": "own", "emptyDir": {}}],
            "decode__volumeMounts": [{"name": "own", "mountPath": path}],
        }
        assert found(**mounted) == []
        assert found(**KVLOOP, **mounted) == ["spec.decode.volumeMounts[0].mountPath"]


STOCK: Any = {"kvTransfer__connector": "NixlConnector", "engine__version": "0.32.0"}
PLUGIN: Any = {**STOCK, "kvTransfer__enginePlugin": "Enabled"}
OWN_EXTENSION = ["--worker-extension-cls", "mine.Extension"]
TWO_RANKS: Any = {"decode__tensorParallelSize": 4, "decode__dataParallelSize": 2}


def test_streams_carry_handles_by_the_plug_in_with_either_connector() -> None:
    def texts(**changes: object) -> list[str]:
        parsed = resource(**changes)
        return [note.text for note in notes(parsed, facts_of(parsed))]

    assert "enginePlugin: Enabled brings it" in texts(**STOCK)[0]
    assert "enginePlugin" not in texts(**{**STOCK, "engine__version": "0.31.0"})[0]
    for settings in (KVLOOP, PLUGIN):
        assert texts(**settings) == []
        assert texts(**settings, engine__env=[{"name": "VLLM_PLUGINS", "value": "neuron"}]) == []


def test_the_plug_in_is_refused_where_it_would_do_nothing() -> None:
    assert found(**PLUGIN) == found(**{**PLUGIN, "engine__version": "0.33.0"}) == []
    for version in ("0.31.0", "0.33.1", "0.34.0"):
        assert found(**{**PLUGIN, "engine__version": version}) == ["spec.kvTransfer.enginePlugin"]


def test_a_limit_of_leases_is_refused_where_there_are_none() -> None:
    field = "spec.kvTransfer.longestLeaseSeconds"
    for settings in (KVLOOP, PLUGIN):
        assert found(**settings, kvTransfer__longestLeaseSeconds=900) == []
        for obstacle in ({"decode__args": OWN_EXTENSION}, TWO_RANKS):
            assert found(**settings, **obstacle, kvTransfer__longestLeaseSeconds=900) == [field]
    assert found(kvTransfer__longestLeaseSeconds=900) == [field]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"prefill__args": OWN_EXTENSION}, ["spec.prefill.args[0]"]),
        ({"decode__args": ["--enforce-eager", "--worker_extension_cls=mine.X"]}, ["spec.decode.args[1]"]),
        ({"engine__args": OWN_EXTENSION}, ["spec.engine.args[0]", "spec.engine.args[0]"]),
        (TWO_RANKS, ["spec.decode.dataParallelSize"]),
    ],
)
def test_what_stands_in_the_way_of_leases_is_no_fault_and_what_it_costs_is_told(
    changes: dict[str, Any], fields: list[str]
) -> None:
    for settings, told in ((KVLOOP, fields), (PLUGIN, fields), ({"engine__version": "0.33.0"}, [])):
        parsed = resource(**settings, **changes)
        facts = facts_of(parsed)
        assert check(parsed, facts) == []
        assert [note.field for note in notes(parsed, facts)] == told
