"""The API server judges resources as the models do, and names the same field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.cluster.kinds import RESOURCE
from kvloop_operator.errors import InvalidResource
from tests.cluster.errors import CommandFailedError
from tests.cluster.kubectl import Kubectl
from tests.harness.kube import Answer, Kube
from tests.unit.operator.documents import EXAMPLES, document, expected_field, fixtures, read

pytestmark = pytest.mark.timeout(1200)

ACCEPTED = [*fixtures("good"), *fixtures("stalled"), *sorted(EXAMPLES.glob("*.yaml"))]


def named(file: Path) -> str:
    return f"{file.parent.name}-{file.stem}"


def judged(kube: Kube, resource: Any, *, validation: str = "Strict") -> Answer:
    """What the API server says to a resource, which is not kept."""
    return kube.request("POST", RESOURCE.path("default"), body=resource, dryRun="All", fieldValidation=validation)


def fields_of(answer: Answer) -> set[str]:
    """The fields that a refusal names."""
    causes = answer.body.get("details", {}).get("causes", ())
    in_causes = {cause["field"].removeprefix(".") for cause in causes if cause.get("field", "<nil>") != "<nil>"}
    return in_causes | set(re.findall(r'unknown field "([^"]+)"', answer.message))


def steps(path: str) -> list[str]:
    """``spec.prefill.args[0]`` as its steps."""
    return re.findall(r"[^.\[\]]+", path)


def lies_on_the_way(one: str, other: str) -> bool:
    """Whether one of two fields lies within the other, or they are the same."""
    shorter, longer = sorted((steps(one), steps(other)), key=len)
    return longer[: len(shorter)] == shorter


@pytest.mark.parametrize("file", ACCEPTED, ids=named)
def test_what_the_models_accept_the_api_server_accepts(kube: Kube, file: Path) -> None:
    answer = judged(kube, read(file))
    assert answer.ok, answer.message
    # With every default filled in, and the status that a resource is born with.
    DisaggregatedInference.parse(answer.body)
    assert answer.body["status"] == {"observedGeneration": -1}


@pytest.mark.parametrize("file", fixtures("bad"), ids=named)
def test_what_the_models_refuse_the_api_server_refuses_at_the_same_field(kube: Kube, file: Path) -> None:
    answer = judged(kube, read(file))
    assert answer.status in (400, 422), answer.body
    if expected_field(file) == "metadata.name":
        # A schema cannot point into the metadata; the message has to do.
        with pytest.raises(InvalidResource) as refused:
            DisaggregatedInference.parse(read(file))
        (fault,) = refused.value.faults
        assert f"{fault.fault}; {fault.remedy}" in answer.message
    else:
        named_fields = fields_of(answer)
        assert any(lies_on_the_way(field, expected_field(file)) for field in named_fields), answer.message


@pytest.mark.parametrize("file", ACCEPTED, ids=named)
def test_defaults_of_the_api_server_are_those_of_the_models(kube: Kube, file: Path) -> None:
    written = read(file)
    assert DisaggregatedInference.parse(judged(kube, written).body).spec == DisaggregatedInference.parse(written).spec


def test_a_client_without_strict_validation_loses_unknown_fields_in_silence(kube: Kube) -> None:
    answer = judged(kube, document(prefill__replica=3), validation="Ignore")
    assert answer.ok
    assert "replica" not in answer.body["spec"]["prefill"]


def test_kubectl_says_which_field_is_unknown(namespace_cp: Kubectl) -> None:
    with pytest.raises(CommandFailedError, match=r'unknown field "spec\.prefill\.replica"'):
        namespace_cp("create", "--filename=-", stdin=json.dumps(document(prefill__replica=3)))


def test_a_rule_speaks_up_on_an_update_too(kube: Kube, namespace_cp: Kubectl) -> None:
    assert namespace_cp.namespace is not None
    kube.create(document(), namespace_cp.namespace)
    path = RESOURCE.path(namespace_cp.namespace, "demo")
    patch = {"spec": {"decode": {"tensorParallelSize": 3}}}
    answer = kube.request("PATCH", path, body=patch, content="application/merge-patch+json")
    assert answer.status == 422
    assert fields_of(answer) == {"spec.decode.tensorParallelSize"}


def test_scale_is_that_of_the_decode_role(kube: Kube, namespace_cp: Kubectl) -> None:
    assert namespace_cp.namespace is not None
    kube.create(document(), namespace_cp.namespace)
    status = {"status": {"decode": {"replicas": 1, "selector": "kvloop.io/deployment=demo,kvloop.io/role=decode"}}}
    kube.patch(RESOURCE.kind, namespace_cp.namespace, "demo", status, subresource="status")
    namespace_cp("scale", "dinf/demo", "--current-replicas=1", "--replicas=3")
    resource = namespace_cp.get("dinf", "demo")
    assert (resource["spec"]["decode"]["replicas"], resource["spec"]["prefill"]["replicas"]) == (3, 1)
    scale = kube.request("GET", RESOURCE.path(namespace_cp.namespace, "demo") + "/scale").body
    assert scale["spec"] == {"replicas": 3}
    assert scale["status"] == {"replicas": 1, "selector": "kvloop.io/deployment=demo,kvloop.io/role=decode"}


def test_the_status_is_written_apart_from_the_rest(kube: Kube, namespace_cp: Kubectl) -> None:
    assert namespace_cp.namespace is not None
    made = kube.create(
        document() | {"status": {"observedGeneration": 7, "url": "http://nowhere"}}, namespace_cp.namespace
    )
    assert made["status"] == {"observedGeneration": -1}
    both = {"status": {"url": "http://demo"}, "spec": {"paused": True}}
    changed = kube.patch(RESOURCE.kind, namespace_cp.namespace, "demo", both, subresource="status")
    assert changed["status"] == {"observedGeneration": -1, "url": "http://demo"}
    assert changed["spec"]["paused"] is False
    assert changed["metadata"]["generation"] == 1


def test_the_printed_columns_tell_how_a_resource_is(kube: Kube, namespace_cp: Kubectl) -> None:
    assert namespace_cp.namespace is not None
    kube.create(document(), namespace_cp.namespace)
    transition = {"lastTransitionTime": "2026-01-02T03:04:05Z", "message": "m", "observedGeneration": 1}
    status = {
        "conditions": [{"type": "Ready", "status": "Unknown", "reason": "LoadingModel"} | transition],
        "prefill": {"summary": "1/2"},
        "decode": {"summary": "0/3"},
        "url": "http://demo-router",
    }
    kube.patch(RESOURCE.kind, namespace_cp.namespace, "demo", {"status": status}, subresource="status")
    header, row = namespace_cp("get", "dinf").splitlines()
    assert header.split() == ["NAME", "MODEL", "PREFILL", "DECODE", "READY", "REASON", "AGE"]
    assert row.split()[:-1] == ["demo", "Qwen/Qwen3-32B", "1/2", "0/3", "Unknown", "LoadingModel"]
    wide, wide_row = namespace_cp("get", "kvloop", "--output=wide").splitlines()
    assert wide.split()[-2:] == ["URL", "IMAGE"]
    assert wide_row.split()[-2:] == ["http://demo-router", "my-registry/vllm-efa:v0.33.0"]


def test_conditions_are_merged_by_type_and_refused_where_a_type_comes_twice(kube: Kube, namespace_cp: Kubectl) -> None:
    assert namespace_cp.namespace is not None
    kube.create(document(), namespace_cp.namespace)
    path = RESOURCE.path(namespace_cp.namespace, "demo") + "/status"
    condition = {"status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"}

    def apply(manager: str, *types: str) -> Answer:
        body = {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.kind,
            "status": {"conditions": [{"type": each} | condition for each in types]},
        }
        return kube.request("PATCH", path, body=body, content="application/apply-patch+yaml", fieldManager=manager)

    assert apply("one", "Ready").ok
    assert apply("two", "Somebody/Else").ok
    conditions = kube.request("GET", path).body["status"]["conditions"]
    assert [each["type"] for each in conditions] == ["Ready", "Somebody/Else"]
    assert not apply("one", "Ready", "Ready").ok
