"""What a prefill engine does with a handle: read so many tokens, read none and let the issuer free, or leave it alone.

Only a handle that is proven to be genuine makes the engine get in touch with anybody. Whatever is wrong with it, the
request is served; it only computes more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvloop_connector.digest import common_blocks
from kvloop_connector.errors import InvalidHandle, InvalidProof
from kvloop_connector.handle import COLD_PREFILL_PARAMS, KVHandle
from kvloop_connector.proof import FIELD, HashScheme, Proof, SealKey, chain_of, is_sealed, sealed_fields, tail_of
from kvloop_connector.settings import READ_MARGIN_SECONDS

REUSE_FIELD = "kvloop_reuse"
"""Where the ``kv_transfer_params`` of a prefill leg's answer say what became of the handle that the leg came with:
``{"outcome": …, "tokens": …}``."""


class Outcome(StrEnum):
    """What became of a handle. All but READ and DIVERGED are refusals."""

    READ = "read"
    """Some of it may be read."""
    DIVERGED = "diverged"
    """Genuine, and the prompt has nothing in common with it that could be read."""
    NO_HANDLE = "no_handle"
    """The request came with none."""
    UNPROVEN = "unproven"
    """No proof: issued by an engine without this connector."""
    MALFORMED = "malformed"
    """Handle or proof lack a field, or one is not what it should be."""
    FOREIGN_ENGINE = "foreign_engine"
    """Sealed with another key: its issuer is no engine of this deployment."""
    FORGED = "forged"
    """The seal does not fit: something was changed, or put together from several handles."""
    OWN_ENGINE = "own_engine"
    """Sent to the engine that issued it."""
    OTHER_REVISION = "other_revision"
    """Its KV is of another model, image or layout."""
    OTHER_HASH = "other_hash"
    """Its blocks are hashed by another algorithm, from another seed or in another size."""
    EXPIRED = "expired"
    """Its time is over, or would be before a read ends."""
    SPENT = "spent"
    """This engine has used it before."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a handle.

    tokens: how many leading tokens of the prompt may be read.
    release: whether the issuer is to be told that the blocks are not needed any more; without it, and without a
        read, nobody is contacted.
    """

    outcome: Outcome
    tokens: int = 0
    release: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The prefill engine that a handle was sent to.

    block_size: tokens of a KV block; a read covers whole blocks.
    groups: number of KV groups; a read of another number ends the engine.
    divisible: whether a handle can be read in part: one KV group, of full attention.
    """

    key: SealKey
    engine_id: str
    revision: str
    scheme: HashScheme
    block_size: int
    groups: int
    divisible: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt as its engine sees it.

    hashes: of its whole hash blocks.
    tokens: how many of it the engine computes or loads.
    ids: its token ids; None where ids do not say all, as with media or embeddings, and a handle that is used whole or
        not at all is then not used.
    """

    hashes: Sequence[bytes]
    tokens: int
    ids: Sequence[int] | None = None


class SpentHandles:
    """The handles that one prefill engine has used, each kept for as long as a deadline of it may lie ahead.

    Other prefill engines do not know of them: whoever hands a handle out sees to it that only one gets it.
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def has(self, handle: KVHandle) -> bool:
        """Whether it was used before."""
        return (handle.engine_id, handle.request_id) in self._ends

    def add(self, handle: KVHandle, ends: float, now: float) -> None:
        """Remember that ``handle`` was used, until ``ends``; forget those that nobody can come with any more."""
        # In the order of their use, which is nearly that of their ends; one behind a later end is only kept longer.
        for other in list(self._ends):
            if self._ends[other] > now:
                break
            del self._ends[other]
        self._ends[handle.engine_id, handle.request_id] = ends


def judge(reader: Reader, params: Mapping[str, Any], prompt: Prompt, *, spent: SpentHandles, now: float) -> Decision:
    """What ``reader`` does with the handle in ``params`` (``kv_transfer_params``) at ``now``, in Unix seconds.

    A handle that is to be read or released counts as spent from here on.
    """
    if not params.get("remote_block_ids"):
        return Decision(Outcome.NO_HANDLE)
    if FIELD not in params:
        return Decision(Outcome.UNPROVEN)
    try:
        handle = KVHandle.parse(params)
        proof = Proof.parse(params[FIELD])
    except (InvalidHandle, InvalidProof):
        return Decision(Outcome.MALFORMED)
    if (refusal := _refusal(reader, handle, proof)) is not None:
        return Decision(refusal)
    if spent.has(handle):
        return Decision(Outcome.SPENT)
    if now + READ_MARGIN_SECONDS >= min(proof.term.deadline, proof.ends):
        return Decision(Outcome.EXPIRED)
    spent.add(handle, proof.ends, now)
    if proof.scheme != str(reader.scheme):
        return Decision(Outcome.OTHER_HASH, release=True)
    tokens = common_prefix(reader, handle, proof, prompt)
    return Decision(Outcome.READ if tokens else Outcome.DIVERGED, tokens, release=not tokens)


def common_prefix(reader: Reader, handle: KVHandle, proof: Proof, prompt: Prompt) -> int:
    """How many leading tokens of ``prompt`` may be read from what ``handle`` retains; 0 for none.

    In whole blocks, clamped to what exists and to what the handle's carrier allows; all of it or nothing where it
    cannot be read in part.
    """
    hash_size = reader.scheme.block_size
    if reader.divisible:
        common = common_blocks(proof.chain, chain_of(reader.key, prompt.hashes)) * hash_size
        most = min(common, proof.tokens, handle.num_tokens, prompt.tokens, len(handle.block_ids[0]) * reader.block_size)
        return most // reader.block_size * reader.block_size
    # A prompt of just these tokens would have its last one computed again, on top of a state that has seen it.
    if prompt.ids is None or not proof.tail or not handle.num_tokens == proof.tokens < prompt.tokens:
        return 0
    whole = proof.tokens // hash_size
    own = tail_of(reader.key, prompt.hashes[:whole], prompt.ids[whole * hash_size : proof.tokens])
    return proof.tokens if whole and own == proof.tail else 0


def leg_params(decision: Decision, params: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """The ``kv_transfer_params`` that the engine goes on with: only what was proven is left of the handle."""
    if not decision.tokens and not decision.release:
        return dict(COLD_PREFILL_PARAMS)
    kept = {
        **COLD_PREFILL_PARAMS,
        **sealed_fields(params),
        "remote_num_tokens": decision.tokens,
        "remote_blocks_expiry_time": params["remote_blocks_expiry_time"],
    }
    if reader.divisible and decision.tokens:
        handle = KVHandle({**kept, "remote_num_tokens": params["remote_num_tokens"]})
        return dict(handle.trimmed(decision.tokens, reader.block_size).params)
    return kept


def _refusal(reader: Reader, handle: KVHandle, proof: Proof) -> Outcome | None:
    if proof.key != reader.key.fingerprint:
        return Outcome.FOREIGN_ENGINE
    if not is_sealed(reader.key, handle.params, proof):
        return Outcome.FORGED
    if handle.engine_id == reader.engine_id:
        return Outcome.OWN_ENGINE
    if proof.revision != reader.revision or handle.kv_groups != reader.groups:
        return Outcome.OTHER_REVISION
    return None
