"""The CustomResourceDefinition: structural, bounded, small, and what lies in ``crds/``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvloop_operator.api.crd import MAXIMUM_BYTES, crd, crd_text, structural
from tests.unit.operator.documents import TESTS

CHECKED_IN = TESTS.parent / "crds" / "kvloop.io_disaggregatedinferences.yaml"


def schema() -> dict[str, Any]:
    found: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, below in node.get("properties", {}).items():
        yield from nodes(below, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in node:
            yield from nodes(node[name], f"{path}[]")


def at(path: str) -> dict[str, Any]:
    node = schema()
    for step in path.split("."):
        node = node["properties"][step]
    return node


def test_the_checked_in_file_is_up_to_date() -> None:
    written = CHECKED_IN.read_text(encoding="utf-8")
    assert written == crd_text(), "run: kvloop crd > crds/kvloop.io_disaggregatedinferences.yaml"


def test_it_fits_into_the_annotation_that_kubectl_apply_writes() -> None:
    assert len(crd_text().encode()) < MAXIMUM_BYTES
    assert len(json.dumps(crd()).encode()) < MAXIMUM_BYTES


def test_every_node_has_a_type() -> None:
    for path, node in nodes(schema()):
        assert ("type" in node) != node.get("x-kubernetes-int-or-string", False), path


def test_no_node_has_both_named_and_free_fields() -> None:
    for path, node in nodes(schema()):
        assert not ("properties" in node and "additionalProperties" in node), path


def test_only_the_pod_overlays_take_unknown_fields() -> None:
    free = [path for path, node in nodes(schema()) if node.get("x-kubernetes-preserve-unknown-fields")]
    assert free == [f".spec.{part}.podTemplate.spec" for part in ("prefill", "decode", "router")]


def test_every_list_map_and_text_is_bounded() -> None:
    for path, node in nodes(schema()):
        if path in (".apiVersion", ".kind"):
            continue
        kind = node.get("type")
        assert kind != "array" or "maxItems" in node, path
        assert kind != "string" or "maxLength" in node or "enum" in node, path
        assert "additionalProperties" not in node or "maxProperties" in node, path


def test_lists_with_keys_name_a_required_field() -> None:
    for path, node in nodes(schema()):
        for key in node.get("x-kubernetes-list-map-keys", []):
            assert key in node["items"]["required"], path


def test_defaults_reach_down_to_every_field_that_rules_read() -> None:
    for path in ("router", "kvTransfer", "network", "network.efa", "prefill", "decode", "serviceAccount"):
        assert at(f"spec.{path}")["default"] == {}
    assert at("spec.kvTransfer.decoderKvBlocksTtlSeconds")["default"] == 480
    assert at("spec.network.efa.mode")["default"] == "Auto"
    assert at("spec.serviceAccount.create")["default"] is False


def test_a_resource_that_nobody_has_seen_is_not_current() -> None:
    assert at("status")["default"] == {"observedGeneration": -1}
    assert at("status.observedGeneration")["default"] == -1


def test_only_the_model_and_the_image_are_required() -> None:
    assert schema()["required"] == ["spec"]
    assert at("spec")["required"] == ["model", "engine"]
    assert at("spec.engine")["required"] == ["image"]


def test_scale_is_of_the_decode_role() -> None:
    assert crd()["spec"]["versions"][0]["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.decode.replicas",
            "statusReplicasPath": ".status.decode.replicas",
            "labelSelectorPath": ".status.decode.selector",
        },
    }


def test_the_threshold_says_exactly_what_vllm_compares() -> None:
    assert at("spec.kvTransfer.kvRecomputeThreshold")["description"].endswith(
        "It is compared, by vLLM, with min(remote_num_tokens, prompt tokens) − tokens that prefill's own prefix cache"
        " holds, after kvloop's trimming: fewer than the threshold are computed locally, as many or more are pulled."
        " Prefill always looks in its own cache first."
    )


def test_rules_say_what_to_do() -> None:
    rules = [rule for _, node in nodes(schema()) for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) > 20
    for rule in rules:
        assert "; " in rule["message"]
        # The message is a field of the API: longer ones are refused.
        assert len(rule["message"]) <= 2048


def test_rules_name_fields_that_there_are() -> None:
    named = 0
    for path, node in nodes(schema()):
        for rule in node.get("x-kubernetes-validations", []):
            below = node
            for step in rule.get("fieldPath", "").split(".")[1:]:
                assert step in below["properties"], (path, rule)
                below = below["properties"][step]
                named += 1
    assert named > 10


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "exclusiveMaximum": 0},
        {"type": "array", "prefixItems": []},
    ],
)
def test_what_kubernetes_would_not_take_is_an_error(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="structural schema"):
        structural(schema, {})


def test_a_bound_that_is_left_out_is_said_as_kubernetes_says_it() -> None:
    assert structural({"type": "number", "exclusiveMinimum": 0}, {}) == {
        "type": "number",
        "minimum": 0,
        "exclusiveMinimum": True,
    }


def test_an_optional_reference_is_put_in_its_place() -> None:
    definitions = {"Part": {"type": "object", "properties": {"a": {"type": "string", "title": "A"}}}}
    optional = {"anyOf": [{"$ref": "#/$defs/Part"}, {"type": "null"}], "default": None, "description": "x  ``y``\nz"}
    assert structural(optional, definitions) == {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "description": "x y z",
    }
