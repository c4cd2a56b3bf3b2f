"""When an apply is needed, and when it is not."""

from __future__ import annotations

import copy
from pathlib import Path as File
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from kvloop_operator.compare import (
    covers,
    differences,
    needs_apply,
    owned_but_unwanted,
    statefulset_needs_apply,
    template_wanted,
    wanted_but_not_owned,
)
from kvloop_operator.facts import OperatorSettings, SecretMaterial
from kvloop_operator.manifests.common import Manifest
from kvloop_operator.ports import ports_put_right
from tests.unit.operator.documents import child, manifests
from tests.unit.operator.stored import (
    another,
    at,
    changed,
    leaves,
    lost,
    removable,
    replaced,
    stored,
)

GOLDEN = File(__file__).parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir())

MATERIAL = SecretMaterial(admin_token="token", digest_key="00" * 32, seal_key="11" * 32)

names = st.sampled_from(["a", "b", "name", "labels", "requests", "emptyDir", "env", "ports"])
scalars = st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "1", "1000m", "x"])
documents = st.dictionaries(
    names,
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)),
    max_size=4,
)


def golden(case: str) -> list[Manifest]:
    """The manifests of a golden case."""
    return list(yaml.safe_load_all((GOLDEN / case / "expected.yaml").read_text(encoding="utf-8")))


def statefulset() -> Manifest:
    return child(golden("everything"), "StatefulSet", "everything-prefill")


def container(manifest: Manifest) -> dict[str, Any]:
    """The one that kvloop makes itself."""
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]["containers"][0]
    return found


@given(documents)
def test_everything_covers_itself(document: dict[str, Any]) -> None:
    assert covers(document, document)


@given(documents, documents)
def test_what_covers_has_no_differences(live: dict[str, Any], desired: dict[str, Any]) -> None:
    assert covers(live, desired) is (differences(live, desired) == [])


@given(documents, st.data())
def test_one_changed_leaf_is_always_seen(document: dict[str, Any], data: st.DataObject) -> None:
    paths = [path for path in leaves(document) if at(document, path) is not None]
    if not paths:
        return
    path = data.draw(st.sampled_from(paths))
    assert not covers(replaced(document, path, another(at(document, path))), document)


@pytest.mark.parametrize("case", CASES)
def test_a_child_that_was_just_applied_needs_nothing(case: str) -> None:
    for manifest in golden(case):
        assert needs_apply(stored(manifest), manifest) == []


def test_what_the_operator_renders_itself_needs_nothing_once_applied() -> None:
    for manifest in manifests(OperatorSettings(secret_material=MATERIAL)):
        assert needs_apply(stored(manifest), manifest) == []


@pytest.mark.parametrize("case", CASES)
def test_a_child_that_was_never_applied_needs_it(case: str) -> None:
    for manifest in golden(case):
        assert needs_apply(copy.deepcopy(manifest), manifest) != []


@pytest.mark.parametrize("case", CASES)
def test_every_change_of_a_live_child_is_seen_by_its_value(case: str) -> None:
    for manifest in golden(case):
        live = stored(manifest)
        for path in leaves(manifest):
            if path[0] in ("apiVersion", "kind"):
                continue
            with changed(live, path, another(at(manifest, path))):
                assert not covers(live, manifest), path


@pytest.mark.parametrize("case", CASES)
def test_everything_that_is_no_longer_wanted_is_seen(case: str) -> None:
    for manifest in golden(case):
        live = stored(manifest)
        for path in removable(manifest):
            with lost(manifest, path):
                if at(manifest, path[:-1]):
                    # What is left of a reference to nothing is none that anybody would write.
                    assert needs_apply(live, manifest), path


@pytest.mark.parametrize("case", CASES)
def test_what_others_add_is_let_be(case: str) -> None:
    for manifest in golden(case):
        live = stored(manifest)
        live["metadata"].setdefault("labels", {})["foreign"] = "x"
        live["metadata"].setdefault("annotations", {})["foreign"] = "x"
        live["status"] = {"replicas": 1}
        if manifest["kind"] in ("StatefulSet", "Deployment"):
            pod = live["spec"]["template"]["spec"]
            pod["schedulerName"] = "default-scheduler"
            pod["containers"].append({"name": "injected", "image": "x"})
            pod["containers"][0].setdefault("env", []).insert(1, {"name": "INJECTED", "value": "x"})
            pod["containers"][0]["terminationMessagePath"] = "/dev/termination-log"
        assert needs_apply(live, manifest) == []


@pytest.mark.parametrize(
    ("live", "desired"),
    [
        ("1", 1),
        ("1", "1000m"),
        ("500m", "0.5"),
        ("1Gi", "1024Mi"),
        ("1k", "1e3"),
        ("1k", "1000"),
        ("100M", "1E8"),
        ("0", 0),
        ("1500m", "1.5"),
    ],
)
def test_quantities_are_equal_by_their_amount(live: str, desired: str | int) -> None:
    def limits(value: str | int) -> dict[str, Any]:
        return {"resources": {"limits": {"cpu": value}}}

    assert covers(limits(live), limits(desired))
    assert not covers(limits("2"), limits(desired))


