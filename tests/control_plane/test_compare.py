"""What ``needs_apply`` says of an apply is what the API server makes of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvloop_operator.cluster.api import STATUS_MANAGER
from kvloop_operator.cluster.kinds import BY_NAME, RESOURCE
from kvloop_operator.compare import MANAGER, needs_apply
from kvloop_operator.ports import ports_put_right
from tests.cluster.kubectl import Kubectl
from tests.harness.kube import Answer, Kube
from tests.unit.operator.documents import document
from tests.unit.operator.situations import ROWS
from tests.unit.operator.situations.cases import assessed
from tests.unit.operator.stored import another, at, changed, leaves, lost, removable, stored

GOLDEN = Path(__file__).parents[1] / "unit" / "operator" / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir())

# The case with objects of every shape; others add nothing but requests.
VARIED = "everything"

# Of an object, not of what was applied.
_BOOKKEEPING = ("managedFields", "resourceVersion", "generation")

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def where(namespace_cp: Kubectl) -> str:
    assert namespace_cp.namespace is not None
    return namespace_cp.namespace


def manifests(case: str, namespace: str) -> Iterator[dict[str, Any]]:
    """A golden case's manifests, in a namespace, of the kinds that every cluster has."""
    for manifest in yaml.safe_load_all((GOLDEN / case / "expected.yaml").read_text(encoding="utf-8")):
        if manifest["kind"] != "PodMonitor":
            manifest["metadata"]["namespace"] = namespace
            for subject in manifest.get("subjects", ()):
                subject.pop("namespace", None)
            # The garbage collector would take children of an owner that is not there.
            manifest["metadata"].pop("ownerReferences", None)
            yield manifest


def apply(kube: Kube, manifest: Mapping[str, Any], **options: str) -> Answer:
    """The operator's write."""
    meta = manifest["metadata"]
    path = BY_NAME[manifest["kind"]].path(meta["namespace"], meta["name"])
    options = {"fieldManager": MANAGER, "force": "true"} | options
    return kube.request("PATCH", path, body=manifest, content="application/apply-patch+yaml", **options)


