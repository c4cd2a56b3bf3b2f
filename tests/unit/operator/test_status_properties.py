"""What holds of every status, whatever the cluster is like."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import DisaggregatedInferenceStatus
from kvloop_operator.errors import Fault
from kvloop_operator.live import Refusal
from kvloop_operator.reports import Verdict
from kvloop_operator.rollout import Phase, Step
from kvloop_operator.status import Assessment, ConditionType, Problem, Reason, Situation, assess
from tests.unit.operator.scenes import (
    NOW,
    Scene,
    crashing,
    ended,
    ending,
    pair,
    pod,
    running,
    scene,
    unschedulable,
    waiting,
)
from tests.unit.operator.stored import at, branches, replaced

CONTAINERS: tuple[dict[str, Any], ...] = (
    running(),
    running(ready=False, since=NOW - 20),
    running(ready=False, since=NOW - 20, restarts=3, last=ending()),
    crashing(),
    crashing(137, "OOMKilled"),
    ended(ending(2), restarts=0),
    ended(ending(2), restarts=1),
    waiting("ErrImagePull", "not found"),
    waiting("ImagePullBackOff", 'Back-off pulling image "x": ErrImagePull: not found'),
    waiting("CreateContainerConfigError", 'secret "hf" not found'),
    waiting("ContainerCreating"),
)


@functools.cache
def a_scene(prefill: int, decode: int, *, paused: bool, suspend: bool, canary: bool) -> Scene:
    return scene(
        prefill__replicas=prefill,
        decode__replicas=decode,
        paused=paused,
        suspend=suspend,
        router__canary__enabled=canary,
    )


@functools.cache
def a_template(role: str, *, wanted: bool) -> Mapping[str, Any]:
    """A StatefulSet's live object, with or without the wanted template."""
    child = a_scene(1, 1, paused=False, suspend=False, canary=True).children["StatefulSet", f"demo-{role}"]
    path = ("spec", "template", "spec", "containers", 0, "image")
    return child if wanted else replaced(child, path, "another")


