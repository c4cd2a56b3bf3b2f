"""Keyed digests of token blocks, and the proof of how much of a handle a new prompt may reuse.

A prefill engine never compares tokens: it loads ``min(remote_num_tokens, prompt tokens)`` under the new prompt's
name, and a history that differs gives wrong text with status 200 (vllm#43094). Whoever attaches a handle proves
first, token by token, what is equal. Digests instead of token ids are kept, keyed and bound to their context, so
that a store that leaks gives nobody text, and no tenant can match another's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 8
"""Bytes a block. The key is secret, so that a match by chance, 1 in 2**64 a block, is all there is to fear."""

_PERSON = b"kvloop/block"


@dataclass(frozen=True, slots=True)
class DigestKey:
    """What digests are bound to: a secret shared by the router's replicas, and a context.

    secret: 16 to 64 bytes.
    context: everything beside tokens that must be equal for KV to be equal (tenant, model, adapter, KV revision).
    """

    secret: bytes
    context: bytes

    def __post_init__(self) -> None:
        if not 16 <= len(self.secret) <= 64:
            raise ValueError(f"the digest key has {len(self.secret)} bytes; 16 to 64 are needed")


def block_digests(key: DigestKey, token_ids: Sequence[int], block_size: int, *, known: bytes = b"") -> bytes:
    """One digest of DIGEST_BYTES for each whole block of ``token_ids``, each chained to the one before it.

    known: what this gives for a beginning of ``token_ids``, or for more than them; that is not digested again.
    """
    blocks = len(token_ids) // block_size
    digests = bytearray(known[: blocks * DIGEST_BYTES])
    keyed = blake2b(key=key.secret, digest_size=DIGEST_BYTES, person=_PERSON)
    previous = bytes(digests[-DIGEST_BYTES:]) or _seed(key)
    packed = array("I", token_ids[len(digests) // DIGEST_BYTES * block_size : blocks * block_size]).tobytes()
    width = block_size * array("I").itemsize
    for start in range(0, len(packed), width):
        # Far cheaper than to key each one.
        chained = keyed.copy()
        chained.update(previous + packed[start : start + width])
        previous = chained.digest()
        digests += previous
    return bytes(digests)


def exact_digest(key: DigestKey, token_ids: Sequence[int]) -> bytes:
    """One digest over exactly these tokens: whether all of them are equal, without a look at each block."""
    digest = blake2b(_seed(key), key=key.secret, digest_size=DIGEST_BYTES, person=_PERSON)
    digest.update(array("I", token_ids))
    return digest.digest()


def common_blocks(left: bytes, right: bytes) -> int:
    """How many leading blocks two digest chains share."""
    low, high = 0, min(len(left), len(right)) // DIGEST_BYTES
    # Chained: if block i is equal, so is every block before it.
    while low < high:
        middle = (low + high + 1) // 2
        last = slice((middle - 1) * DIGEST_BYTES, middle * DIGEST_BYTES)
        if left[last] == right[last]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class Retained:
    """What a decode engine retains after a turn, as far as it can be proven.

    digests: of the whole blocks of the tokens that exist (prompt and answer), the last token left out.
    tokens: number of tokens that exist, T.
    exact: digest of the first ``remote_num_tokens`` tokens; empty where the handle covers more than exist.
    """

    digests: bytes
    tokens: int
    exact: bytes


def retain(
    key: DigestKey, token_ids: Sequence[int], remote_num_tokens: int, block_size: int, *, known: bytes = b""
) -> Retained:
    """The record of a turn whose prompt and answer were ``token_ids``. ``known``: as of `block_digests`.

    The last token is left out: its KV is computed only on some schedulers. Tokens past those that exist hold the KV
    of rejected drafts and are never recorded.
    """
    computed = token_ids[: max(0, min(remote_num_tokens, len(token_ids) - 1))]
    exact = exact_digest(key, token_ids[:remote_num_tokens]) if remote_num_tokens <= len(token_ids) else b""
    digests = block_digests(key, computed, block_size, known=known)
    return Retained(digests=digests, tokens=len(token_ids), exact=exact)


def reusable_tokens(
    retained: Retained,
    prompt: Sequence[int],
    *,
    key: DigestKey,
    block_size: int,
    remote_num_tokens: int,
    blocks_per_group: Sequence[int],
    prompt_digests: Callable[[], bytes] | None = None,
) -> int:
    """How many leading tokens of ``prompt`` may be read from the retained blocks; 0 where none are proven.

    One KV group: the common prefix in whole blocks, clamped to the blocks that exist. Several groups: all
    ``remote_num_tokens`` or nothing, since their blocks cover a window or a final state only.

    prompt_digests: gives `block_digests` of the prompt; asked only where not all of it is equal.
    """
    covered = 0 < remote_num_tokens <= len(prompt) and retained.exact != b""
    whole = covered and exact_digest(key, prompt[:remote_num_tokens]) == retained.exact
    if len(blocks_per_group) != 1:
        return remote_num_tokens if whole else 0
    if whole:
        # A conversation that goes on. Its digests are of these tokens, so that they are equal, too.
        common = len(retained.digests) // DIGEST_BYTES
    else:
        own = block_digests(key, prompt, block_size) if prompt_digests is None else prompt_digests()
        common = common_blocks(retained.digests, own)
    return min(common, remote_num_tokens // block_size, blocks_per_group[0]) * block_size


def _seed(key: DigestKey) -> bytes:
    return blake2b(key.context, key=key.secret, digest_size=DIGEST_BYTES, person=_PERSON).digest()
