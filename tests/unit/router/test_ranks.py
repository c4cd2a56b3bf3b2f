"""Which data-parallel rank gets a decode leg."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, strategies as st

from kvloop_router import exposition, ranks


def test_an_engine_id_names_its_rank() -> None:
    assert (ranks.of("abc_dp3"), ranks.without("abc_dp3")) == (3, "abc")
    assert (ranks.of("abc"), ranks.without("abc")) == (None, "abc")


def test_a_conversation_goes_back_to_its_rank_while_that_is_not_far_ahead() -> None:
    assert ranks.choose([0, 8], Random(1), 1) == 1
    assert ranks.choose([0, 9], Random(1), 1) == 0
    assert ranks.choose([20, 48], Random(1), 1) == 1
    assert ranks.choose([20, 49], Random(1), 1) == 0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.none() | st.integers(0, 9), st.integers())
def test_the_choice_is_a_rank_that_there_is(loads: list[int], home: int | None, seed: int) -> None:
    chosen = ranks.choose(loads, Random(seed), home)

    assert 0 <= chosen < len(loads)
    assert chosen == home or loads[chosen] == min(loads)


def test_ranks_that_are_equal_take_turns() -> None:
    random = Random(1)

    chosen = Counter(ranks.choose([0, 0, 0, 5], random, None) for _ in range(300))

    assert set(chosen) == {0, 1, 2}
    assert min(chosen.values()) > 60


def test_an_engine_tells_its_ranks_by_its_metrics() -> None:
    line = 'vllm:cache_config_info{{block_size="16",engine="{}",num_gpu_blocks="99"}} 1.0\n'

    assert exposition.ranks("".join(map(line.format, range(4))) * 2) == 4
    assert exposition.ranks("nothing of the kind") == 1
