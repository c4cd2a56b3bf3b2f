"""The proof that a decode engine adds to its handle, by which a prefill engine sees itself what it may read.

Beside the place of the retained blocks stands one keyed digest a block, made from the engine's own block hashes
(``request.block_hashes``), which chain over tokens, adapter, media and cache salt alike. The whole is sealed with a
secret that the engines of a deployment share: a seal over what never changes, and one over the deadline, which a
renewal moves. What whoever carries the handle may change is ``remote_num_tokens``, downward.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from hmac import compare_digest
from struct import pack
from typing import Any, Self

from kvloop_connector.digest import DIGEST_BYTES
from kvloop_connector.errors import InvalidProof

FIELD = "kvloop"
"""The field of ``kv_transfer_params`` that holds the proof."""

FORMAT = 1
"""What ``format`` says of a proof that is laid out as here."""

SEAL_BYTES = 16
_FINGERPRINT_BYTES = 8

_SEALED = ("tp_size", "dcp_size", "pp_size", "transfer_mode")
_UNSEALED = frozenset({"remote_num_tokens", "remote_blocks_expiry_time", "remote_prefill_cached_tokens"})


@dataclass(frozen=True, slots=True)
class SealKey:
    """The secret that the engines of a deployment share.

    secret: 16 to 64 bytes. Whoever has it can make an engine read any block of another.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not 16 <= len(self.secret) <= 64:
            raise ValueError(f"the seal key has {len(self.secret)} bytes; 16 to 64 are needed")

    @property
    def fingerprint(self) -> str:
        """Tells one key from another and says nothing about it."""
        return self.digest(b"", purpose=b"key", size=_FINGERPRINT_BYTES).hex()

    def digest(self, content: bytes, *, purpose: bytes, size: int) -> bytes:
        """A keyed digest of ``size`` bytes; equal content gives another one for each ``purpose``."""
        return blake2b(content, key=self.secret, digest_size=size, person=b"kvloop/" + purpose).digest()


@dataclass(frozen=True, slots=True)
class HashScheme:
    """How an engine hashes blocks. Hashes of two engines can be compared only where all of it is equal.

    algorithm: vLLM's ``prefix_caching_hash_algo``.
    block_size: tokens that one hash covers.
    seed: fingerprint of the hash that a chain starts from (``NONE_HASH``).
    """

    algorithm: str
    block_size: int
    seed: str

    @classmethod
    def of(cls, key: SealKey, *, algorithm: str, block_size: int, none_hash: bytes) -> Self:
        """The scheme of an engine whose chains start from ``none_hash``."""
        seed = key.digest(none_hash, purpose=b"seed", size=_FINGERPRINT_BYTES).hex()
        return cls(algorithm, block_size, seed)

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.block_size}:{self.seed}"


