"""What is remembered of handles that are not there."""

from __future__ import annotations

import tracemalloc
from itertools import count

from hypothesis import given, strategies as st

from kvloop_router.absences import Absences
from kvloop_router.kept import Absence
from kvloop_router.store import MemoryStore
from tests.unit.router.kept_handles import Clock, kept

KEYS = tuple(f"key {number}".encode() for number in range(8))


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(Absence))))
def test_each_key_has_what_was_noted_last(most: int, steps: list[tuple[bytes, Absence]]) -> None:
    absences, noted = Absences(most), dict[bytes, Absence]()
    for key, why in steps:
        absences.note(key, why)
        noted[key] = why

        assert [absences.get(known) for known in KEYS] == [noted.get(known) for known in KEYS]


def test_of_too_many_the_oldest_is_forgotten() -> None:
    absences, *more = Absences(len(KEYS)), b"one", b"more"
    for key in (*KEYS, KEYS[0], *more):
        absences.note(key, Absence.TAKEN)

    assert [key for key in KEYS if absences.get(key) is None] == [KEYS[1], KEYS[2]]
    assert all(absences.get(key) is Absence.TAKEN for key in more)


async def test_a_store_takes_no_more_the_more_turns_there_were() -> None:
    clock = Clock()
    store = MemoryStore(max_handles=10_000, max_bytes=40_000_000, clock=clock)
    numbers = count()

    async def play(turns: int) -> int:
        """Handles that are kept, taken and read; gives the bytes that are held then."""
        for _ in range(turns):
            clock.now += 1
            name = str(next(numbers))
            await store.put(kept(name, name, conversation=name, deadline=clock.now + 20))
            grant = await store.take(f"engine/{name}")
            assert grant is not None
            await store.spend(f"engine/{name}", grant)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before, after = await play(200), await play(1000)
    finally:
        tracemalloc.stop()

    assert after - before < 20 * 1000