def test_text_that_only_looks_like_a_quantity_is_compared_as_text() -> None:
    assert not covers({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "1000m"}]})
    assert not covers({"labels": {"sizeLimit": "1"}}, {"labels": {"sizeLimit": "1000m"}})
    assert not covers({"resources": {"limits": {"cpu": "2"}}}, {"resources": {"limits": {"cpu": "two"}}})


@pytest.mark.parametrize("nothing", [None, False, 0, "", [], {}, {"deeper": {}}])
def test_what_the_api_server_leaves_out_is_not_missed(nothing: Any) -> None:
    assert covers({}, {"field": nothing})
    assert covers({"env": [{"name": "A"}]}, {"env": [{"name": "A", "value": nothing}]})


@pytest.mark.parametrize("nothing", [False, 0, ""])
def test_what_is_there_is_not_nothing(nothing: Any) -> None:
    assert not covers({"field": another(nothing)}, {"field": nothing})


@pytest.mark.parametrize("field", ["emptyDir", "podSelector", "namespaceSelector"])
def test_an_empty_object_that_says_something_is_missed(field: str) -> None:
    assert not covers({}, {field: {}})
    assert covers({field: {}}, {field: {}})


def test_numbers_text_and_booleans_are_never_the_same() -> None:
    assert not covers({"port": "8000"}, {"port": 8000})
    assert not covers({"flag": 1}, {"flag": True})


