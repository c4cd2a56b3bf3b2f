"""What a new prompt is compared by: the digests of its blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvloop_connector.digest import DigestKey, block_digests
from kvloop_router.kept import Kept
from kvloop_router.scope import Scope


class Proof:
    """A new prompt, digested once for all handles that it is compared with, and for the one that its turn leaves."""

    def __init__(self, scope: Scope, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._scope = scope
        self._digests: dict[tuple[str, int], bytes] = {}

    def key(self, kv_revision: str) -> DigestKey:
        """The key that digests are made with."""
        return self._scope.token_key(kv_revision)

    def digests(self, kept: Kept) -> bytes | None:
        """The prompt's digests, to be compared with its; None where it is used whole or not at all."""
        if len(kept.blocks) != 1:
            return None
        how = kept.kv_revision, kept.block_size
        if how not in self._digests:
            self._digests[how] = block_digests(self.key(kept.kv_revision), self.token_ids, kept.block_size)
        return self._digests[how]

    def known(self, kv_revision: str, block_size: int) -> bytes:
        """The prompt's digests as far as they were made."""
        return self._digests.get((kv_revision, block_size), b"")