class Chance:
    """Draws what a cluster is like. A failure is told by its seed, since a whole situation fills pages."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def rarely(self) -> bool:
        return self.random.randrange(8) == 0

    def pods(self, shown: Scene) -> list[dict[str, Any]]:
        """Pods in any state, as many as there may be, at either revision."""
        draw, found = self.random, []
        for role in ("prefill", "decode"):
            for ordinal in range(draw.randrange(4)):
                details: dict[str, Any] = {"ready_since": draw.choice([NOW - 10_000, NOW - 30, NOW])}
                if draw.randrange(3) == 0:
                    details |= {"revision": "old", "kv": draw.choice(["oldkv", shown.revision])}
                if self.rarely():
                    details["draining"] = draw.choice([str(int(NOW) - 10), "soon"])
                if self.rarely():
                    details["deleted"] = draw.choice([NOW - 1000, NOW + 10])
                if self.rarely():
                    details["scheduled"] = unschedulable(draw.choice([NOW - 1000, NOW - 1]))
                if self.rarely():
                    details |= {"phase": "Failed", "reason": "Evicted", "ready": False}
                container = running() if draw.randrange(2) else draw.choice(CONTAINERS)
                found.append(shown.engine(role, ordinal, container, **details))
        for index in range(draw.randrange(3)):
            container = running() if draw.randrange(3) else draw.choice(CONTAINERS)
            found.append(pod(f"demo-router-{index}", names.ROUTER, {**container, "name": "router"}))
        return found

    def children(self, shown: Scene) -> dict[tuple[str, str], Any]:
        draw = self.random
        children = dict(shown.children)
        for role in ("prefill", "decode"):
            child = dict(a_template(role, wanted=not self.rarely()))
            child["spec"] = {
                **child["spec"],
                "replicas": draw.randrange(4),
                "updateStrategy": {"rollingUpdate": {"partition": draw.randrange(4)}},
            }
            child["status"] = {
                "observedGeneration": 0 if self.rarely() else 1,
                "currentRevision": draw.choice(["old", "new"]),
                "updateRevision": "new",
            }
            children["StatefulSet", f"demo-{role}"] = child
            if self.rarely():
                del children["StatefulSet", f"demo-{role}"]
        return children

    def pairs(self, pods: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
        pairs = {}
        for prefill in (each for each in pods if "-prefill-" in each["metadata"]["name"]):
            for decode in (each for each in pods if "-decode-" in each["metadata"]["name"]):
                verdict = self.random.choice([Verdict.VERIFIED, *Verdict, None])
                if verdict is not None:
                    attempts = self.random.choice([1, 5])
                    report = pair(prefill, decode, verdict, attempts=attempts, detail="why")
                    pairs[report.key] = report
        return pairs

    def scene(self) -> Scene:
        shown = a_scene(
            0 if self.rarely() else self.random.randint(1, 2),
            self.random.randint(1, 2),
            paused=self.rarely(),
            suspend=self.rarely(),
            canary=not self.rarely(),
        )
        pods = self.pods(shown)
        refusals = (Refusal("StatefulSet", "demo-decode", "quota exceeded"),) if self.rarely() else ()
        shown = replace(
            shown, pods=tuple(pods), children=self.children(shown), pairs=self.pairs(pods), refusals=refusals
        )
        return shown.with_child("Deployment", "demo-router", updatedReplicas=0) if self.rarely() else shown

    def situation(self) -> Situation:
        shown = self.scene()
        changes: dict[str, Any] = {"generation": self.random.randint(1, 2)}
        if self.rarely():
            fault = Fault("spec.engine.image", '"x"', "no vLLM version in the tag", "set engine.version")
            changes |= {"faults": (fault,), "step": None, "wanted_revision": ""}
        elif self.rarely():
            changes |= {"resource": None, "facts": None, "step": None, "wanted_revision": ""}
        elif self.rarely():
            changes |= {"problems": (Problem(Reason.FORBIDDEN, "Secret demo-router: forbidden"),), "step": None}
        elif self.rarely():
            changes["step"] = Step(self.random.choice(list(Phase)), "waiting for x to drain (running turns: 3)")
        if self.rarely():
            changes["unreachable"] = ("demo-router-0: no answer",)
        return shown.situation(**changes)

    def history(self) -> list[Situation]:
        """The same resource in one situation after another."""
        return [self.situation() for _ in range(self.random.randint(1, 3))]


def lived(seed: int) -> tuple[Situation, Assessment]:
    """The last situation of a history, in which each finds the status of the one before it, and what is said of it."""
    previous: Mapping[str, Any] = {"observedGeneration": -1}
    for situation in Chance(seed).history():
        last = replace(situation, previous=previous)
        assessment = assess(last)
        previous = assessment.status
    return last, assessment


def conditions(status: Mapping[str, Any]) -> dict[str, Any]:
    return {each["type"]: each for each in status["conditions"]}


seeds = st.integers(0, 2**32)
many = settings(max_examples=120, deadline=None)


@many
@given(seeds)
@example(2344309)
def test_nothing_changes_while_nothing_changes(seed: int) -> None:
    situation, first = lived(seed)
    again = assess(replace(situation, previous=first.status))
    assert again.status == first.status
    assert again.transitions == ()
    assert again.again_at == first.again_at


@many
@given(seeds)
def test_conditions_keep_the_rules_by_which_tools_read_them(seed: int) -> None:
    situation, assessment = lived(seed)
    found = conditions(assessment.status)
    assert list(found) == [kind.value for kind in ConditionType if kind.value in found]
    assert all(each["observedGeneration"] == situation.generation and each["message"] for each in found.values())
    ready = found["Ready"]
    assert (ready["status"] == "False") is ("Stalled" in found)
    assert not {"Stalled", "Reconciling"} <= found.keys()
    if ready["status"] == "Unknown":
        assert "Reconciling" in found or ready["reason"] in ("Paused", "CanaryDisabled")
    for kind in ("Reconciling", "Stalled", "Paused"):
        assert found.get(kind, {}).get("status", "True") == "True"
    if "Stalled" in found or ready["status"] == "Unknown":
        told = found.get("Stalled") or found.get("Reconciling") or ready
        assert (told["reason"], told["message"]) == (ready["reason"], ready["message"])


@many
@given(seeds)
def test_ready_is_never_said_of_what_does_not_serve(seed: int) -> None:
    situation, assessment = lived(seed)
    found = conditions(assessment.status)
    if found["Ready"]["status"] == "True" and found["Ready"]["reason"] == "Serving":
        assert found["PrefillReady"]["status"] == found["DecodeReady"]["status"] == "True"
        assert found["RouterReady"]["status"] == "True"
        assert found["KVTransferVerified"]["status"] == "True"
        assert not situation.problems
        assert not situation.faults
        assert all(assessment.status[role]["ready"] >= 1 for role in ("prefill", "decode", "router"))


@many
@given(seeds)
def test_a_status_is_one_that_the_api_server_takes(seed: int) -> None:
    _, assessment = lived(seed)
    DisaggregatedInferenceStatus.model_validate_json(_json(assessment.status))


def _json(status: Mapping[str, Any]) -> str:
    return json.dumps(status)


@many
@given(seeds)
def test_counts_of_turns_and_handles_never_reach_a_message(seed: int) -> None:
    _, assessment = lived(seed)
    assert not any("running turns:" in each["message"] for each in assessment.status["conditions"])


@many
@given(seeds)
def test_the_order_of_what_was_read_does_not_matter(seed: int) -> None:
    situation, assessment = lived(seed)
    random = Random(seed)
    shuffled = list(situation.live.pods)
    random.shuffle(shuffled)
    pairs = list(situation.pairs.items())
    random.shuffle(pairs)
    turned = replace(situation, live=replace(situation.live, pods=tuple(shuffled)), pairs=dict(pairs))
    assert assess(turned) == assessment


@many
@given(seeds, st.integers(1, 10**6))
def test_a_transition_keeps_its_moment_until_the_status_changes(seed: int, later: int) -> None:
    situation, first = lived(seed)
    before = conditions(first.status)
    moved = replace(situation, previous=first.status, now=situation.now + later)
    for kind, condition in conditions(assess(moved).status).items():
        if kind in before and before[kind]["status"] == condition["status"]:
            assert condition["lastTransitionTime"] == before[kind]["lastTransitionTime"]


STRANGE: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just([]) | st.just({}) | st.just([None])
)


@many
@given(seeds, st.data())
def test_no_object_of_the_api_server_makes_an_assessment_fail(seed: int, data: st.DataObject) -> None:
    situation = Chance(seed).scene().situation()
    objects = [*situation.live.pods, *situation.live.children.values()]
    subject = data.draw(st.sampled_from(objects)) if objects else {}
    # The API server itself keeps managedFields, and names what it gives.
    paths = [
        path for path in branches(subject) if path[:2] not in (("metadata", "name"), ("metadata", "managedFields"))
    ]
    if not paths:
        return
    path = data.draw(st.sampled_from(paths))
    holder, kept = at(subject, path[:-1]), at(subject, path)
    holder[path[-1]] = data.draw(STRANGE)
    try:
        assess(situation)
    finally:
        holder[path[-1]] = kept


@many
@given(seeds, st.data())
def test_no_earlier_status_makes_an_assessment_fail(seed: int, data: st.DataObject) -> None:
    """Such as one that another version, or a person, has written."""
    situation, assessment = lived(seed)
    path = data.draw(st.sampled_from(list(branches(assessment.status))))
    previous = replaced(assessment.status, path, data.draw(STRANGE))
    again = assess(replace(situation, previous=previous)).status
    DisaggregatedInferenceStatus.model_validate_json(_json(again))


@pytest.mark.parametrize("previous", [{}, {"observedGeneration": -1}, {"conditions": None}, {"conditions": [None, {}]}])
def test_a_status_without_conditions_is_no_obstacle(previous: Any) -> None:
    assert conditions(assess(replace(scene(), previous=previous).situation()).status)["Ready"]["status"] == "True"
