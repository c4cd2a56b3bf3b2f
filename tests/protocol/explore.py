"""Breadth-first exploration of a system, and the shortest way to what breaks an invariant."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass

from tests.protocol.model import Handle, Invariant
from tests.protocol.system import Step, System, SystemModel


@dataclass(frozen=True, slots=True)
class Counterexample:
    """The shortest way from the initial state to a broken invariant."""

    invariant: Invariant
    steps: tuple[tuple[str, tuple[Handle | None, ...]], ...]

    def __str__(self) -> str:
        lines = [f"broken: {self.invariant}"]
        for number, (label, handles) in enumerate(self.steps, start=1):
            lines.append(f"{number:3}. {label}")
            lines += [f"       {_name(slot)}: {_shown(handle)}" for slot, handle in enumerate(handles) if handle]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was explored: all that can be reached, unless there is a counterexample."""

    states: int
    steps: int
    counterexample: Counterexample | None


def explore(model: SystemModel, enforced: Set[Invariant] = frozenset(Invariant)) -> Exploration:
    """Visit every state that ``model`` can reach; stop at the first step that breaks an ``enforced`` invariant."""
    visited = {model.canonical(model.initial)}
    came_from: dict[System, tuple[System, Step] | None] = {model.initial: None}
    waiting = deque([model.initial])
    steps = 0
    while waiting:
        system = waiting.popleft()
        for step in model.steps(system):
            steps += 1
            if step.broken and step.broken in enforced:
                found = _counterexample(model, step.broken, [*_way(came_from, system), step])
                return Exploration(len(visited), steps, found)
            canonical = model.canonical(step.after)
            if canonical not in visited:
                visited.add(canonical)
                came_from[step.after] = (system, step)
                waiting.append(step.after)
    if Invariant.FREED_IN_A_FAIR_WORLD in enforced and (stuck := _stuck(model, came_from)):
        found = _counterexample(model, Invariant.FREED_IN_A_FAIR_WORLD, _way(came_from, stuck))
        return Exploration(len(visited), steps, found)
    return Exploration(len(visited), steps, None)


def _stuck(model: SystemModel, reached: Iterable[System]) -> System | None:
    """A state from which retained blocks are not freed although everything goes on."""
    ends_free: set[System] = set()
    for start in reached:
        way: dict[System, None] = {}
        system = start
        while system not in ends_free and model.holds_blocks(system):
            if system in way:
                return start
            way[system] = None
            system = model.fair_step(system)
        ends_free.update(way)
    return None


def _way(came_from: dict[System, tuple[System, Step] | None], system: System) -> list[Step]:
    way = []
    while before := came_from[system]:
        system, step = before
        way.append(step)
    return way[::-1]


def _counterexample(model: SystemModel, invariant: Invariant, way: list[Step]) -> Counterexample:
    steps = [
        (step.label if step.slot is None else f"{_name(step.slot)}: {step.label}", tuple(model.handles(step.after)))
        for step in way
    ]
    return Counterexample(invariant, tuple(steps))


def _name(slot: int) -> str:
    return f"handle {'abc'[slot]}"


def _shown(handle: Handle) -> str:
    lease = handle.stored
    stored = f"{lease.state}, {lease.deadline:g} left" if lease else "nothing"
    blocks = f"held, {handle.expires} left" if handle.held else "freed"
    legs = ", ".join(f"router {leg.router} {'release' if leg.release else leg.phase}" for leg in handle.legs)
    return f"decode {handle.decode} blocks {blocks}; read {handle.reads}x; store {stored}; legs: {legs or 'none'}"
