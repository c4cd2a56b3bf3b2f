from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.retained_cap import RetainedCap

CAP = 6
blocks = st.frozensets(st.integers(0, 9), min_size=1, max_size=8)


@given(turns=st.lists(st.tuples(blocks, st.integers(0, 20)), max_size=30))
def test_a_turn_is_retained_if_it_fits_and_nobody_makes_way(turns: list[tuple[frozenset[int], int]]) -> None:
    cap, held = RetainedCap(CAP), dict[str, frozenset[int]]()
    for number, (wanted, ends) in enumerate(turns):
        fits = len(wanted.union(*held.values())) <= CAP

        assert cap.admit(f"turn-{number}", wanted) == fits

        if fits:
            held[f"turn-{number}"] = wanted
        assert cap.blocks == len(frozenset[int]().union(*held.values()))
        cap.ended(f"turn-{ends}")
        held.pop(f"turn-{ends}", None)
        assert cap.blocks == len(frozenset[int]().union(*held.values()))


def test_what_has_ended_makes_room() -> None:
    cap = RetainedCap(CAP)
    assert cap.admit("first", range(6))
    assert not cap.admit("second", [7])

    cap.ended("first")

    assert cap.admit("second", [7])


def test_an_end_that_is_told_twice_counts_once() -> None:
    cap = RetainedCap(CAP)
    cap.admit("first", [1, 2])
    cap.admit("second", [2, 3])

    cap.ended("first")
    cap.ended("first")

    assert cap.blocks == 2


def test_a_cap_of_nothing_retains_nothing() -> None:
    assert not RetainedCap(0).admit("turn", [1])


def test_a_turn_is_admitted_once() -> None:
    cap = RetainedCap(CAP)
    cap.admit("turn", [1])

    with pytest.raises(ValueError, match="already"):
        cap.admit("turn", [1])
