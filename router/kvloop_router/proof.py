"""What a new prompt is compared by: the digests of its blocks. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property

from kvloop_connector.digest import DIGEST_BYTES, DigestKey, block_digests, reusable_tokens
from kvloop_router import token_ids as ids
from kvloop_router.kept import Kept
from kvloop_router.scope import Scope

_LONG_TOKENS = 16 * 1024
_BLOCKS_AT_ONCE = 1024


class Proof:
    """A new prompt, digested once for all handles that it is compared with, and for the one that its turn leaves."""

    def __init__(self, scope: Scope, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._scope = scope
        self._digests: dict[tuple[str, int], bytes] = {}

    @cached_property
    def tokens(self) -> array[int]:
        """The prompt's ids."""
        return ids.numbers(self.token_ids)

    def key(self, kv_revision: str) -> DigestKey:
        """The key that digests are made with."""
        return self._scope.token_key(kv_revision)

    def reusable(self, kept: Kept) -> int:
        """How many leading tokens of the prompt may be read from what is kept; 0 where none are proven."""
        size, revision = kept.block_size, kept.kv_revision
        if not size:
            # Kept by a router whose engines prove it.
            return 0
        tokens = reusable_tokens(
            kept.retained,
            self.tokens,
            key=self.key(revision),
            block_size=size,
            remote_num_tokens=int(kept.params["remote_num_tokens"]),
            blocks_per_group=kept.group_sizes,
            prompt_digests=lambda: self._digested(revision, size, len(self.tokens) // size),
        )
        if len(kept.blocks) == 1:
            equal = kept.retained.digests[: tokens // size * DIGEST_BYTES]
            if len(equal) > len(self.known(revision, size)):
                self._digests[revision, size] = equal
        return tokens

    def known(self, kv_revision: str, block_size: int) -> bytes:
        """The prompt's digests as far as they were made: all, or those of its beginning."""
        return self._digests.get((kv_revision, block_size), b"")

    @property
    def long(self) -> bool:
        """Whether it is worth digesting in parts."""
        return len(self.token_ids) >= _LONG_TOKENS

    def digest_more(self, kv_revision: str, block_size: int) -> bool:
        """Make the prompt's digests of some more blocks; gives whether others are left."""
        blocks = len(self.tokens) // block_size
        done = len(self.known(kv_revision, block_size)) // DIGEST_BYTES + _BLOCKS_AT_ONCE
        self._digested(kv_revision, block_size, min(blocks, done))
        return done < blocks

    def _digested(self, kv_revision: str, block_size: int, blocks: int) -> bytes:
        known = self.known(kv_revision, block_size)
        if len(known) < blocks * DIGEST_BYTES:
            beginning = self.tokens[: blocks * block_size]
            known = block_digests(self.key(kv_revision), beginning, block_size, known=known)
            self._digests[kv_revision, block_size] = known
        return known
