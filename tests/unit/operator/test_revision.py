"""The KV revision: equal for engines that may exchange KV, different for all others."""

from __future__ import annotations

import pytest

from kvloop_operator.revision import kv_revision
from tests.unit.operator.documents import facts_of, resource


def revision(**changes: object) -> str:
    parsed = resource(**changes)
    return kv_revision(parsed, facts_of(parsed))


def test_it_is_ten_hexadecimal_digits_that_never_change() -> None:
    # A new operator that computed another one for the same resource would restart every engine.
    assert revision() == "8415f6639c"


@pytest.mark.parametrize(
    "changes",
    [
        {"engine__image": "my-registry/vllm-efa:v0.33.1"},
        {"engine__version": "0.33.0"},
        {"engine__dtype": "bfloat16"},
        {"engine__blockSize": 32},
        {"engine__kvCacheDtype": "fp8"},
        {"engine__args": ["--attention-backend=FLASHINFER"]},
        {"engine__env": [{"name": "VLLM_KV_CACHE_LAYOUT", "value": "HND"}]},
        {"model__id": "Qwen/Qwen3-8B"},
        {"model__revision": "main"},
        {"model__source": {"pvc": {"claimName": "models"}}},
        {"kvTransfer__bidirectionalKvXfer": False},
        {"kvTransfer__decoderKvBlocksTtlSeconds": 481},
        {"kvTransfer__kvRecomputeThreshold": 65},
        {"kvTransfer__connector": "KvloopConnector"},
        {"kvTransfer__extraConfig": {"kv_lease_duration": 60}},
        {"network__efa__mode": "Disabled"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_engines_have_to_agree_on_changes_it(changes: dict[str, object]) -> None:
    assert revision(**changes) != revision()


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill__replicas": 4},
        {"decode__tensorParallelSize": 4},
        {"prefill__prefixCaching": False},
        {"prefill__args": ["--max-num-batched-tokens=8192"]},
        {"decode__resources": {"requests": {"cpu": 4}}},
        {"model__servedName": "Qwen/Qwen3-32B", "model__tokenSecretRef": {"name": "a", "key": "b"}},
        {"model__cache": {"hostPath": "/mnt/models"}},
        {"router__handleTtlSeconds": 100},
        {"engine__startupTimeoutSeconds": 100},
        {"security__tls": {"engines": {"secretName": "mine"}}},
        {"suspend": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_a_role_has_for_itself_leaves_it_alone(changes: dict[str, object]) -> None:
    assert revision(**changes) == revision()
