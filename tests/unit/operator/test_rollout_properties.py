"""Random sequences of edits, reverts, deaths, delays, operator restarts and lost reports, and then a fair world."""

from __future__ import annotations

import importlib
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kvloop_connector.settings import Role
from kvloop_operator import rollout
from kvloop_operator.rollout import Fault
from tests.unit.operator.rollout_invariants import Broken, Monitor
from tests.unit.operator.rollout_world import ROLES, Plan, World, at_rest

SEQUENCES = 10_000
EVENTS = 6
SIZES = (1, 2, 2, 3)
TICKS_TO_SETTLE = 600
FAULTS = (None, None, Fault.CRASH, Fault.IMAGE)


def play(plan: Plan, script: bytes) -> World:
    """Read a script: three bytes of setting, then two for each event; end in a fair world. Raises Broken."""
    size, more, kind, *events = script
    prefill, decode = SIZES[size % 4], SIZES[size // 4 % 4]
    world = at_rest(
        plan,
        prefill,
        decode,
        surge=(0, 0, 1, 2)[size // 16 % 4],
        accelerators={
            Role.PREFILL: prefill + more % 3,
            Role.DECODE: decode + more // 3 % 3,
        },
        max_unavailable_feature=bool(kind & 1),
        load_ticks=1 + (kind >> 1) % 2,
        turn_seconds=(10.0, 10.0, 30.0, 90.0)[(kind >> 3) % 4],
    )
    if kind & 32:
        world.broken_kv["kv1"] = Fault.CRASH if kind & 64 else Fault.IMAGE
    monitor = Monitor(world)
    routers_answer_at_last = not kind & 128
    for event, argument in zip(events[::2], events[1::2], strict=False):
        happen(monitor, event, argument)
        for _ in range(argument >> 6 if event & 128 else 1 + (argument >> 6) * 3):
            world.tick()
    # Also where no router ever answers again it ends: each drain at its bound.
    world.routers_up = routers_answer_at_last
    end(monitor)
    return world


def happen(monitor: Monitor, event: int, argument: int) -> None:
    """One event."""
    world = monitor.world
    world.changed = True
    role = ROLES[argument & 1]
    number = argument >> 1 & 3
    match event % 14:
        case 0 | 1 | 2:
            world.kv = number
            monitor.template_was_edited()
        case 3:
            world.templates[role] = number
            monitor.template_was_edited()
        case 4 | 5:
            world.wanted[role] = max(number, 1) if argument & 8 else number
            world.accelerators[role] = max(world.accelerators[role], world.wanted[role])
        case 6:
            world.surge = number % 3
        case 7:
            world.suspend = bool(argument & 2)
        case 8:
            world.paused = bool(argument & 2)
        case 9:
            world.fail(role, number, ticks=1 + (argument >> 3 & 7) * 2, fault=FAULTS[argument >> 4 & 3])
        case 10:
            pod = world.pods[role].get(number)
            if pod is not None and argument & 8 and pod.draining_since is None:
                world.pods[role][number] = replace(pod, draining_since=world.now)  # somebody labels it by hand
            elif pod is not None:
                world.delete(role, pod)
        case 11:
            world.crash_after = number
        case 12:
            world.routers_up = bool(argument & 2)
        case _:
            world.operator_delay, world.controller_delay = number, argument >> 3 & 3


def end(monitor: Monitor) -> None:
    """Make the world fair and see where it goes."""
    world = monitor.world
    world.paused, world.crash_after, world.changed = False, None, True
    world.operator_delay = world.controller_delay = 0
    if world.kv_revision in world.broken_kv:
        monitor.settle_blocked(TICKS_TO_SETTLE)
        world.kv, world.changed = 2, True
        monitor.template_was_edited()
    monitor.settle(TICKS_TO_SETTLE)


@pytest.mark.timeout(900)
@settings(max_examples=SEQUENCES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=5, max_size=3 + 2 * EVENTS))
def test_the_invariants_hold_in_random_sequences_of_events(script: bytes) -> None:
    play(rollout.plan, script)


MUTANTS = {
    "every pod counts as drained": (
        "slots.py",
        "return pod.broken is not None or self.drained_at(pod) <= self.now",
        "return True",
    ),
    "running turns do not matter": ("slots.py", "or report.running_turns > 0", ""),
    "routers that have not seen the label are believed": ("slots.py", "or not report.acknowledged", ""),
    "live handles do not matter": ("slots.py", "if report.live_handles == 0:", "if True:"),
    "a drain has no bound": (
        "slots.py",
        "draining_since + self.settings.drain_timeout_seconds",
        "draining_since + 1e9",
    ),
    "a pair may be of two KV revisions": (
        "slots.py",
        "return {pod.kv_revision for pod in self.rows[role].pods if pod.ready",
        "return {'any' for pod in self.rows[role].pods if pod.ready",
    ),
    "pods come back at the wanted revision anywhere": (
        "slots.py",
        "return ordinal >= statefulset.partition or statefulset.current_revision == statefulset.update_revision",
        "return True",
    ),
    "the last pair may go": ("waves.py", "if serves and not view.serves(gone):", "if False:"),
    "the next wave does not wait for the last": ("waves.py", "if slot.outdated or", "if True or"),
    "a broken revision rolls on": (
        "waves.py",
        "elif not view.unable(slot.pod):",
        "elif view.unable(slot.pod):\n                continue\n            elif True:",
    ),
    "a started wave takes the last pair": ("waves.py", "return NO_WAVE if lost else wave", "return wave"),
    "the template is written without protection": (
        "planner.py",
        "ApplyStatefulSet(role, statefulset.replicas, statefulset.replicas)",
        "ApplyStatefulSet(role, statefulset.replicas, statefulset.partition)",
    ),
    "old revisions are believed": ("planner.py", "elif not statefulset.settled:", "elif False:"),
    "paused is ignored": ("planner.py", "if desired.paused:", "if False:"),
    "cancelled drains go on": ("planner.py", "if not cancelled:", "if True:"),
    "the partition is not raised again": (
        "planner.py",
        "        return replicas\n    going",
        "        return min(replicas, row.statefulset.partition)\n    going",
    ),
    "the partition is lowered at once": (
        "planner.py",
        "if slot.ordinal not in going]",
        "if slot.ordinal not in intent.wave.ordinals(role)]",
    ),
    "the numbers are always written": (
        "planner.py",
        "if (replicas, partition) != (statefulset.replicas, statefulset.partition):",
        "if True:",
    ),
    "labels are set again": ("planner.py", "if pod.draining_since is None or", "if True or"),
    "a drain starts in the past": ("planner.py", "since = int(view.now)", "since = int(view.now) - 3600"),
    "broken and drained pods are left to the controller": ("planner.py", "if not pods:", "if True:"),
    "scaling down does not drain": (
        "planner.py",
        "(pod.uid in intent.departure.uids() and intent.view.drained(pod))",
        "pod.uid in intent.departure.uids()",
    ),
    "nothing is planned for the time when a drain ends": (
        "planner.py",
        "return min((moment for moment in moments if moment > view.now), default=None)",
        "return None",
    ),
    "scaling down takes the last pair": ("counts.py", "if not view.serves() or view.serves(gone):", "if True:"),
    "a surge pod is never made": ("counts.py", "(view.settings.max_surge if role in roles else 0)", "0"),
}


@pytest.mark.parametrize(("file", "old", "new"), MUTANTS.values(), ids=MUTANTS.keys())
def test_a_mutant_of_the_planner_breaks_an_invariant(
    file: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = _mutant(tmp_path, file, old, new)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    plan: Plan = importlib.import_module(f"{mutant}.planner").plan
    scripts = random.Random(20)
    for _ in range(SEQUENCES):
        try:
            play(plan, scripts.randbytes(3 + 2 * scripts.randint(1, EVENTS)))
        except Broken:
            return
    pytest.fail("no invariant notices")


def _mutant(folder: Path, file: str, old: str, new: str) -> str:
    """A copy of the planner with one change, as a package of its own; the data types stay the real ones."""
    source = Path(rollout.__file__).parent
    name = f"mutant_{len(list(folder.iterdir()))}_{abs(hash((file, old)))}"
    (folder / name).mkdir()
    for path in source.glob("*.py"):
        text = path.read_text()
        if path.name == file:
            assert text.count(old) == 1, f"{file} has changed: {old}"
            text = text.replace(old, new)
        text = text.replace("kvloop_operator.rollout", name).replace(f"{name}.facts", "kvloop_operator.rollout.facts")
        (folder / name / path.name).write_text(text)
    return name
