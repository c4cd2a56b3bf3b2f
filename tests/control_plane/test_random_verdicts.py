"""Resources with something wrong somewhere get the same verdict from the models and from the API server.

A difference means that `kvloop validate` promises what the cluster refuses, or the other way round.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.cluster.kinds import RESOURCE
from kvloop_operator.errors import InvalidResource
from tests.harness.kube import Kube
from tests.unit.operator.documents import EXAMPLES, fixtures, read

pytestmark = pytest.mark.timeout(1200)

Path = tuple[str | int, ...]

SOUND: Final = [read(file) for file in (*fixtures("good"), *fixtures("stalled"), *sorted(EXAMPLES.glob("*.yaml")))]

ODD_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, -1, 0, 1, 30, 31, 99_999, 2**31, 2**63, 2**64, 1.5, 1e30),
    *("", "x", "A", "Ä", "a b", "a.b", "a/b", "/", "/a/../b", "\n", "a\n", "\x00", "x" * 300),
    *("0", "1", "-1", "+1", "0.5", "1.", "1e3", "1Ki", "10Gi", "50%", "101%"),
    *([], [1], [{}], ["a"], ["a", "a"], [None], [{"name": "a"}], {}, {"a": 1}, {"a": "b"}, {"name": "a"}),
)
KEYS: Final = ("name", "value", "replicas", "x", "A b", "")


@st.composite
def broken(draw: st.DrawFn) -> dict[str, Any]:
    """A sound resource with one to three places of its specification changed, removed or added to."""
    resource: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(SOUND)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_paths(resource["spec"], ("spec",)))))
        *before, last = path
        parent: Any = resource
        for step in before:
            parent = parent[step]
        value = copy.deepcopy(draw(st.sampled_from(ODD_VALUES)))
        at = parent[last]
        match draw(st.sampled_from(["change", "remove", "add"])):
            case "remove" if len(path) > 1:
                del parent[last]
            case "add" if isinstance(at, dict):
                at[draw(st.sampled_from(KEYS))] = value
            case "add" if isinstance(at, list):
                at.append(draw(st.sampled_from([value, *copy.deepcopy(at)])))
            case _ if len(path) > 1:
                parent[last] = value
    return resource


def _paths(value: Any, path: Path) -> Iterator[Path]:
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, entry in entries:
        yield from _paths(entry, (*path, step))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(resource=broken())
def test_a_broken_resource_gets_the_same_verdict_from_the_models_and_from_the_api_server(
    kube: Kube, resource: dict[str, Any]
) -> None:
    answer = kube.request("POST", RESOURCE.path("default"), body=resource, dryRun="All", fieldValidation="Strict")
    refusal = _refusal(resource)
    if refusal is None:
        # The models take a null for an absent field, the API server an unknown field for one even if it is null.
        assume("strict decoding error" not in answer.message or not _has_null(resource))
        assert answer.ok, f"only the API server refuses it: {answer.message}"
    else:
        assert answer.status in (400, 422), f"only the models refuse it: {refusal}"


def _refusal(resource: dict[str, Any]) -> InvalidResource | None:
    try:
        DisaggregatedInference.parse(resource)
    except InvalidResource as error:
        return error
    return None


def _has_null(value: Any) -> bool:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(_has_null(entry) for entry in entries)
