"""Whole step sequences, spelled out: what the planner does to a world from an edit until it is at rest.

``prefill 2/1`` is a write of two replicas with partition 1. One line is one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvloop_connector.settings import Role
from kvloop_operator.rollout import (
    Action,
    ApplyStatefulSet,
    DeletePod,
    Desired,
    Fault,
    MarkDraining,
    Observed,
    Phase,
    Step,
    plan,
)
from tests.unit.operator.rollout_invariants import Monitor
from tests.unit.operator.rollout_world import ROLES, World, at_rest


@dataclass(slots=True)
class Tape:
    """The planner, and a line for every step that did something."""

    lines: list[str] = field(default_factory=list)

    def __call__(self, desired: Desired, observed: Observed, now: float) -> Step | None:
        step = plan(desired, observed, now)
        if step is not None and step.actions:
            self.lines.append(", ".join(_word(action) for action in step.actions))
        return step


def _word(action: Action) -> str:
    if isinstance(action, ApplyStatefulSet):
        return f"{action.role} {action.replicas}/{action.partition}"
    if isinstance(action, MarkDraining):
        return f"drain {action.pod}"
    return f"delete {action.pod}" if isinstance(action, DeletePod) else f"keep {action.pod}"


def world_of(prefill: int, decode: int, *, surge: int = 0) -> tuple[World, Monitor, list[str]]:
    tape = Tape()
    world = at_rest(tape, prefill, decode, surge=surge)
    return world, Monitor(world), tape.lines


def run(world: World, ticks: int) -> None:
    for _ in range(ticks):
        world.tick()


def run_until(world: World, lines: list[str], line: str) -> None:
    for _ in range(200):
        if line in lines:
            return
        world.tick()
    raise AssertionError(f"{line!r} is not among {lines}")


def edit(monitor: Monitor, kv: int) -> None:
    monitor.world.kv = kv
    monitor.world.changed = True
    monitor.template_was_edited()


def scale(world: World, *, prefill: int, decode: int) -> None:
    world.wanted = {Role.PREFILL: prefill, Role.DECODE: decode}
    world.changed = True


def test_one_pair_is_drained_whole_and_replaced_at_once() -> None:
    _, monitor, lines = world_of(1, 1)
    edit(monitor, 1)
    monitor.settle(100)
    assert lines == [
        "prefill 1/1, decode 1/1",  # the new template, with every pod protected
        "drain prefill-0, drain decode-0",  # nothing can be kept: both, so that the outage is one start long
        "prefill 1/0, decode 1/0",  # both are drained
        "prefill 1/1, decode 1/1",  # at rest
    ]


def test_two_pairs_are_replaced_pair_by_pair() -> None:
    _, monitor, lines = world_of(2, 2)
    edit(monitor, 1)
    monitor.settle(100)
    assert lines == [
        "prefill 2/2, decode 2/2",
        "drain prefill-1, drain decode-1",  # the old pair of ordinals 0 serves
        "prefill 2/1, decode 2/1",
        "drain prefill-0, drain decode-0",  # the new pair of ordinals 1 serves
        "prefill 2/0, decode 2/0",
        "prefill 2/2, decode 2/2",
    ]


def test_with_one_decode_engine_one_prefill_engine_goes_first_and_the_rest_together() -> None:
    _, monitor, lines = world_of(3, 1)
    edit(monitor, 1)
    monitor.settle(100)
    assert lines == [
        "prefill 3/3, decode 1/1",
        "drain prefill-2",  # shows that the new revision starts, while prefill-0, prefill-1 and decode-0 serve
        "prefill 3/2",
        "drain prefill-1, drain prefill-0, drain decode-0",  # without decode-0 the old prefill engines serve nobody
        "prefill 3/0, decode 1/0",
        "delete prefill-0",  # the StatefulSet controller would wait for prefill-1 to be ready
        "prefill 3/3, decode 1/1",
    ]


def test_the_ratio_of_the_roles_is_kept_on_the_way() -> None:
    _, monitor, lines = world_of(4, 2)
    edit(monitor, 1)
    monitor.settle(100)
    drains = [line for line in lines if line.startswith("drain")]
    assert drains == [
        "drain prefill-3, drain prefill-2, drain decode-1",
        "drain prefill-1, drain prefill-0, drain decode-0",
    ]


def test_a_change_that_keeps_the_kv_revision_rolls_only_its_role() -> None:
    world, monitor, lines = world_of(1, 2)
    world.templates[Role.DECODE] = 1
    world.changed = True
    monitor.settle(100)
    assert lines == [
        "decode 2/2",
        "drain decode-1",
        "decode 2/1",
        "drain decode-0",  # decode-1 is new and pairs with the same prefill engine
        "decode 2/0",
        "decode 2/2",
    ]


def test_a_surge_pair_serves_while_the_only_pair_is_replaced() -> None:
    _, monitor, lines = world_of(1, 1, surge=1)
    edit(monitor, 1)
    monitor.settle(100)
    assert lines == [
        "prefill 1/1, decode 1/1",
        "prefill 2/1, decode 2/1",  # ordinals 1 come up at the new revision, above the partition
        "drain prefill-0, drain decode-0",
        "prefill 2/0, decode 2/0",
        "prefill 2/2, decode 2/2",
        "drain prefill-1, drain decode-1",  # the surge pair goes once ordinals 0 are ready
        "prefill 1/1, decode 1/1",
    ]


def test_a_surge_pair_that_finds_no_accelerator_gives_way() -> None:
    world, monitor, lines = world_of(1, 1, surge=1)
    world.accelerators = dict.fromkeys(ROLES, 1)
    edit(monitor, 1)
    monitor.settle(100)
    assert lines == [
        "prefill 1/1, decode 1/1",
        "prefill 2/1, decode 2/1",
        "drain prefill-0, drain decode-0",
        "prefill 1/0, decode 1/0",  # in the same write: the accelerators that become free are for ordinals 0
        "prefill 1/1, decode 1/1",
    ]


def test_a_revert_in_the_middle_replaces_only_what_was_new() -> None:
    world, monitor, lines = world_of(2, 2)
    edit(monitor, 1)
    run_until(world, lines, "drain prefill-0, drain decode-0")
    lines.clear()
    edit(monitor, 0)
    monitor.settle(100)
    assert lines == [
        "prefill 2/2, decode 2/2",  # the old template again
        "keep prefill-0, keep decode-0",  # wanted again: they serve
        "drain prefill-1, drain decode-1",
        "delete prefill-1, delete decode-1",  # the current revision never changed: they come back at it
    ]


def test_a_broken_revision_stops_at_the_first_pair_and_a_revert_deletes_it() -> None:
    world, monitor, lines = world_of(2, 2)
    world.broken_kv["kv1"] = Fault.IMAGE
    edit(monitor, 1)
    monitor.settle_blocked(200)
    assert lines == ["prefill 2/2, decode 2/2", "drain prefill-1, drain decode-1", "prefill 2/1, decode 2/1"]
    assert world.last is not None
    assert world.last.phase is Phase.BLOCKED
    assert world.last.reason == "prefill-1 at the wanted revision is broken (it does not start)"
    lines.clear()
    edit(monitor, 0)
    monitor.settle(100)
    assert lines == ["prefill 2/2, decode 2/2", "delete prefill-1, delete decode-1"]


def test_another_edit_gets_over_a_broken_revision() -> None:
    world, monitor, lines = world_of(2, 2)
    world.broken_kv["kv1"] = Fault.CRASH
    edit(monitor, 1)
    monitor.settle_blocked(200)
    lines.clear()
    edit(monitor, 2)
    monitor.settle(100)
    assert lines == [
        "prefill 2/2, decode 2/2",
        "drain prefill-1, drain decode-1",  # so that the partition does not protect them again
        "prefill 2/1, decode 2/1",
        "drain prefill-0, drain decode-0",
        "prefill 2/0, decode 2/0",
        "prefill 2/2, decode 2/2",
    ]


def test_scaling_down_drains_the_highest_ordinals_and_then_lowers_replicas() -> None:
    world, monitor, lines = world_of(3, 2)
    scale(world, prefill=1, decode=1)
    monitor.settle(100)
    assert lines == ["drain prefill-1, drain prefill-2, drain decode-1", "prefill 1/1, decode 1/1"]


def test_a_scaling_down_that_is_withdrawn_lets_the_pods_serve_again() -> None:
    world, monitor, lines = world_of(2, 2)
    scale(world, prefill=1, decode=1)
    run(world, 1)
    scale(world, prefill=2, decode=2)
    monitor.settle(100)
    assert lines == ["drain prefill-1, drain decode-1", "keep prefill-1, keep decode-1"]


def test_scaling_up_happens_at_once_and_at_the_wanted_revision() -> None:
    world, monitor, lines = world_of(2, 2)
    edit(monitor, 1)
    run_until(world, lines, "drain prefill-1, drain decode-1")
    scale(world, prefill=2, decode=3)
    run(world, 2)
    assert lines[2] == "decode 3/2"
    assert world.pods[Role.DECODE][2].kv_revision == "kv1"
    monitor.settle(100)


def test_scaling_down_in_the_middle_of_a_rollout_comes_before_the_next_wave() -> None:
    world, monitor, lines = world_of(4, 4)
    edit(monitor, 1)
    run_until(world, lines, "prefill 4/3, decode 4/3")
    lines.clear()
    scale(world, prefill=2, decode=2)
    monitor.settle(150)
    assert lines == [
        "prefill 3/3, decode 3/3",  # ordinals 3 have not started again yet: nothing to drain
        "drain prefill-2, drain decode-2",
        "prefill 2/2, decode 2/2",
        "drain prefill-1, drain decode-1",
        "prefill 2/1, decode 2/1",
        "drain prefill-0, drain decode-0",
        "prefill 2/0, decode 2/0",
        "prefill 2/2, decode 2/2",
    ]


def test_scaling_down_to_one_pair_in_a_rollout_keeps_the_extra_pair_until_it_is_over() -> None:
    world, monitor, lines = world_of(2, 2)
    edit(monitor, 1)
    scale(world, prefill=1, decode=1)
    monitor.settle(100)
    assert lines == [
        "prefill 2/2, decode 2/2",
        "drain prefill-1, drain decode-1",
        "prefill 2/1, decode 2/1",
        "drain prefill-0, drain decode-0",
        "prefill 2/0, decode 2/0",
        "prefill 2/2, decode 2/2",
        "drain prefill-1, drain decode-1",
        "prefill 1/1, decode 1/1",
    ]


def test_extra_pods_that_show_that_a_revision_is_broken_stay_until_it_is_given_up() -> None:
    world, monitor, lines = world_of(4, 4)
    world.broken_kv["kv1"] = Fault.CRASH
    edit(monitor, 1)
    monitor.settle_blocked(200)
    lines.clear()
    scale(world, prefill=2, decode=2)
    monitor.settle_blocked(200)
    assert lines == []  # without ordinals 3 the next pair would go for the broken revision
    edit(monitor, 0)
    monitor.settle(100)
    assert lines == [
        "prefill 4/4, decode 4/4",
        "prefill 3/3, decode 3/3",  # ordinals 3 do not run: there is nothing to drain
        "drain prefill-2, drain decode-2",
        "prefill 2/2, decode 2/2",
    ]


def test_suspending_drains_everything_and_resuming_brings_it_back() -> None:
    world, monitor, lines = world_of(1, 1)
    world.suspend = world.changed = True
    monitor.settle(100)
    assert lines == ["drain prefill-0, drain decode-0", "prefill 0/0, decode 0/0"]
    lines.clear()
    world.suspend, world.changed = False, True
    monitor.settle(100)
    assert lines == ["prefill 1/1, decode 1/1"]


def test_three_quick_edits_restart_each_pod_once() -> None:
    world, monitor, lines = world_of(2, 2)
    for kv in (1, 2, 3):
        edit(monitor, kv)
        run(world, 1)
    monitor.settle(100)
    assert [line for line in lines if line.startswith("drain")] == [
        "drain prefill-1, drain decode-1",
        "drain prefill-0, drain decode-0",
    ]
    assert {pod.kv_revision for pod in world.everybody()} == {"kv3"}


def test_without_a_report_a_pod_goes_at_its_bound() -> None:
    world, monitor, lines = world_of(1, 1)
    world.routers_up = False
    edit(monitor, 1)
    run_until(world, lines, "drain prefill-0, drain decode-0")
    started = world.now
    run_until(world, lines, "prefill 1/0, decode 1/0")
    assert world.now - started == world.settings().drain_timeout_seconds
    monitor.settle(100)


def test_a_new_operator_process_goes_on_from_the_labels() -> None:
    world, monitor, lines = world_of(2, 2)
    edit(monitor, 1)
    run_until(world, lines, "prefill 2/2, decode 2/2")
    world.crash_after = 1
    monitor.settle(100)
    assert lines == [
        "prefill 2/2, decode 2/2",
        "drain prefill-1, drain decode-1",  # the process ends after the first label
        "drain decode-1",  # the next one adds the second
        "prefill 2/1, decode 2/1",
        "drain prefill-0, drain decode-0",
        "prefill 2/0, decode 2/0",
        "prefill 2/2, decode 2/2",
    ]