def test_named_entries_are_found_wherever_they_stand() -> None:
    live = {"env": [{"name": "INJECTED"}, {"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    assert covers(live, {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]})
    assert differences(live, {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]}) == [
        "env[B].value",
        "env[C]",
    ]


def test_the_order_of_named_entries_counts() -> None:
    """A variable can refer to those before it."""
    live = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"}]}
    assert differences(live, {"env": list(reversed(live["env"]))}) == ["env"]


def test_other_lists_are_compared_as_a_whole() -> None:
    assert not covers({"args": ["a", "b"]}, {"args": ["a"]})
    assert not covers({"args": ["b", "a"]}, {"args": ["a", "b"]})
    assert not covers({"tolerations": [{"key": "a"}, {"key": "b"}]}, {"tolerations": [{"key": "a"}]})


def test_defaults_within_the_entries_of_a_list_are_let_be() -> None:
    live = {"sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}]}
    assert covers(live, {"sources": [{"serviceAccountToken": {"path": "token"}}]})


def test_the_same_port_by_two_protocols_is_two_ports() -> None:
    live = {"containers": [{"name": "a", "ports": [{"containerPort": 1, "protocol": "TCP"}]}]}
    assert covers(live, {"containers": [{"name": "a", "ports": [{"containerPort": 1}]}]})
    assert not covers(live, {"containers": [{"name": "a", "ports": [{"containerPort": 1, "protocol": "UDP"}]}]})


def test_a_secret_is_compared_by_what_its_text_becomes() -> None:
    secret = {"kind": "Secret", "metadata": {"name": "s"}, "type": "Opaque", "stringData": {"token": "t"}}
    live = stored(secret)
    assert live["data"] == {"token": "dA=="}
    assert needs_apply(live, secret) == []
    assert needs_apply(live, replaced(secret, ("stringData", "token"), "u")) == ["data.token"]
    assert needs_apply({**live, "data": {}}, secret) == ["data.token"]


def test_the_type_of_an_object_from_a_list_is_not_missed() -> None:
    manifest = statefulset()
    live = stored(manifest)
    del live["kind"], live["apiVersion"]
    assert needs_apply(live, manifest) == []


def test_a_variable_that_is_no_longer_wanted_is_named() -> None:
    manifest = statefulset()
    live = stored(manifest)
    container(manifest)["env"] = [each for each in container(manifest)["env"] if each["name"] != "NCCL_DEBUG"]
    del manifest["spec"]["template"]["metadata"]["annotations"]["prometheus.io/scrape"]
    assert covers(live, manifest)
    assert needs_apply(live, manifest) == owned_but_unwanted(live, manifest)
    assert set(needs_apply(live, manifest)) == {
        "spec.template.spec.containers[engine].env[NCCL_DEBUG]",
        'spec.template.metadata.annotations["prometheus.io/scrape"]',
    }


def test_a_field_that_somebody_else_took_over_is_taken_back() -> None:
    """Whoever updates a field becomes its only owner, though the value may be the wanted one again."""
    manifest = statefulset()
    live = stored(manifest)
    applied = live["metadata"]["managedFields"][0]["fieldsV1"]
    del applied["f:spec"]["f:template"]["f:spec"]["f:terminationGracePeriodSeconds"]
    assert covers(live, manifest)
    assert needs_apply(live, manifest) == ["spec.template.spec.terminationGracePeriodSeconds"]
    assert wanted_but_not_owned(live, manifest) == needs_apply(live, manifest)


def test_an_entry_that_somebody_else_took_over_is_taken_back() -> None:
    manifest = statefulset()
    live = stored(manifest)
    containers = live["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]["f:template"]["f:spec"]["f:containers"]
    del containers['k:{"name":"engine"}']["f:env"]['k:{"name":"NCCL_DEBUG"}']
    assert needs_apply(live, manifest) == ["spec.template.spec.containers[engine].env[NCCL_DEBUG]"]


def test_what_another_manager_applied_is_not_ours_to_remove() -> None:
    manifest = statefulset()
    live = stored(manifest)
    fields: dict[str, Any] = {"f:metadata": {"f:labels": {"f:team": {}}}}
    live["metadata"]["labels"]["team"] = "x"
    live["metadata"]["managedFields"].append({"manager": "argocd", "operation": "Apply", "fieldsV1": fields})
    assert needs_apply(live, manifest) == []


def test_values_in_a_set_are_owned_one_by_one() -> None:
    live = {
        "metadata": {
            "finalizers": ["a"],
            "managedFields": [
                {
                    "manager": "kvloop-operator",
                    "operation": "Apply",
                    "fieldsV1": {"f:metadata": {"f:finalizers": {'v:"a"': {}}}},
                }
            ],
        }
    }
    assert needs_apply(live, {"metadata": {"finalizers": ["a"]}}) == []
    assert owned_but_unwanted(live, {"metadata": {"finalizers": []}}) == ['metadata.finalizers["a"]']
    assert wanted_but_not_owned(live, {"metadata": {"finalizers": ["a", "b"]}}) == ['metadata.finalizers["b"]']


def test_a_template_is_wanted_whatever_the_rest_of_the_statefulset_is() -> None:
    manifest = statefulset()
    live = stored(manifest)
    other = replaced(manifest, ("spec", "replicas"), 7)
    other = replaced(other, ("spec", "updateStrategy", "rollingUpdate", "partition"), 7)
    other["metadata"]["labels"]["new"] = "x"
    assert template_wanted(live, other)
    assert statefulset_needs_apply(live, other) == ["metadata.labels.new"]


def test_another_template_is_the_planners_business() -> None:
    manifest = statefulset()
    live = stored(manifest)
    container(manifest)["image"] = "another"
    assert not template_wanted(live, manifest)
    assert statefulset_needs_apply(live, manifest) == []
    assert needs_apply(live, manifest) == ["spec.template.spec.containers[engine].image"]


def test_a_variable_that_is_no_longer_wanted_makes_another_template() -> None:
    manifest = statefulset()
    live = stored(manifest)
    container(manifest)["env"].pop()
    assert not template_wanted(live, manifest)


STATEFULSET = statefulset()
STORED = stored(STATEFULSET)


@given(st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2)))
def test_no_live_object_makes_a_comparison_fail(strange: Any) -> None:
    for path in (("spec",), ("metadata", "managedFields"), ("spec", "template", "spec", "containers")):
        with changed(STORED, path, strange):
            assert needs_apply(STORED, STATEFULSET)


def test_a_port_whose_number_somebody_has_changed_is_put_right_before_an_apply() -> None:
    """An apply alone would add a second port of the same name, which is refused."""
    manifest = child(golden("everything"), "Service", "everything-router")
    live = replaced(stored(manifest), ("spec", "ports", 0, "port"), 9)
    assert ports_put_right(live, manifest) == [
        {"op": "test", "path": "/metadata/resourceVersion", "value": "1"},
        {"op": "add", "path": "/spec/ports/0/port", "value": manifest["spec"]["ports"][0]["port"]},
    ]


def test_a_container_s_port_is_put_right_wherever_the_container_stands() -> None:
    manifest = statefulset()
    live = stored(manifest)
    containers = live["spec"]["template"]["spec"]["containers"]
    containers[0]["ports"][1] |= {"containerPort": 9, "protocol": "UDP"}
    containers.insert(0, {"name": "injected"})
    below = f"/spec/template/spec/containers/{[each['name'] for each in containers].index('engine')}/ports/1"
    assert ports_put_right(live, manifest)[1:] == [
        {"op": "add", "path": f"{below}/containerPort", "value": 5600},
        {"op": "add", "path": f"{below}/protocol", "value": "TCP"},
    ]


@pytest.mark.parametrize("case", CASES)
def test_ports_that_are_right_are_let_be(case: str) -> None:
    assert all(ports_put_right(stored(manifest), manifest) == [] for manifest in golden(case))


def test_a_port_that_another_manifest_wants_elsewhere_is_no_obstacle() -> None:
    """The apply itself takes away what was applied before."""
    manifest = child(golden("everything"), "Service", "everything-router")
    live = stored(manifest)
    manifest["spec"]["ports"][0] |= {"name": "other", "port": 81}
    assert ports_put_right(live, manifest) == []
