from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from kvloop_connector.digest import (
    DIGEST_BYTES,
    DigestKey,
    block_digests,
    common_blocks,
    exact_digest,
    retain,
    reusable_tokens,
)

KEY = DigestKey(secret=bytes(16), context=b"tenant/model/revision")

# Few token ids and short blocks, so that sequences often share a prefix and often part in the middle of a block.
block_sizes = st.integers(1, 4)
histories = st.lists(st.integers(0, 2), max_size=16)


def common_prefix(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@st.composite
def related(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A history, and one that continues, edits, cuts or has nothing to do with it."""
    left = draw(histories)
    return left, left[: draw(st.integers(0, 16))] + draw(histories)


@given(sequences=related(), block_size=block_sizes)
def test_common_blocks_are_those_of_the_common_prefix(sequences: tuple[list[int], list[int]], block_size: int) -> None:
    left, right = sequences

    common = common_blocks(block_digests(KEY, left, block_size), block_digests(KEY, right, block_size))

    assert common == common_prefix(left, right) // block_size


@given(tokens=histories, block_size=block_sizes)
def test_only_whole_blocks_have_a_digest(tokens: list[int], block_size: int) -> None:
    assert len(block_digests(KEY, tokens, block_size)) == len(tokens) // block_size * DIGEST_BYTES


@given(tokens=histories, size=block_sizes, known=st.integers(0, 12))
def test_what_is_known_of_a_beginning_is_not_needed_again(tokens: list[int], size: int, known: int) -> None:
    of_a_beginning = block_digests(KEY, tokens[: known * size], size)
    longer = block_digests(KEY, [*tokens, 1, 2, 3, 4], size)

    assert block_digests(KEY, tokens, size, known=of_a_beginning) == block_digests(KEY, tokens, size)
    assert block_digests(KEY, tokens, size, known=longer) == block_digests(KEY, tokens, size)
    assert retain(KEY, tokens, known, size, known=longer) == retain(KEY, tokens, known, size)


def test_a_block_is_bound_to_all_before_it() -> None:
    assert common_blocks(block_digests(KEY, [1, 9], 1), block_digests(KEY, [2, 9], 1)) == 0
    assert block_digests(KEY, [1, 9], 1)[DIGEST_BYTES:] != block_digests(KEY, [2, 9], 1)[DIGEST_BYTES:]


def test_a_digest_stays_what_it_is() -> None:
    """Replicas and versions share a store: other bytes for the same tokens would make every stored handle useless."""
    assert block_digests(KEY, [1, 2, 3, 4, 2**32 - 1, 0], 2).hex() == "e478debd3dab8848cc0f330e997ba40a1e777076f995b6d4"
    assert exact_digest(KEY, [1, 2, 3]).hex() == "624079068712f412"


@pytest.mark.parametrize(
    "other",
    [
        DigestKey(secret=bytes(16), context=b"another tenant"),
        DigestKey(secret=bytes(16), context=b""),
        DigestKey(secret=bytes(15) + b"\x01", context=KEY.context),
        DigestKey(secret=bytes(17), context=KEY.context),
    ],
)
def test_another_secret_or_context_never_matches(other: DigestKey) -> None:
    tokens = [1, 2, 3, 4]

    assert common_blocks(block_digests(KEY, tokens, 2), block_digests(other, tokens, 2)) == 0
    assert exact_digest(KEY, tokens) != exact_digest(other, tokens)
    assert reuse(retained_under=KEY, key=other, tokens=tokens, prompt=tokens, covered=3, groups=(3,)) == 0
    assert reuse(retained_under=KEY, key=other, tokens=tokens, prompt=tokens, covered=3, groups=(3, 3)) == 0


@pytest.mark.parametrize("length", [0, 15, 65])
def test_a_secret_of_a_wrong_length_is_refused_without_being_shown(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} bytes; 16 to 64") as refusal:
        DigestKey(secret=b"s" * length, context=b"")

    assert "ssss" not in str(refusal.value)


def reuse(
    *,
    tokens: list[int],
    prompt: list[int],
    covered: int,
    groups: tuple[int, ...],
    block_size: int = 1,
    retained_under: DigestKey = KEY,
    key: DigestKey = KEY,
) -> int:
    return reusable_tokens(
        retain(retained_under, tokens, covered, block_size),
        prompt,
        key=key,
        block_size=block_size,
        remote_num_tokens=covered,
        blocks_per_group=groups,
    )


@settings(max_examples=500)
@given(sequences=related(), block_size=block_sizes, overshoot=st.integers(-4, 7), missing=st.integers(-1, 2))
def test_one_group_reuses_the_whole_blocks_that_are_equal_computed_and_there(
    sequences: tuple[list[int], list[int]], block_size: int, overshoot: int, missing: int
) -> None:
    tokens, prompt = sequences
    covered = max(0, len(tokens) - 1 + overshoot)
    blocks = max(0, -(-covered // block_size) - missing)

    reused = reuse(tokens=tokens, prompt=prompt, covered=covered, groups=(blocks,), block_size=block_size)

    bound = min(common_prefix(tokens, prompt), max(0, len(tokens) - 1), covered, len(prompt), blocks * block_size)
    assert reused == bound // block_size * block_size


@pytest.mark.parametrize("overshoot", [0, 1, 4, 7])
def test_tokens_of_rejected_drafts_are_never_reused(overshoot: int) -> None:
    """A scheduler that runs ahead counts tokens that it computed and then rejected; their KV is of other text."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    covered = len(tokens) - 1 + overshoot

    reused = reuse(tokens=tokens, prompt=[*tokens, 0, 0, 0, 0, 0, 0, 0, 0], covered=covered, groups=(covered,))

    assert reused == len(tokens) - 1


@settings(max_examples=500)
@given(sequences=related(), overshoot=st.integers(-4, 7), groups=st.lists(st.integers(0, 5), min_size=2, max_size=3))
def test_several_groups_reuse_all_or_nothing(
    sequences: tuple[list[int], list[int]], overshoot: int, groups: list[int]
) -> None:
    tokens, prompt = sequences
    covered = max(0, len(tokens) + overshoot)

    reused = reuse(tokens=tokens, prompt=prompt, covered=covered, groups=tuple(groups), block_size=2)

    whole = covered <= len(tokens) and common_prefix(tokens, prompt) >= covered
    assert reused == (covered if whole else 0)


@given(tokens=histories, covered=st.integers(0, 20), block_size=block_sizes)
def test_a_record_holds_digests_and_counts_only(tokens: list[int], covered: int, block_size: int) -> None:
    retained = retain(KEY, tokens, covered, block_size)

    assert retained.tokens == len(tokens)
    assert len(retained.digests) == max(0, min(covered, len(tokens) - 1)) // block_size * DIGEST_BYTES
    assert len(retained.exact) == (DIGEST_BYTES if covered <= len(tokens) else 0)