@dataclass(frozen=True, slots=True)
class Term:
    """Until when blocks are retained, as of the renewal of this number (0: none yet).

    deadline: Unix seconds, for a scheduler to refuse in time.
    expiry: the same moment on the issuer's own clock, which workers compare exactly (``remote_blocks_expiry_time``).
    """

    deadline: float
    expiry: float
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a decode engine says of the blocks that it retains for one turn.

    key: fingerprint of the key it is sealed with.
    scheme: ``str`` of the issuer's HashScheme.
    revision: the issuer's KV revision.
    tokens: how many tokens' KV the issuer retains.
    chain: DIGEST_BYTES for each whole hash block of them that surely exists.
    tail: digest of exactly ``tokens`` tokens, for handles that are used whole or not at all; empty where there is none.
    ends: Unix seconds; no renewal moves the deadline past it.
    """

    key: str
    scheme: str
    revision: str
    tokens: int
    chain: bytes
    tail: bytes
    ends: float
    term: Term
    seal: bytes
    term_seal: bytes

    @classmethod
    def parse(cls, value: object) -> Self:
        """The proof in ``value``; raises InvalidProof where a field is missing or malformed."""
        if not isinstance(value, Mapping):
            raise InvalidProof("", "not an object")
        if value.get("format") != FORMAT or isinstance(value["format"], bool):
            raise InvalidProof("format", "not one that this version knows")
        lease = value.get("term")
        if not isinstance(lease, Mapping):
            raise InvalidProof("term", "missing or not an object")
        chain = _bytes(value, "chain")
        if len(chain) % DIGEST_BYTES:
            raise InvalidProof("chain", f"not a multiple of {DIGEST_BYTES} bytes")
        return cls(
            key=_text(value, "key"),
            scheme=_text(value, "hash"),
            revision=_text(value, "revision"),
            tokens=_count(value, "tokens"),
            chain=chain,
            tail=_bytes(value, "tail"),
            ends=_seconds(value, "ends"),
            term=Term(_seconds(lease, "deadline"), _seconds(lease, "expiry"), _count(lease, "number")),
            seal=_bytes(value, "seal"),
            term_seal=_bytes(lease, "seal"),
        )

    def serialise(self) -> dict[str, Any]:
        """The proof as it stands in the handle."""
        return {
            "format": FORMAT,
            "key": self.key,
            "hash": self.scheme,
            "revision": self.revision,
            "tokens": self.tokens,
            "chain": _base64(self.chain),
            "tail": _base64(self.tail),
            "ends": self.ends,
            "seal": _base64(self.seal),
            "term": _serialised(self.term, self.term_seal),
        }


def chain_of(key: SealKey, hashes: Sequence[bytes]) -> bytes:
    """DIGEST_BYTES for each of an engine's chained block hashes.

    Keyed, so that nobody can look for two prompts whose short digests are equal, nor guess text from a stored handle.
    """
    return b"".join(key.digest(block_hash, purpose=b"chain", size=DIGEST_BYTES) for block_hash in hashes)


def tail_of(key: SealKey, hashes: Sequence[bytes], rest: Sequence[int]) -> bytes:
    """A digest of the whole of a sequence: the hashes of its whole blocks and the ids of the tokens after them."""
    last = hashes[-1] if hashes else b""
    content = pack(">II", len(hashes), len(last)) + last + array("Q", rest).tobytes()
    return key.digest(content, purpose=b"tail", size=SEAL_BYTES)


def seal(
    key: SealKey,
    params: Mapping[str, Any],
    *,
    scheme: HashScheme,
    revision: str,
    tokens: int,
    hashes: Sequence[bytes],
    rest: Sequence[int] | None,
    ends: float,
    term: Term,
) -> dict[str, Any]:
    """``params``, the handle as the engine made it, with the proof and the deadline of ``term`` added.

    tokens: how many of its tokens exist for certain.
    hashes: those of the whole blocks of these tokens, and of no others.
    rest: ids of the tokens after these blocks, where all of the handle's tokens exist and ids say all about the
        rest; None otherwise, and then a handle that is used whole or not at all proves nothing.
    """
    unsealed = Proof(
        key=key.fingerprint,
        scheme=str(scheme),
        revision=revision,
        tokens=tokens,
        chain=chain_of(key, hashes),
        tail=b"" if rest is None else tail_of(key, hashes, rest),
        ends=float(ends),
        term=term,
        seal=b"",
        term_seal=b"",
    )
    proof = replace(
        unsealed, seal=_seal(key, params, unsealed), term_seal=_term_seal(key, *_whose(params), unsealed.term)
    )
    return {**params, "remote_blocks_expiry_time": term.expiry, FIELD: proof.serialise()}


def sealed_term(key: SealKey, *, engine_id: str, request_id: str, term: Term) -> dict[str, Any]:
    """``term`` as it stands in the proof of the one handle that this engine issued for this request."""
    return _serialised(term, _term_seal(key, engine_id, request_id, term))


def with_term(params: Mapping[str, Any], sealed: Mapping[str, Any]) -> dict[str, Any]:
    """The handle in ``params`` with another term, as ``sealed_term`` gave it.

    Raises InvalidProof where it has no proof or this is no term. No key is needed: a term of another handle, or one
    that was changed, leaves a handle that is forged. The seal over the rest stays as it came, so that what was changed
    on the way stays forged too.
    """
    proof = params.get(FIELD)
    if not isinstance(proof, Mapping):
        raise InvalidProof("", "not an object")
    moved = {**proof, "term": sealed}
    return {**params, "remote_blocks_expiry_time": Proof.parse(moved).term.expiry, FIELD: moved}


def is_sealed(key: SealKey, params: Mapping[str, Any], proof: Proof) -> bool:
    """Whether everything in ``params`` that is sealed is what the issuer wrote, the deadline included."""
    expected = _seal(key, params, proof), _term_seal(key, *_whose(params), proof.term)
    whole = compare_digest(expected[0], proof.seal) & compare_digest(expected[1], proof.term_seal)
    return whole and params.get("remote_blocks_expiry_time") == proof.term.expiry


def sealed_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``params`` the seal covers; a field that an engine acts on is here or is one that may change."""
    return {
        name: value
        for name, value in params.items()
        if name in _SEALED or (name.startswith("remote_") and name not in _UNSEALED)
    }


def _serialised(term: Term, term_seal: bytes) -> dict[str, Any]:
    return {"deadline": term.deadline, "expiry": term.expiry, "number": term.number, "seal": _base64(term_seal)}


def _whose(params: Mapping[str, Any]) -> tuple[Any, Any]:
    return params.get("remote_engine_id"), params.get("remote_request_id")


def _seal(key: SealKey, params: Mapping[str, Any], proof: Proof) -> bytes:
    said = [proof.key, proof.scheme, proof.revision, proof.tokens, proof.ends, proof.chain.hex(), proof.tail.hex()]
    return key.digest(_canonical([FORMAT, sealed_fields(params), said]), purpose=b"handle", size=SEAL_BYTES)


def _term_seal(key: SealKey, engine_id: Any, request_id: Any, term: Term) -> bytes:
    said = [FORMAT, [engine_id, request_id], float(term.deadline), float(term.expiry), term.number]
    return key.digest(_canonical(said), purpose=b"term", size=SEAL_BYTES)


def _canonical(value: Any) -> bytes:
    """Equal values give equal bytes, on whichever side of how many JSON documents."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(value: Mapping[Any, Any], name: str) -> bytes:
    try:
        return base64.b64decode(_text(value, name), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidProof(name, "not base64") from error


def _text(value: Mapping[Any, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise InvalidProof(name, "missing or not a string")
    return text


def _count(value: Mapping[Any, Any], name: str) -> int:
    count = value.get(name)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise InvalidProof(name, "missing or not a whole number")
    return count


def _seconds(value: Mapping[Any, Any], name: str) -> float:
    seconds = value.get(name)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise InvalidProof(name, "missing or not a number of seconds")
    return float(seconds)
