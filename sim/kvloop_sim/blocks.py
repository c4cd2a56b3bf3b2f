"""Paged KV blocks with contents, and the prefix cache over them.

As vLLM's block pool (``v1/core/block_pool.py``): block 0 is the null block, a freed block keeps its contents and its
name in the prefix cache until it is taken for something else, blocks are taken from the least recently freed on, and
a request's blocks are freed from its tail.

The name of a block is a hash over the tokens that its *request* has there, chained to the block before. The contents
are whatever was computed or loaded into it. Nothing compares the two: that is the hazard.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

NULL_BLOCK = 0


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was taken."""


class BlockPool:
    """All blocks of an engine. Not safe for threads; holds no clock.

    ``capacity`` is the number of blocks that can be used: the configured number less the null block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError("a pool needs at least two blocks of at least one token")
        self.block_size = block_size
        self.capacity = num_blocks - 1
        self._contents: dict[int, array[int]] = {}
        self._references: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._names: dict[int, bytes] = {}
        self._cached: dict[bytes, dict[int, None]] = {}

    @property
    def free(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return len(self._free)

    @property
    def cached_free(self) -> int:
        """Free blocks that can still be hit."""
        return sum(1 for block in self._free if block in self._names)

    @property
    def held(self) -> int:
        """Blocks that requests hold, retained ones included."""
        return len(self._references)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return self.held / self.capacity

    def is_free(self, block: int) -> bool:
        """Whether no request holds ``block``."""
        return block in self._free

    def take(self, count: int) -> list[int]:
        """``count`` blocks for one holder, least recently freed first; evicts their names. Raises OutOfBlocks."""
        if count > len(self._free):
            raise OutOfBlocks
        taken: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to cached blocks, which may be free."""
        for block in blocks:
            if block in self._free:
                del self._free[block]
                self._references[block] = 1
            else:
                self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one holder from each block; the last one frees it, tail first, so that the tail is evicted first."""
        for block in reversed(blocks):
            count = self._references[block]
            if count > 1:
                self._references[block] = count - 1
            else:
                del self._references[block]
                self._free[block] = None

    def write(self, block: int, offset: int, value: int) -> None:
        """Put one token's KV into ``block``."""
        contents = self._contents.get(block)
        if contents is None:
            contents = self._contents[block] = array("Q", bytes(8 * self.block_size))
        contents[offset] = value

    def load(self, block: int, values: Sequence[int]) -> None:
        """Overwrite ``block`` whole."""
        if len(values) != self.block_size:
            raise ValueError(f"a block holds {self.block_size} values, not {len(values)}")
        self._contents[block] = array("Q", values)

    def read(self, block: int) -> array[int]:
        """The contents of ``block``, whoever holds it; zeros where nothing was ever written."""
        contents = self._contents.get(block)
        return array("Q", bytes(8 * self.block_size)) if contents is None else contents

    def exists(self, block: int) -> bool:
        """Whether ``block`` is inside the pool."""
        return 0 <= block <= self.capacity

    def publish(self, block: int, name: bytes) -> None:
        """Enter ``block`` into the prefix cache; a block keeps its first name until it is evicted."""
        if block in self._names:
            return
        self._names[block] = name
        self._cached.setdefault(name, {})[block] = None

    def lookup(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest leading run of ``names`` that is cached."""
        hits: list[int] = []
        for name in names:
            blocks = self._cached.get(name)
            if not blocks:
                break
            hits.append(next(iter(blocks)))
        return hits

    def _forget(self, block: int) -> None:
        name = self._names.pop(block, None)
        if name is not None:
            blocks = self._cached[name]
            del blocks[block]
            if not blocks:
                del self._cached[name]


class BlockNames:
    """The names of the whole blocks of one growing sequence.

    salt: a request's ``cache_salt``; sequences with different salts share nothing. adapter: nor with different ones.
    """

    def __init__(self, block_size: int, salt: str, adapter: str = "") -> None:
        self._block_size = block_size
        seed = f"{salt}\0{adapter}".encode("utf-8", "replace")
        self._previous = blake2b(seed, digest_size=16, person=b"kvloop-sim").digest()
        self.names: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Name the blocks that are whole in ``tokens``, the sequence so far."""
        size = self._block_size
        while (len(self.names) + 1) * size <= len(tokens):
            start = len(self.names) * size
            block = array("Q", tokens[start : start + size]).tobytes()
            self._previous = blake2b(self._previous + block, digest_size=16).digest()
            self.names.append(self._previous)
