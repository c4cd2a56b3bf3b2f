"""A kept handle as bytes: what memory holds of it, and what a store that routers share does. Pure.

A version byte, where the following parts end, a JSON list with the small fields, the large ones as they are, such as
digests, eight bytes a block, and block ids as runs, in JSON. No token ids and no text are in it.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import orjson

from kvloop_connector.digest import Retained
from kvloop_connector.proof import FIELD
from kvloop_router.history import Trail
from kvloop_router.kept import Kept
from kvloop_router.leases import Pace

VERSION = 2

_HEAD = struct.Struct("<BIII")
"""The version, where the small fields end, where the runs begin and where they end."""
_CHAIN = "chain"


class UnknownRecord(ValueError):
    """A record of another version of this router, or none at all."""


def encode(kept: Kept, *, ahead: float = 0.0, step: int = 1) -> bytes:
    """``kept`` as bytes. ahead: how far the clock that the record's times are on is ahead of the router's.

    step: filled up to a multiple of so many bytes, so that the place of one that is gone fits another.
    """
    params, proof = _without_chain(kept.params) if FIELD in kept.params else (kept.params, b"")
    trail, retained, pace = kept.trail, kept.retained, kept.pace
    conversation = b"" if kept.conversation is None else kept.conversation.encode("utf-8", "surrogatepass")
    scope, past, digests, exact = kept.tenant_scope, trail.digests, retained.digests, retained.exact
    lengths = (len(scope), len(conversation), len(past), len(digests), len(exact), len(proof))
    small = orjson.dumps(
        (
            kept.decode,
            kept.process,
            kept.kv_revision,
            params,
            kept.block_size,
            retained.tokens,
            trail.shared,
            trail.answered,
            kept.conversation is not None,
            kept.deadline + ahead,
            kept.since + ahead,
            kept.ends + ahead,
            (pace.gaps, pace.total, pace.longest),
            lengths,
        )
    )
    runs = orjson.dumps(kept.blocks)
    large = _HEAD.size + len(small)
    start = large + sum(lengths)
    end = start + len(runs)
    head = _HEAD.pack(VERSION, large, start, end)
    return b"".join((head, small, scope, conversation, past, digests, exact, proof, runs, bytes(-end % step)))


def decode(record: bytes, *, ahead: float = 0.0) -> Kept:
    """What ``encode`` was given; ``ahead`` as there. Raises UnknownRecord."""
    try:
        large, start, end = _places(record)
        (
            engine,
            process,
            kv_revision,
            params,
            block_size,
            tokens,
            shared,
            answered,
            named,
            deadline,
            since,
            ends,
            pace,
            lengths,
        ) = orjson.loads(record[_HEAD.size : large])
        parts = []
        for length in lengths:
            parts.append(record[large : large + length])
            large += length
        scope, conversation, past, digests, exact, proof = parts
        return Kept(
            tenant_scope=scope,
            decode=engine,
            process=process,
            kv_revision=kv_revision,
            params=_with_chain(params, proof),
            blocks=tuple([(*map(tuple, group),) for group in orjson.loads(record[start:end])]),
            retained=Retained(digests=digests, tokens=tokens, exact=exact),
            block_size=block_size,
            trail=Trail(past, shared, answered),
            conversation=conversation.decode("utf-8", "surrogatepass") if named else None,
            deadline=deadline - ahead,
            since=since - ahead,
            ends=ends - ahead,
            pace=Pace(*pace),
        )
    except UnknownRecord:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UnknownRecord("malformed") from error


def runs(record: bytes) -> Iterable[tuple[int, int]]:
    """The runs of block ids of all KV groups of a record that ``encode`` gave, one after the other."""
    _, start, end = _places(record)
    return chain.from_iterable(orjson.loads(record[start:end]))


def _places(record: bytes) -> tuple[int, int, int]:
    if len(record) < _HEAD.size or record[0] != VERSION:
        raise UnknownRecord(f"version {record[0] if record else 'none'}")
    _, large, start, end = _HEAD.unpack_from(record)
    return large, start, end


def _without_chain(params: Mapping[str, Any]) -> tuple[Mapping[str, Any], bytes]:
    """The params, and apart from them the digests of a sealed handle, which are in base64 there."""
    proof = params.get(FIELD)
    if proof is None:
        return params, b""
    if not isinstance(proof, Mapping) or not isinstance(text := proof.get(_CHAIN), str) or not text:
        return params, b""
    try:
        digests = b64decode(text, validate=True)
    except (NotBase64, ValueError):
        return params, b""
    # There are other texts for these bytes: with padding elsewhere, or with bits at the end that stand for nothing.
    whole, rest = divmod(len(digests), 3)
    if len(text) != 4 * (whole + (rest > 0)) or text[4 * whole :] != b64encode(digests[3 * whole :]).decode():
        return params, b""
    return {**params, FIELD: {**proof, _CHAIN: None}}, digests


def _with_chain(params: dict[str, Any], digests: bytes) -> Mapping[str, Any]:
    if not digests:
        return params
    return {**params, FIELD: {**params[FIELD], _CHAIN: b64encode(digests).decode()}}
