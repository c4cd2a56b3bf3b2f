"""A prompt is proven against kept handles as if each of its blocks were digested each time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.digest import Retained, block_digests, retain, reusable_tokens
from kvloop_connector.handle import to_ranges
from kvloop_router import proof
from kvloop_router.kept import Kept
from kvloop_router.proof import Proof
from kvloop_router.scope import Scope, scope
from tests.unit.router.kept_handles import kept

SIZE = 2
REVISION = "a"
SCOPE: Scope = scope(b"k" * 32, b"tenant", "tiny", None, set_salt=False)

histories = st.lists(st.integers(0, 2), max_size=16)


def handle_of(tokens: Sequence[int], covered: int, *, groups: int = 1) -> Kept:
    """A handle whose engine says that it retains the first ``covered`` of these tokens."""
    blocks = to_ranges(range(-(-covered // SIZE)))
    return kept(
        "held",
        params={"remote_engine_id": "e", "remote_request_id": "r", "remote_num_tokens": covered},
        blocks=(blocks,) * groups,
        retained=retain(SCOPE.token_key(REVISION), tokens, covered, SIZE),
        block_size=SIZE,
        kv_revision=REVISION,
    )


@st.composite
def turns(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], int, int]]]:
    """A prompt, and histories that it goes on from, edits or has nothing to do with: how much of each is retained, and
    in how many groups."""
    prompt = draw(histories)
    held = []
    for _ in range(draw(st.integers(1, 3))):
        tokens = prompt[: draw(st.integers(0, 16))] + draw(histories)
        held.append((tokens, draw(st.integers(0, len(tokens) + 2)), draw(st.integers(1, 2))))
    return prompt, held


@given(turn=turns())
def test_it_proves_what_a_look_at_each_block_proves_and_knows_only_the_prompts_own_digests(
    turn: tuple[list[int], list[tuple[list[int], int, int]]],
) -> None:
    prompt, held = turn
    proven, key = Proof(SCOPE, prompt), SCOPE.token_key(REVISION)
    whole = block_digests(key, prompt, SIZE)
    for tokens, covered, groups in held:
        handle = handle_of(tokens, covered, groups=groups)
        alone = reusable_tokens(
            Retained(handle.retained.digests, handle.retained.tokens, b"" if groups == 1 else handle.retained.exact),
            prompt,
            key=key,
            block_size=SIZE,
            remote_num_tokens=covered,
            blocks_per_group=handle.group_sizes,
        )

        assert proven.reusable(handle) == alone
        assert whole.startswith(proven.known(REVISION, SIZE))
    while proven.digest_more(REVISION, SIZE):
        pass
    assert proven.known(REVISION, SIZE) == whole


def test_a_conversation_that_goes_on_needs_no_look_at_the_blocks_it_began_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history = [*range(21)]
    proven, handle = Proof(SCOPE, [*history, 7, 7, 7, 7]), handle_of(history, 21)
    monkeypatch.setattr(proof, "block_digests", lambda *_, **__: pytest.fail("digested"))

    assert proven.reusable(handle) == 20
    assert proven.known(REVISION, SIZE) == handle.retained.digests


def test_a_long_prompt_is_digested_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_BLOCKS_AT_ONCE", 3)
    proven, whole = Proof(SCOPE, [*range(17)]), block_digests(SCOPE.token_key(REVISION), [*range(17)], SIZE)
    more = [proven.digest_more(REVISION, SIZE) for _ in range(3)]

    assert more == [True, True, False]
    assert proven.known(REVISION, SIZE) == whole


@pytest.mark.parametrize(("tokens", "long"), [(16 * 1024 - 1, False), (16 * 1024, True)])
def test_only_a_long_prompt_is_worth_digesting_in_parts(tokens: int, long: bool) -> None:
    assert Proof(SCOPE, [0] * tokens).long is long
