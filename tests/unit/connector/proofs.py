"""Decode and prefill engines of few tokens, as far as proofs go: how they hash, what they issue, what they ask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from kvloop_connector.proof import HashScheme, SealKey, Term, seal, sealed_term, with_term
from kvloop_connector.verdict import Decision, Prompt, Reader, SpentHandles, judge

KEY = SealKey(b"k" * 32)
OTHER_KEY = SealKey(b"o" * 32)
REVISION = "0123456789"
NOW = 1000.0
TERM = Term(deadline=NOW + 480, expiry=77.5)
ENDS = NOW + 3600


def scheme(
    block_size: int, *, algorithm: str = "sha256_cbor", none_hash: bytes = b"none", key: SealKey = KEY
) -> HashScheme:
    return HashScheme.of(key, algorithm=algorithm, block_size=block_size, none_hash=none_hash)


def hashes(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Chained hashes of whole blocks, as an engine makes them."""
    last, made = salt.encode(), []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        last = sha256(last + repr(list(tokens[start : start + block_size])).encode()).digest()
        made.append(last)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """A decode engine after a turn whose prompt and answer were ``tokens``."""

    tokens: Sequence[int]
    block_size: int = 4
    key: SealKey = KEY
    engine_id: str = "decode"
    revision: str = REVISION
    salt: str = ""
    algorithm: str = "sha256_cbor"
    none_hash: bytes = b"none"
    groups: int = 1
    request_id: str = "turn-1"
    computed: int | None = None
    term: Term = TERM

    def bare(self) -> dict[str, Any]:
        """The handle as the stock connector makes it."""
        computed = len(self.tokens) - 1 if self.computed is None else self.computed
        blocks = -(-computed // self.block_size)
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [list(range(100, 100 + blocks)) for _ in range(self.groups)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": computed,
            "remote_blocks_expiry_time": self.term.expiry,
            "transfer_mode": "pull",
        }

    def handle(self) -> dict[str, Any]:
        """The handle with its proof, as it comes out of JSON."""
        bare = self.bare()
        exist = min(bare["remote_num_tokens"], len(self.tokens) - 1)
        whole = exist // self.block_size
        sealed = seal(
            self.key,
            bare,
            scheme=scheme(self.block_size, algorithm=self.algorithm, none_hash=self.none_hash, key=self.key),
            revision=self.revision,
            tokens=exist,
            hashes=hashes(self.tokens, self.block_size, self.salt)[:whole],
            rest=self.tokens[whole * self.block_size : exist] if exist == bare["remote_num_tokens"] else None,
            ends=ENDS,
            term=self.term,
        )
        return dict(json.loads(json.dumps(sealed)))


def reader(block_size: int = 4, *, groups: int = 1, **changes: Any) -> Reader:
    made = Reader(
        key=KEY,
        engine_id="prefill",
        revision=REVISION,
        scheme=scheme(block_size),
        block_size=block_size,
        groups=groups,
        divisible=groups == 1,
    )
    return replace(made, **changes)


def renewed(key: SealKey, params: dict[str, Any], term: Term) -> dict[str, Any]:
    """The handle with another term, sealed with ``key`` for it."""
    engine_id, request_id = params["remote_engine_id"], params["remote_request_id"]
    return with_term(params, sealed_term(key, engine_id=engine_id, request_id=request_id, term=term))


def prompt(tokens: Sequence[int], block_size: int = 4, salt: str = "") -> Prompt:
    return Prompt(hashes(tokens, block_size, salt), len(tokens), tokens)


def judged(
    handle: dict[str, Any],
    tokens: Sequence[int],
    who: Reader | None = None,
    *,
    spent: SpentHandles | None = None,
    now: float = NOW,
) -> Decision:
    who = reader() if who is None else who
    return judge(
        who, handle, prompt(tokens, who.scheme.block_size), spent=SpentHandles() if spent is None else spent, now=now
    )
