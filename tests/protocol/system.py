"""Handles of two decode engines and two routers side by side, told apart by number so that exploring is quick."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.protocol.model import ROUTERS, Handle, HandleModel, Invariant, renumbered, urgent

DECODES = (0, 1)
"""Each has one block, so that a turn gets the very block that an earlier handle was about."""

_NO_HANDLE = -1
_NO_HANDLES = (_NO_HANDLE,) * 4

System = tuple[int, ...]
"""The number of each handle, or -1 where there is none."""


class Step(NamedTuple):
    """What happens (to the handle in ``slot``, or to all), where it leads, and what it breaks."""

    label: str
    slot: int | None
    after: System
    broken: Invariant | None


class _Move(NamedTuple):
    label: str
    after: int
    broken: Invariant | None
    router: int | None


class _Entry(NamedTuple):
    """What there is to know about a handle, worked out once."""

    handle: Handle
    moves: tuple[_Move, ...]
    busy: frozenset[int]
    urgent: bool
    tick: _Move
    restart: int
    fair: int | None
    alike: tuple[int, int, int, int]


class SystemModel:
    """Up to ``slots`` handles at once, from two decode engines, used by two routers and one prefill engine."""

    def __init__(self, handles: HandleModel, *, slots: int) -> None:
        self._handles = handles
        self._numbers: dict[Handle, int] = {}
        self._by_number: list[Handle] = []
        self._entries: dict[int, _Entry] = {}
        self.initial: System = (_NO_HANDLE,) * slots

    def handles(self, system: System) -> list[Handle | None]:
        """What the numbers stand for."""
        return [None if number == _NO_HANDLE else self._by_number[number] for number in system]

    def canonical(self, system: System) -> System:
        """The same for systems that differ only in the names of handles, decode engines or routers."""
        alike = [_NO_HANDLES if number == _NO_HANDLE else self._entry(number).alike for number in system]
        return tuple(min(map(sorted, zip(*alike, strict=True))))

    def steps(self, system: System) -> Iterator[Step]:
        """Everything that can happen next."""
        entries = [(slot, self._entry(number)) for slot, number in enumerate(system) if number != _NO_HANDLE]
        busy = frozenset[int]().union(*(entry.busy for _, entry in entries))
        # Routers are alike: what one that is free can do, the other can.
        free = next((router for router in ROUTERS if router not in busy), None)
        for slot, entry in entries:
            for move in entry.moves:
                if move.router is None or move.router == free:
                    yield Step(move.label, slot, _with(system, slot, move.after), move.broken)
        for decode in DECODES:
            there = [entry for _, entry in entries if entry.handle.decode == decode]
            if any(entry.handle.same_process for entry in there):
                after = [self._restarted(number, decode) for number in system]
                yield Step(f"decode {decode} restarts", None, tuple(after), None)
            if _NO_HANDLE in system and not any(entry.handle.held for entry in there):
                slot = system.index(_NO_HANDLE)
                issued = self._number(self._handles.issued(decode))
                yield Step(f"decode {decode} ends a turn and issues it", slot, _with(system, slot, issued), None)
        if not any(entry.urgent for _, entry in entries):
            yield self._tick(system)

    def fair_step(self, system: System) -> System:
        """What happens next where everything arrives and nothing new begins."""
        for slot, number in enumerate(system):
            if number != _NO_HANDLE and (fair := self._entry(number).fair) is not None:
                return _with(system, slot, fair)
        return self._tick(system).after

    def holds_blocks(self, system: System) -> bool:
        """Whether a decode engine retains anything."""
        return any(handle and handle.held for handle in self.handles(system))

    def _tick(self, system: System) -> Step:
        ticks = [None if number == _NO_HANDLE else self._entry(number).tick for number in system]
        broken = next((tick.broken for tick in ticks if tick and tick.broken), None)
        return Step("a tick passes", None, tuple(tick.after if tick else _NO_HANDLE for tick in ticks), broken)

    def _restarted(self, number: int, decode: int) -> int:
        if number == _NO_HANDLE or self._by_number[number].decode != decode:
            return number
        return self._entry(number).restart

    def _entry(self, number: int) -> _Entry:
        entry = self._entries.get(number)
        if entry is None:
            entry = self._entries[number] = self._worked_out(number)
        return entry

    def _worked_out(self, number: int) -> _Entry:
        handle = self._by_number[number]
        moves = (_Move(m.label, self._number(m.after), m.broken, m.router) for m in self._handles.moves(handle))
        tick = self._handles.tick(handle)
        fair = self._handles.fair_move(handle)
        return _Entry(
            handle=handle,
            moves=tuple(move for move in moves if move.after != number or move.broken),
            busy=frozenset(leg.router for leg in handle.legs),
            urgent=urgent(handle),
            tick=_Move(tick.label, self._number(tick.after), tick.broken, None),
            restart=self._number(self._handles.restart(handle)),
            fair=self._number(fair.after) if fair else None,
            alike=(
                number,
                self._number(_decodes_swapped(handle)),
                self._number(_routers_swapped(handle)),
                self._number(_decodes_swapped(_routers_swapped(handle))),
            ),
        )

    def _number(self, handle: Handle | None) -> int:
        if handle is None:
            return _NO_HANDLE
        handle = renumbered(handle)
        number = self._numbers.get(handle)
        if number is None:
            number = self._numbers[handle] = len(self._by_number)
            self._by_number.append(handle)
        return number


def _decodes_swapped(handle: Handle) -> Handle:
    return handle._replace(decode=1 - handle.decode)


def _routers_swapped(handle: Handle) -> Handle:
    return handle._replace(legs=tuple(sorted(leg._replace(router=1 - leg.router) for leg in handle.legs)))


def _with(system: System, slot: int, number: int) -> System:
    return (*system[:slot], number, *system[slot + 1 :])
