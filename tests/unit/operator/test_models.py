"""The models: strictness, defaults, words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from kvloop_connector.settings import HANDLE_TTL_MARGIN_SECONDS
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.api.v1alpha1.patterns import FORMS
from kvloop_operator.errors import Fault, InvalidResource
from tests.unit.operator.documents import document, resource


def faults(**changes: object) -> list[Fault]:
    with pytest.raises(InvalidResource) as refused:
        resource(**changes)
    return list(refused.value.faults)


def test_everything_but_model_and_image_has_a_default() -> None:
    small = document()
    del small["spec"]["prefill"], small["spec"]["decode"]
    spec = DisaggregatedInference.parse(small).spec
    assert spec.kv_transfer.bidirectional_kv_xfer
    assert spec.kv_transfer.decoder_kv_blocks_ttl_seconds == 480
    assert spec.kv_transfer.kv_recompute_threshold == 64
    assert (spec.prefill.replicas, spec.decode.replicas, spec.router.replicas) == (1, 1, 1)


def test_a_null_is_an_absent_field() -> None:
    assert resource(router=None, prefill__args=None) == resource()


def test_the_status_is_accepted_as_the_api_server_gives_it() -> None:
    live = document()
    live["metadata"] |= {"uid": "1", "generation": 3, "managedFields": [{"manager": "kubectl"}]}
    live["status"] = {"observedGeneration": -1}
    parsed = DisaggregatedInference.parse(live)
    assert parsed.metadata.generation == 3
    assert parsed.status is not None
    assert parsed.status.observed_generation == -1


def test_snake_case_is_no_wire_name() -> None:
    (fault,) = faults(kv_transfer={})
    assert (fault.field, fault.fault, fault.remedy) == ("spec.kv_transfer", "unknown field", "did you mean kvTransfer?")


def test_an_unknown_field_deep_below_gets_its_neighbours_name() -> None:
    (fault,) = faults(decode__volumes=[{"name": "a", "emptydir": {}, "emptyDir": {}}])
    assert fault.field == "spec.decode.volumes[0].emptydir"
    assert fault.remedy == "did you mean emptyDir?"


def test_every_field_that_is_wrong_is_named() -> None:
    found = faults(prefill__replicas=-1, decode__tensorParallelSize="8", engine__dtype="fp8", oops=1)
    assert [fault.field for fault in found] == [
        "spec.engine.dtype",
        "spec.prefill.replicas",
        "spec.decode.tensorParallelSize",
        "spec.oops",
    ]


def test_every_argument_that_is_kvloops_own_is_named() -> None:
    found = faults(engine__args=["--port", "1", "--enforce-eager", "-tp=2", "--no_async_scheduling"])
    assert [fault.field for fault in found] == [f"spec.engine.args[{index}]" for index in (0, 3, 4)]


def test_long_values_are_shortened_to_one_line() -> None:
    (fault,) = faults(engine__image="x" * 500 + "\n")
    assert len(str(fault)) < 250
    assert "\n" not in str(fault)


@settings(deadline=None)
@given(ttl=st.integers(31, 86400), handle=st.integers(1, 86400))
def test_a_handle_ttl_is_accepted_up_to_the_margin_and_no_further(ttl: int, handle: int) -> None:
    changes = {"kvTransfer__decoderKvBlocksTtlSeconds": ttl, "router__handleTtlSeconds": handle}
    if handle + HANDLE_TTL_MARGIN_SECONDS <= ttl:
        assert resource(**changes).spec.router.handle_ttl_seconds == handle
    else:
        assert [fault.field for fault in faults(**changes)] == ["spec.router.handleTtlSeconds"]


@settings(deadline=None)
@given(prefill=st.integers(1, 64), decode=st.integers(1, 64), heads=st.none() | st.integers(1, 64))
def test_tensor_parallel_sizes_divide_and_stay_within_the_kv_heads(
    prefill: int, decode: int, heads: int | None
) -> None:
    changes = {"prefill__tensorParallelSize": prefill, "decode__tensorParallelSize": decode, "model__kvHeads": heads}
    divide = max(prefill, decode) % min(prefill, decode) == 0
    within = heads is None or prefill == decode or max(prefill, decode) <= heads
    if divide and within:
        resource(**changes)
    else:
        expected = {"spec.decode.tensorParallelSize"} - ({"spec.decode.tensorParallelSize"} if divide else set())
        expected |= set() if within else {"spec.model.kvHeads"}
        assert {fault.field for fault in faults(**changes)} == expected


@pytest.mark.parametrize("quantity", [0, 4, "500m", "1.5", "64Gi", "1e3"])
def test_quantities_are_numbers_or_text(quantity: int | str) -> None:
    assert resource(decode__resources={"limits": {"cpu": quantity}}).spec.decode.resources.limits == {"cpu": quantity}


@pytest.mark.parametrize("quantity", [0.5, True, -1, "-1", "4 Gi", "Gi", ""])
def test_other_quantities_are_refused(quantity: object) -> None:
    assert [fault.fault for fault in faults(decode__resources={"limits": {"cpu": quantity}})] == ["not a quantity"]


def test_every_pattern_is_explained_in_words() -> None:
    patterns = set(_patterns(DisaggregatedInference.model_json_schema()["$defs"]))
    unexplained = {pattern for pattern in patterns if pattern not in FORMS}
    # Quantities and percentages have words of their own; the reason of a condition is nothing that users write.
    assert len(unexplained) == 3


def _patterns(schema: object) -> list[str]:
    if isinstance(schema, list):
        return [pattern for each in schema for pattern in _patterns(each)]
    if not isinstance(schema, dict):
        return []
    own = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    return own + [pattern for each in schema.values() for pattern in _patterns(each)]
