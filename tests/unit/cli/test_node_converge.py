"""What is wanted and what is there -> which pods to create and delete."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from kvloop.node.converge import Create, Delete, Existing, Step, is_rolled_out, next_steps
from kvloop.node.workloads import Workload, read_manifests
from tests.unit.cli.node_manifests import container, deployment, pod_template, stateful_set

TEMPLATE = read_manifests([stateful_set("x", pod_template(container("sh")))]).workloads[0].template


def workload(kind: str, *, replicas: int, partition: int = 0, strategy: str = "RollingUpdate") -> Workload:
    return Workload(
        kind=kind,
        namespace="default",
        name="x",
        replicas=replicas,
        template=TEMPLATE,
        revision="new",
        strategy=strategy,
        partition=partition,
    )


def pod(number: int, revision: str = "new", *, ready: bool = True, terminating: bool = False) -> Existing:
    return Existing(
        name=f"x-{number}", revision=revision, ready=ready, terminating=terminating, ordinal=number, created=number
    )


def loose(number: int, revision: str = "new", *, ready: bool = True, terminating: bool = False) -> Existing:
    return Existing(name=f"x-{number}", revision=revision, ready=ready, terminating=terminating, created=number)


@pytest.mark.parametrize(
    ("wanted", "pods", "steps"),
    [
        pytest.param(
            workload("StatefulSet", replicas=2),
            [],
            (Create(ordinal=0, revision="new"), Create(ordinal=1, revision="new")),
            id="all at once",
        ),
        pytest.param(workload("StatefulSet", replicas=1), [pod(0)], (), id="settled"),
        pytest.param(workload("StatefulSet", replicas=1), [pod(0), pod(1)], (Delete(name="x-1"),), id="highest goes"),
        pytest.param(
            workload("StatefulSet", replicas=0), [pod(0, terminating=True)], (), id="one that goes is not asked again"
        ),
        pytest.param(
            workload("StatefulSet", replicas=2), [pod(0, "old"), pod(1, "old")], (Delete(name="x-1"),), id="one by one"
        ),
        pytest.param(
            workload("StatefulSet", replicas=2), [pod(0, "old"), pod(1, ready=False)], (), id="waits for the new one"
        ),
        pytest.param(
            workload("StatefulSet", replicas=2),
            [pod(0, "old"), pod(1, "old", ready=False)],
            (Delete(name="x-1"),),
            id="a broken old one does not block",
        ),
        pytest.param(
            workload("StatefulSet", replicas=2, partition=2), [pod(0, "old"), pod(1, "old")], (), id="held by partition"
        ),
        pytest.param(
            workload("StatefulSet", replicas=2, partition=1),
            [pod(0, "old"), pod(1, "old")],
            (Delete(name="x-1"),),
            id="partition lets one through",
        ),
        pytest.param(
            workload("StatefulSet", replicas=2, partition=1),
            [],
            (Create(ordinal=0, revision="old"), Create(ordinal=1, revision="new")),
            id="below the partition a pod comes back at its old revision",
        ),
        pytest.param(
            workload("StatefulSet", replicas=1, strategy="OnDelete"), [pod(0, "old")], (), id="OnDelete does nothing"
        ),
        pytest.param(workload("Deployment", replicas=2), [], (Create(revision="new"),) * 2, id="deployment"),
        pytest.param(
            workload("Deployment", replicas=1), [loose(0, terminating=True)], (Create(revision="new"),), id="replaced"
        ),
        pytest.param(workload("Deployment", replicas=1), [loose(0), loose(1)], (Delete(name="x-1"),), id="youngest"),
        pytest.param(
            workload("Deployment", replicas=1), [loose(0, ready=False), loose(1)], (Delete(name="x-0"),), id="unready"
        ),
        pytest.param(workload("Deployment", replicas=1), [loose(0, "old")], (Create(revision="new"),), id="surge"),
        pytest.param(
            workload("Deployment", replicas=1), [loose(0, "old"), loose(1, ready=False)], (), id="old stays till ready"
        ),
        pytest.param(
            workload("Deployment", replicas=1), [loose(0, "old"), loose(1)], (Delete(name="x-0"),), id="old goes"
        ),
        pytest.param(
            workload("Deployment", replicas=1, strategy="Recreate"),
            [loose(0, "old")],
            (Delete(name="x-0"),),
            id="recreate deletes first",
        ),
        pytest.param(
            workload("Deployment", replicas=1, strategy="Recreate"),
            [loose(0, "old", terminating=True)],
            (),
            id="recreate waits till all are gone",
        ),
    ],
)
def test_next_steps(wanted: Workload, pods: list[Existing], steps: tuple[Step, ...]) -> None:
    assert next_steps(wanted, pods, current="old") == steps


@given(
    kind=st.sampled_from(["StatefulSet", "Deployment"]),
    replicas=st.integers(0, 4),
    before=st.integers(0, 4),
    strategy=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_start_is_brought_to_what_is_wanted(
    kind: str, replicas: int, before: int, strategy: bool, seed: int
) -> None:
    """Pods become ready and disappear in any order meanwhile; a rolling update never takes a second ready pod away."""
    chance = random.Random(seed)
    rolling = strategy or kind == "StatefulSet"
    wanted = workload(kind, replicas=replicas, strategy="RollingUpdate" if rolling else "Recreate")
    make = pod if kind == "StatefulSet" else loose
    pods = [make(number, "old") for number in range(before)]
    born = before
    for _ in range(200):
        steps = next_steps(wanted, pods, current="old")
        if not steps and is_rolled_out(wanted, pods):
            break
        for step in steps:
            if isinstance(step, Create):
                number = born if step.ordinal is None else step.ordinal
                pods.append(make(number, step.revision, ready=False))
                born += 1
            else:
                pods = [
                    make(p.created, p.revision, ready=p.ready, terminating=True) if p.name == step.name else p
                    for p in pods
                ]
        floor = min(before, replicas) - (1 if kind == "StatefulSet" else 0)
        if rolling:
            assert sum(p.ready and not p.terminating for p in pods) >= floor
        index = chance.randrange(len(pods)) if pods else 0
        if pods and pods[index].terminating:
            del pods[index]
        elif pods:
            p = pods[index]
            pods[index] = make(p.created, p.revision, ready=True)
    assert is_rolled_out(wanted, pods)


def test_partition_and_strategy_are_read_from_the_manifest() -> None:
    [first, second] = read_manifests(
        [
            stateful_set("a", pod_template(container("sh")), replicas=3, partition=2),
            deployment("b", pod_template(container("sh")), strategy={"type": "Recreate"}),
        ]
    ).workloads

    assert (first.partition, first.strategy, second.strategy) == (2, "RollingUpdate", "Recreate")
