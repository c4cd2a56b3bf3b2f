"""Single answers of the planner: what it says while it waits, and what it makes of odd observations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvloop_connector.settings import Role
from kvloop_operator.rollout import (
    ApplyStatefulSet,
    Breakage,
    Desired,
    DrainReport,
    Fault,
    MarkDraining,
    Observed,
    Phase,
    Pod,
    RoleState,
    Settings,
    StatefulSet,
    Step,
    UnmarkDraining,
    plan,
)

NOW = 10_000.0
DESIRED = Desired({Role.PREFILL: 1, Role.DECODE: 1}, "new")
OLD, NEW = "old", "new"


def statefulset(*, current: str = NEW, replicas: int = 1, partition: int | None = None) -> StatefulSet:
    return StatefulSet(
        replicas=replicas,
        partition=replicas if partition is None else partition,
        template_wanted=True,
        settled=True,
        current_revision=current,
        update_revision=NEW,
    )


def pod(role: Role, revision: str = NEW, ordinal: int = 0) -> Pod:
    return Pod(f"demo-{role}-{ordinal}", f"{role}-{ordinal}", ordinal, revision, revision, ready=True)


def observed(prefill: Pod, decode: Pod, *, current: str = NEW, partition: int | None = None) -> Observed:
    shape = statefulset(current=current, partition=partition)
    return Observed({Role.PREFILL: RoleState(shape, (prefill,)), Role.DECODE: RoleState(shape, (decode,))})


def draining(role: Role, since: float = NOW - 10) -> Pod:
    return replace(pod(role, OLD), draining_since=since)


def drain_of_the_old_pair(decode: DrainReport | None) -> Step:
    """What the planner says while both pods of the old revision drain; the prefill engine has nothing left."""
    reports = {"prefill-0": DrainReport(0, 0)} | ({} if decode is None else {"decode-0": decode})
    state = observed(draining(Role.PREFILL), draining(Role.DECODE), current=OLD)
    step = plan(DESIRED, replace(state, reports=reports), NOW)
    assert step is not None
    return step


def test_nothing_is_to_be_done_at_rest() -> None:
    assert plan(DESIRED, observed(pod(Role.PREFILL), pod(Role.DECODE)), NOW) is None


def test_what_does_not_exist_is_made_with_every_pod_protected() -> None:
    step = plan(DESIRED, Observed({Role.PREFILL: RoleState(), Role.DECODE: RoleState()}), NOW)
    assert step is not None
    assert step.actions == (ApplyStatefulSet(Role.PREFILL, 1, 1), ApplyStatefulSet(Role.DECODE, 1, 1))


def test_a_paused_resource_is_left_alone() -> None:
    step = plan(replace(DESIRED, paused=True), observed(draining(Role.PREFILL), pod(Role.DECODE, OLD)), NOW)
    assert step == Step(Phase.PAUSED, "paused: nothing is changed")


def test_revisions_are_not_believed_before_the_controller_has_seen_the_template() -> None:
    state = observed(pod(Role.PREFILL, OLD), pod(Role.DECODE, OLD))
    unsettled = replace(statefulset(current=OLD), settled=False, update_revision=OLD)
    state = replace(state, roles={role: replace(state.roles[role], statefulset=unsettled) for role in state.roles})
    assert plan(DESIRED, state, NOW) == Step(
        Phase.APPLYING, "waiting for the StatefulSet controller to see prefill and decode"
    )


@pytest.mark.parametrize(
    ("report", "until"),
    [
        pytest.param(DrainReport(2, 0), NOW + 590, id="running turns: the bound"),
        pytest.param(DrainReport(0, 1), NOW + 20, id="live handles: as long as they are honoured"),
        pytest.param(DrainReport(0, 1, last_deadline=NOW + 5), NOW + 5, id="live handles that end sooner"),
        pytest.param(DrainReport(0, 0, acknowledged=False), NOW + 590, id="a router has not seen the label"),
    ],
)
def test_a_drain_is_waited_for_until(report: DrainReport, until: float) -> None:
    step = drain_of_the_old_pair(report)
    assert step.actions == ()
    assert step.again_at == until
    assert step.reason.startswith("waiting for demo-decode-0 to drain")


def test_a_pod_that_no_report_names_is_waited_for_until_its_bound() -> None:
    step = drain_of_the_old_pair(None)
    assert step.again_at == NOW + 590
    assert step.reason == "waiting for demo-decode-0 to drain (not every router has reported)"


def test_a_drained_pair_is_replaced_in_one_step() -> None:
    step = drain_of_the_old_pair(DrainReport(0, 0))
    assert step.actions == (ApplyStatefulSet(Role.PREFILL, 1, 0), ApplyStatefulSet(Role.DECODE, 1, 0))


@pytest.mark.parametrize("since", [math.inf, NOW + 3600])
def test_a_label_whose_bound_would_never_come_is_written_anew(since: float) -> None:
    state = observed(draining(Role.PREFILL, since), draining(Role.DECODE), current=OLD)
    step = plan(DESIRED, state, NOW)
    assert step is not None
    assert step.actions == (MarkDraining(Role.PREFILL, "demo-prefill-0", "prefill-0", int(NOW)),)


def test_a_label_on_a_pod_that_is_to_stay_is_removed() -> None:
    marked = replace(pod(Role.DECODE), draining_since=NOW - 10)
    step = plan(DESIRED, observed(pod(Role.PREFILL), marked), NOW)
    assert step is not None
    assert step.actions == (UnmarkDraining(Role.DECODE, "demo-decode-0", "decode-0"),)


def test_a_partition_that_somebody_lowered_is_raised_before_the_controller_uses_it() -> None:
    step = plan(DESIRED, observed(pod(Role.PREFILL, OLD), pod(Role.DECODE, OLD), current=OLD, partition=0), NOW)
    assert step is not None
    assert step.actions == (ApplyStatefulSet(Role.PREFILL, 1, 1), ApplyStatefulSet(Role.DECODE, 1, 1))


@pytest.mark.parametrize(
    ("broken", "since", "reason"),
    [
        (
            Breakage(Fault.CRASH, "CrashLoopBackOff: exit code 1"),
            NOW,
            "demo-decode-0 at the wanted revision is broken (CrashLoopBackOff: exit code 1)",
        ),
        (None, NOW - 3600, "demo-decode-0 at the wanted revision does not become ready"),
    ],
)
def test_a_broken_pod_at_the_wanted_revision_is_named(broken: Breakage | None, since: float, reason: str) -> None:
    sick = replace(pod(Role.DECODE), ready=False, not_ready_since=since, broken=broken)
    step = plan(DESIRED, observed(pod(Role.PREFILL), sick), NOW)
    assert step == Step(Phase.BLOCKED, reason)


def test_a_pod_that_starts_is_looked_at_again_when_it_has_taken_too_long() -> None:
    starting = replace(pod(Role.DECODE), ready=False, not_ready_since=NOW - 100)
    desired = replace(DESIRED, settings=Settings(start_seconds=1000))
    step = plan(desired, observed(pod(Role.PREFILL), starting), NOW)
    assert step == Step(Phase.STARTING, "demo-decode-0 is starting", again_at=NOW + 900)
