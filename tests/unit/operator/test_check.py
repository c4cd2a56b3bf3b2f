"""What the API server cannot know: the cluster, the operator's settings, and versions."""

from __future__ import annotations

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
    assert found(
        kvTransfer__retainedShareLimit=0.5,
        security__tls={"secretName": "tls"},
        router__handleStore={"url": "valkey://store:6379"},
    ) == [
        "spec.kvTransfer.retainedShareLimit",
        "spec.security.tls",
        "spec.router.handleStore.url",
    ]


def test_the_handshake_cannot_be_switched_off() -> None:
    field = "spec.kvTransfer.extraConfig.enforce_handshake_compat"
    assert found(kvTransfer__extraConfig={"enforce_handshake_compat": "false"}) == [field]
    assert found(kvTransfer__extraConfig={"enforce_handshake_compat": "true", "num_threads": 2}) == []


def test_notes_say_what_an_older_engine_cannot_do() -> None:
    def texts(version: str) -> list[str]:
        parsed = resource(engine__version=version)
        return [note.text for note in notes(parsed, facts_of(parsed))]

    assert texts("0.33.0") == []
    assert len(texts("0.32.0")) == 1
    assert "streamed answers" in texts("0.32.0")[0]
    assert len(texts("0.30.0")) == 3
    assert texts("0.41.0") == ["vLLM 0.41.0 was never run in kvloop's own tests"]
