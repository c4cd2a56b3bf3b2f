"""A KV handle: the ``kv_transfer_params`` that an engine returns, read by field and forwarded untouched.

The object grows with nearly every vLLM release, so that unknown fields pass through as they came
(``vllm/.../nixl/pull_scheduler.py:278``, 0.32.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

from kvloop_connector.errors import InvalidHandle, InvalidProof
from kvloop_connector.proof import FIELD, with_term

COLD_PREFILL_PARAMS: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a prefill leg carries when nothing is to be pulled."""

RETAIN_PARAMS: Mapping[str, Any] = {"kvloop_retain": True}
"""What a request to a decode engine carries that has no prefill leg and shall retain its blocks all the same. Only an
engine with KvloopConnector understands it; a stock one would retain the blocks for ever."""


@dataclass(frozen=True, slots=True)
class KVHandle:
    """A typed view of the ``kv_transfer_params`` with which an engine says where its blocks are. Single use.

    ``params`` is the engine's object as it came; every change makes a new handle.
    """

    params: Mapping[str, Any]

    @classmethod
    def parse(cls, params: object) -> Self:
        """The handle in ``params``; raises InvalidHandle where a field that a pull needs is missing or malformed."""
        if not isinstance(params, Mapping):
            raise InvalidHandle("", "not an object")
        for name in ("remote_engine_id", "remote_request_id", "remote_host"):
            if not isinstance(params.get(name), str) or not params[name]:
                raise InvalidHandle(name, "missing or not a string")
        for name in ("remote_port", "remote_num_tokens"):
            value = params.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidHandle(name, "missing or not a whole number")
        groups = params.get("remote_block_ids")
        if not isinstance(groups, list | tuple) or not groups:
            raise InvalidHandle("remote_block_ids", "missing or empty")
        for group in groups:
            if not isinstance(group, list | tuple) or not _are_block_ids(group):
                raise InvalidHandle("remote_block_ids", "not lists of block ids")
        return cls(params)

    @property
    def engine_id(self) -> str:
        """The identity of the issuing engine process; new after each restart."""
        return str(self.params["remote_engine_id"])

    @property
    def request_id(self) -> str:
        """The issuing engine's internal request id, under which it retains the blocks."""
        return str(self.params["remote_request_id"])

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the issuer says is computed. Can exceed those that exist (speculative decoding)."""
        return int(self.params["remote_num_tokens"])

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        """Logical block ids, one sequence a KV group."""
        return tuple([tuple(group) for group in self.params["remote_block_ids"]])

    @property
    def group_sizes(self) -> list[int]:
        """How many blocks each KV group has."""
        return [len(group) for group in self.params["remote_block_ids"]]

    @property
    def kv_groups(self) -> int:
        """Number of KV groups; more than one for hybrid models, whose handles cannot be trimmed."""
        return len(self.params["remote_block_ids"])

    def trimmed(self, tokens: int, block_size: int) -> KVHandle:
        """This handle cut to its first ``tokens`` tokens, a multiple of ``block_size``.

        Token count and block list change together: too few blocks for the count end the prefill engine
        (``nixl/base_worker.py:3453``). Raises InvalidHandle where the cut is not possible.
        """
        if self.kv_groups != 1:
            raise InvalidHandle("remote_block_ids", f"{self.kv_groups} KV groups cannot be trimmed")
        if tokens < 0 or tokens % block_size:
            raise InvalidHandle("remote_num_tokens", f"{tokens} is not a multiple of the block size {block_size}")
        blocks = self.block_ids[0][: tokens // block_size]
        if len(blocks) * block_size < tokens or tokens > self.num_tokens:
            raise InvalidHandle("remote_num_tokens", f"{tokens} tokens are not covered by the retained blocks")
        return KVHandle({**self.params, "remote_num_tokens": tokens, "remote_block_ids": [list(blocks)]})

    def released(self) -> KVHandle:
        """The handle that, on any prefill leg, pulls nothing and makes the issuer free its blocks at once."""
        return KVHandle({**self.params, "remote_num_tokens": 0})

    def renewed(self, answer: Mapping[str, Any]) -> KVHandle:
        """The handle with the deadline that its entry in the answer to a renewal (``lease_requests``) gives it.

        Raises InvalidHandle where they do not fit together: the handle then keeps its old deadline.
        """
        if "term" in answer:
            try:
                return KVHandle(with_term(self.params, answer["term"]))
            except InvalidProof as error:
                raise InvalidHandle(FIELD, "no proof whose deadline could move") from error
        before, seconds = self.params.get("remote_blocks_expiry_time"), answer.get("seconds")
        if FIELD in self.params:
            raise InvalidHandle(FIELD, "its deadline is sealed, and the engine gave no sealed one")
        if not isinstance(before, int | float) or not isinstance(seconds, int | float):
            raise InvalidHandle("remote_blocks_expiry_time", "missing, or not a number that could move")
        return KVHandle({**self.params, "remote_blocks_expiry_time": before + seconds})


def to_ranges(block_ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Block ids, in order, as runs of ``(first id, count)``; a count below zero is that of a run that goes down.

    Allocation is mostly contiguous, upwards at first: engines free a request's blocks from its end on, so that later
    ones get them in the opposite order.
    """
    runs: list[tuple[int, int]] = []
    # What comes next where the run goes on; of one block alone nothing is known yet, and its step is 0.
    first = following = -1
    step = 0
    for block in block_ids:
        if block == following:
            following += step
        elif step == 0 and first >= 0 and abs(block - first) == 1:
            step = block - first
            following = block + step
        else:
            if first >= 0:
                runs.append((first, following - first if step else 1))
            first, following, step = block, -1, 0
    if first >= 0:
        runs.append((first, following - first if step else 1))
    return tuple(runs)


def from_ranges(runs: Iterable[tuple[int, int]]) -> list[int]:
    """The block ids that ``to_ranges`` was given."""
    block_ids: list[int] = []
    for first, count in runs:
        if count == 1:
            block_ids.append(first)
        else:
            block_ids += range(first, first + count, 1 if count > 0 else -1)
    return block_ids


def _are_block_ids(values: Sequence[Any]) -> bool:
    """Whether they are whole numbers, none below zero. A long prompt has many thousands of them: no loop in Python."""
    return all(kind is int for kind, _ in groupby(values, type)) and min(values, default=0) >= 0
