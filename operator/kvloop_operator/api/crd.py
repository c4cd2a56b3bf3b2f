"""The CustomResourceDefinition, from the models.

pydantic's JSON schema is not a structural one: references are put in place, titles and nulls dropped, booleans of the
draft turned into what Kubernetes takes. Everything that is not understood is an error here and not in a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import DisaggregatedInference

MAXIMUM_BYTES = 256 * 1024
"""``kubectl apply`` keeps a copy of the object in an annotation, which cannot be larger."""

_COPIED = frozenset(
    {
        "description",
        "enum",
        "format",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "pattern",
        "required",
        "type",
        "x-kubernetes-int-or-string",
        "x-kubernetes-list-map-keys",
        "x-kubernetes-list-type",
        "x-kubernetes-preserve-unknown-fields",
        "x-kubernetes-validations",
    }
)
_HANDLED = frozenset(
    {
        "$defs",
        "$ref",
        "additionalProperties",
        "anyOf",
        "const",
        "default",
        "exclusiveMinimum",
        "items",
        "properties",
        "title",
    }
)

_PRINTER_COLUMNS = (
    {"name": "Model", "type": "string", "jsonPath": ".spec.model.id"},
    {"name": "Prefill", "type": "string", "jsonPath": ".status.prefill.summary", "description": "ready/desired"},
    {"name": "Decode", "type": "string", "jsonPath": ".status.decode.summary", "description": "ready/desired"},
    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
    {"name": "Reason", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].reason'},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "URL", "type": "string", "jsonPath": ".status.url", "priority": 1},
    {"name": "Image", "type": "string", "jsonPath": ".spec.engine.image", "priority": 1},
)


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition as a dictionary."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": [names.CATEGORY],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.decode.replicas",
                            "statusReplicasPath": ".status.decode.replicas",
                            "labelSelectorPath": ".status.decode.selector",
                        },
                    },
                    "additionalPrinterColumns": [dict(column) for column in _PRINTER_COLUMNS],
                }
            ],
        },
    }


def crd_text() -> str:
    """The CustomResourceDefinition as it lies in ``crds/``."""
    return yaml.safe_dump(crd(), sort_keys=False, allow_unicode=True, width=120)


def structural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """pydantic's ``schema`` as a structural one, without references."""
    schema = _resolved(schema, definitions)
    unknown = schema.keys() - _COPIED - _HANDLED
    if unknown:
        raise ValueError(f"the schema has keys that no structural schema takes: {sorted(unknown)}")
    result = {key: schema[key] for key in sorted(schema.keys() & _COPIED)}
    if "description" in result:
        result["description"] = " ".join(result["description"].replace("``", "").split())
    if "exclusiveMinimum" in schema:
        result |= {"minimum": schema["exclusiveMinimum"], "exclusiveMinimum": True}
    if "const" in schema:
        result["enum"] = [schema["const"]]
    if "default" in schema and schema["default"] not in (None, [], "") and not _is_empty_map(schema):
        result["default"] = schema["default"]
    if "properties" in schema:
        result["properties"] = {name: structural(value, definitions) for name, value in schema["properties"].items()}
    elif isinstance(schema.get("additionalProperties"), Mapping):
        result["additionalProperties"] = structural(schema["additionalProperties"], definitions)
    elif result.get("type") == "object":
        result["x-kubernetes-preserve-unknown-fields"] = True
    if "items" in schema:
        result["items"] = structural(schema["items"], definitions)
    return result


def _root() -> dict[str, Any]:
    schema = DisaggregatedInference.model_json_schema(by_alias=True)
    root = structural(schema, schema["$defs"])
    # The API server knows these itself and lets nobody say more about them.
    root["properties"]["apiVersion"] = {"type": "string"}
    root["properties"]["kind"] = {"type": "string"}
    root["properties"]["metadata"] = {"type": "object"}
    root["required"] = ["spec"]
    root["properties"]["status"]["default"] = {"observedGeneration": -1}
    return root


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` with its reference, or the one alternative to null, put in its place; what stands beside it wins."""
    result = dict(schema)
    if "anyOf" in result:
        alternatives = [each for each in result.pop("anyOf") if each.get("type") != "null"]
        if len(alternatives) != 1:
            raise ValueError(f"a structural schema has no alternatives: {alternatives}")
        return _resolved({**alternatives[0], **result}, definitions)
    if "$ref" in result:
        target = definitions[result.pop("$ref").removeprefix("#/$defs/")]
        return _resolved({**target, **result}, definitions)
    return result


def _is_empty_map(schema: Mapping[str, Any]) -> bool:
    """A free map's empty default says nothing; an object's fills in the defaults of its fields."""
    return schema["default"] == {} and "properties" not in schema