def applied(kube: Kube, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The live object after an apply, without what its controller writes to it."""
    answer = apply(kube, manifest)
    assert answer.ok, answer.message
    return live(kube, manifest)


def live(kube: Kube, manifest: Mapping[str, Any]) -> dict[str, Any]:
    found = kube.get(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])
    assert found is not None
    return found


def content(found: Mapping[str, Any]) -> dict[str, Any]:
    """What an apply can change of an object."""
    kept = {key: value for key, value in found.items() if key != "status"}
    kept["metadata"] = {key: value for key, value in found["metadata"].items() if key not in _BOOKKEEPING}
    # Who owns nothing is not among them.
    managers = found["metadata"].get("managedFields", ())
    kept["owned"] = [fields["fieldsV1"] for fields in managers if fields["manager"] == MANAGER]
    return kept


@pytest.mark.parametrize("case", CASES)
def test_what_was_applied_needs_no_apply(kube: Kube, where: str, case: str) -> None:
    for manifest in manifests(case, where):
        assert needs_apply(applied(kube, manifest), manifest) == []


@pytest.mark.parametrize("case", CASES)
def test_owners_are_written_down_as_the_unit_tests_assume(kube: Kube, where: str, case: str) -> None:
    for manifest in manifests(case, where):
        (owned,) = content(applied(kube, manifest))["owned"]
        (assumed,) = content(stored(manifest))["owned"]
        assert _paths(owned) == _paths(assumed)


def _paths(tree: Mapping[str, Any], above: str = "") -> set[str]:
    """Every path of a tree; what an entry owns of itself is left out."""
    paths = set()
    for name, below in tree.items():
        if name != ".":
            # The keys of an entry have no order.
            step = "k:" + json.dumps(json.loads(name[2:]), sort_keys=True) if name.startswith("k:") else name
            paths |= {f"{above}/{step}"} | _paths(below, f"{above}/{step}")
    return paths


def test_a_manifest_that_lost_something_needs_an_apply_where_that_changes_anything(kube: Kube, where: str) -> None:
    tried = 0
    for manifest in manifests(VARIED, where):
        before = applied(kube, manifest)
        for path in removable(manifest):
            if path == ("spec", "policyTypes", 0):
                # The API server fills an empty list again.
                continue
            with lost(manifest, path):
                tried += _is_right(kube, before, manifest, path)
    assert tried > 300


def test_a_manifest_that_says_something_else_needs_an_apply(kube: Kube, where: str) -> None:
    tried = 0
    for manifest in manifests(VARIED, where):
        before = applied(kube, manifest)
        for path in leaves(manifest):
            if path[0] in ("apiVersion", "kind") or path[:2] in (("metadata", "name"), ("metadata", "namespace")):
                continue
            with changed(manifest, path, another(at(manifest, path))):
                tried += _is_right(kube, before, manifest, path)
    assert tried > 300


def _is_right(kube: Kube, before: Mapping[str, Any], manifest: Mapping[str, Any], path: Any) -> bool:
    """Compare with an apply that is not kept; False where the API server refuses it."""
    answer = apply(kube, manifest, dryRun="All")
    if answer.ok:
        changes = content(answer.body) != content(before)
        assert bool(needs_apply(before, manifest)) is changes, path
    return answer.ok


def test_what_others_change_is_seen_and_put_right(kube: Kube, where: str) -> None:
    tried = 0
    for manifest in manifests(VARIED, where):
        before = applied(kube, manifest)
        path = BY_NAME[manifest["kind"]].path(where, manifest["metadata"]["name"])
        for leaf in leaves(manifest):
            if leaf[0] in ("apiVersion", "kind") or leaf[:2] in (("metadata", "name"), ("metadata", "namespace")):
                continue
            pointer = _pointer(before, manifest, leaf)
            patch = [{"op": "replace", "path": pointer, "value": another(at(manifest, leaf))}]
            content_type = "application/json-patch+json"
            answer = kube.request("PATCH", path, body=patch, content=content_type, fieldManager="kubectl-edit")
            if not answer.ok or content(answer.body)["owned"] == content(before)["owned"]:
                # Not allowed, or no change at all: 480 and 480x are the same where only digits are kept.
                continue
            tried += 1
            assert needs_apply(answer.body, manifest), leaf
            unblocking = ports_put_right(answer.body, manifest)
            assert bool(unblocking) is not apply(kube, manifest, dryRun="All").ok, leaf
            if unblocking:
                assert kube.request("PATCH", path, body=unblocking, content=content_type).ok
            assert needs_apply(applied(kube, manifest), manifest) == [], leaf
    assert tried > 100


def _pointer(found: Any, manifest: Any, path: tuple[Any, ...]) -> str:
    """Where in a live object a leaf of its manifest stands."""
    pointer = ""
    for step in path:
        place = step
        if isinstance(step, int) and isinstance(manifest[step], Mapping):
            entry = manifest[step]
            scored = [sum(each.get(key) == value for key, value in entry.items()) for each in found]
            place = scored.index(max(scored))
        pointer += "/" + str(place).replace("~", "~0").replace("/", "~1")
        found, manifest = found[place], manifest[step]
    return pointer


def test_an_apply_that_is_not_needed_changes_no_version(kube: Kube, where: str) -> None:
    for manifest in manifests(VARIED, where):
        if manifest["kind"] in ("StatefulSet", "Deployment", "PodDisruptionBudget"):
            # Their controllers write to them meanwhile.
            continue
        before = applied(kube, manifest)
        after = applied(kube, manifest)
        assert before["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]


def test_what_others_add_is_let_be(kube: Kube, where: str) -> None:
    for manifest in manifests(VARIED, where):
        applied(kube, manifest)
        added = {"metadata": {"labels": {"foreign": "x"}, "annotations": {"foreign": "x"}}}
        found = kube.patch(manifest["kind"], where, manifest["metadata"]["name"], added)
        assert needs_apply(found, manifest) == []


def test_the_order_of_variables_is_the_applied_one(kube: Kube, where: str) -> None:
    manifest = next(each for each in manifests(VARIED, where) if each["kind"] == "StatefulSet")
    before = applied(kube, manifest)
    turned = copy.deepcopy(manifest)
    turned["spec"]["template"]["spec"]["containers"][0]["env"].reverse()
    assert needs_apply(before, turned) == ["spec.template.spec.containers[engine].env"]
    assert needs_apply(applied(kube, turned), turned) == []


@pytest.mark.parametrize("field", ["stringData", "data"])
def test_a_secret_needs_no_apply_whichever_way_its_text_is_given(kube: Kube, where: str, field: str) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "a-secret", "namespace": where},
        field: {"token": "dA=="},
    }
    found = applied(kube, secret)
    assert needs_apply(found, secret) == []
    taken = kube.patch("Secret", where, "a-secret", {"data": {"token": "dQ=="}})
    assert "data.token" in needs_apply(taken, secret)
    assert needs_apply(applied(kube, secret), secret) == []
    more = {**secret, field: {"token": "dA==", "other": "dA=="}}
    assert needs_apply(applied(kube, secret), more) == ["data.other"]
    assert needs_apply(applied(kube, more), secret) == ["data.other"]


def test_a_status_needs_no_apply_once_it_is_written(kube: Kube, where: str) -> None:
    kube.create(document(), where)
    path = RESOURCE.path(where, "demo")

    def written(status: Mapping[str, Any]) -> tuple[Answer, dict[str, Any]]:
        wanted = {"apiVersion": RESOURCE.api_version, "kind": RESOURCE.kind, "status": status}
        wanted["metadata"] = {"name": "demo", "namespace": where}
        options = {"fieldManager": STATUS_MANAGER, "force": "true", "fieldValidation": "Strict"}
        content = "application/apply-patch+yaml"
        return kube.request("PATCH", f"{path}/status", body=wanted, content=content, **options), wanted

    for row in ROWS:
        answer, wanted = written(assessed(row).status)
        assert answer.ok, answer.message
        found = kube.request("GET", path).body
        assert needs_apply(found, wanted, STATUS_MANAGER) == [], row.name
        assert found["status"] == wanted["status"]
        for path_of_leaf in leaves(wanted["status"]):
            if path_of_leaf[-1] != "type":
                with changed(wanted, ("status", *path_of_leaf), another(at(wanted["status"], path_of_leaf))):
                    assert needs_apply(found, wanted, STATUS_MANAGER), path_of_leaf
