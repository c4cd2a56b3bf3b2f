"""Facts follow from the resource and the operator's settings."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvloop_operator.api.v1alpha1 import Accelerator, EFAMode
from kvloop_operator.engine_versions import EngineVersion, capabilities, version_of, version_of_tag
from kvloop_operator.facts import SecretMaterial
from kvloop_operator.instance_types import instance_type, node_label_values
from tests.unit.operator.documents import facts_of, resource


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.33.0", EngineVersion(0, 33, 0)),
        ("registry:5000/vllm:0.32.1-efa", EngineVersion(0, 32, 1)),
        ("vllm:0.33", EngineVersion(0, 33, 0)),
        ("vllm:v0.33.0rc1", EngineVersion(0, 33, 0)),
        ("vllm:v0.33.0@sha256:abc", EngineVersion(0, 33, 0)),
        ("vllm:latest", None),
        ("vllm", None),
        ("registry:5000/vllm", None),
        ("registry:5000/0.33.0/vllm", None),
        ("vllm@sha256:0.33.0", None),
        ("vllm:cuda12.8-v0.33.0", None),
        ("vllm:20261101", None),
    ],
)
def test_the_version_comes_from_the_start_of_the_tag(image: str, version: EngineVersion | None) -> None:
    assert version_of_tag(image) == version


def test_a_version_beside_the_tag_wins() -> None:
    facts = facts_of(resource(engine__image="neuron:2.27.1", engine__version="v0.32.0"))
    assert facts.engine is not None
    assert facts.engine.version == EngineVersion(0, 32)
    assert not facts.version_from_tag


@pytest.mark.parametrize(
    ("version", "can"),
    [
        # bidirectional, several KV groups, prompt_token_ids, handles on streams
        ("0.21.0", (False, False, False, False)),
        ("0.26.0", (True, False, False, False)),
        ("0.31.0", (True, True, False, False)),
        ("0.32.0", (True, True, True, False)),
        ("0.33.0", (True, True, True, True)),
        ("1.0.0", (True, True, True, True)),
    ],
)
def test_what_a_version_can_do(version: str, can: tuple[bool, ...]) -> None:
    parsed = version_of(version)
    assert parsed is not None
    known = capabilities(parsed)
    assert (
        known.bidirectional,
        known.multi_group_reuse,
        known.prompt_token_ids,
        known.stream_handles,
    ) == can


def test_hyperpod_types_are_the_same_types() -> None:
    assert instance_type("ml.p5en.48xlarge") == instance_type("p5en.48xlarge")
    assert node_label_values("ml.p5en.48xlarge") == ["p5en.48xlarge", "ml.p5en.48xlarge"]
    assert instance_type("p5en.24xlarge") is None


@pytest.mark.parametrize(
    ("kind", "parallel", "devices", "efa"),
    [
        ("p5en.48xlarge", 8, 8, 16),
        ("p5en.48xlarge", 4, 4, 8),
        ("p5en.48xlarge", 1, 1, 2),
        ("p5.48xlarge", 8, 8, 32),
        ("p4d.24xlarge", 2, 2, 1),
        ("p4d.24xlarge", 1, 1, Fraction(1, 2)),
        ("g6e.12xlarge", 4, 4, 1),
        ("g6e.4xlarge", 1, 1, 0),
        ("trn2.48xlarge", 64, 16, 16),
        ("trn2.48xlarge", 4, 1, 1),
        ("trn1.32xlarge", 32, 16, 8),
        ("trn1.32xlarge", 2, 1, Fraction(1, 2)),
    ],
)
def test_a_pod_gets_its_devices_share_of_the_interfaces(
    kind: str, parallel: int, devices: int, efa: int | Fraction
) -> None:
    facts = facts_of(resource(prefill={"instanceType": kind, "tensorParallelSize": parallel})).prefill
    assert facts.devices == devices
    assert facts.efa_interfaces == efa


def test_data_parallel_copies_have_devices_of_their_own() -> None:
    facts = facts_of(resource(prefill__tensorParallelSize=2, prefill__dataParallelSize=4)).prefill
    assert facts.devices == 8


def test_without_an_instance_type_gpus_come_as_asked_and_efa_is_off() -> None:
    facts = facts_of(resource(prefill={"tensorParallelSize": 2})).prefill
    assert (facts.accelerator, facts.efa) == (Accelerator.GPU, EFAMode.DISABLED)
    assert facts.devices == 2
    asked = {"tensorParallelSize": 2, "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    assert facts_of(resource(prefill=asked)).prefill.devices == 4


def test_a_cpu_has_no_devices() -> None:
    facts = facts_of(resource(prefill={"accelerator": "cpu"})).prefill
    assert (facts.device_resource, facts.efa) == ("", EFAMode.DISABLED)
    assert facts.devices == 0


def test_secrets_are_not_printed() -> None:
    assert "hush" not in repr(SecretMaterial(admin_token="hush", digest_key="hush", seal_key="hush"))
