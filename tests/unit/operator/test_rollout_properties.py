"""Random sequences of edits, reverts, deaths, delays, operator restarts and lost reports, and then a fair world."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings, strategies as st

from kvloop_connector.settings import Role
from kvloop_operator import rollout
from kvloop_operator.rollout import Fault
from tests.unit.operator.rollout_invariants import Monitor
from tests.unit.operator.rollout_world import ROLES, Plan, World, at_rest

SEQUENCES = 10_000
EVENTS = 8
TICKS_TO_SETTLE = 600
FAULTS = (None, None, Fault.CRASH, Fault.IMAGE)


def play(plan: Plan, script: bytes) -> World:
    """Read a script: three bytes of setting, then two for each event; end in a fair world. Raises Broken."""
    size, more, kind, *events = script
    prefill, decode = 1 + size % 4, 1 + size // 4 % 4
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
        load_ticks=1 + (kind >> 1) % 3,
        turn_seconds=(10.0, 10.0, 30.0, 90.0)[(kind >> 3) % 4],
    )
    if kind & 32:
        world.broken_kv["kv1"] = FAULTS[2 + (kind >> 6) % 2] or Fault.CRASH
    monitor = Monitor(world)
    for event, argument in zip(events[::2], events[1::2], strict=False):
        happen(monitor, event, argument)
        for _ in range(argument >> 6 if event & 128 else 1 + (argument >> 6) * 4):
            world.tick()
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
            world.surge, monitor.surge_was_edited = number % 3, True
        case 7:
            world.suspend = bool(argument & 2)
        case 8:
            world.paused = bool(argument & 2)
        case 9:
            world.fail(role, number, ticks=1 + (argument >> 3 & 7) * 2, fault=FAULTS[argument >> 4 & 3])
        case 10:
            pod = world.pods[role].get(number)
            if pod is not None:
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
    world.paused, world.routers_up, world.crash_after, world.changed = False, True, None, True
    world.operator_delay = world.controller_delay = 0
    if world.kv_revision in world.broken_kv:
        monitor.settle_blocked(TICKS_TO_SETTLE)
        world.kv, world.changed = 2, True
        monitor.template_was_edited()
    monitor.settle(TICKS_TO_SETTLE)


@settings(max_examples=SEQUENCES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=5, max_size=3 + 2 * EVENTS))
def test_the_invariants_hold_in_random_sequences_of_events(script: bytes) -> None:
    play(rollout.plan, script)
