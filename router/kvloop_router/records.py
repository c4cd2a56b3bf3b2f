"""A kept handle as bytes: what memory holds of it, and what a store that routers share does. Pure.

A version byte, the length of a JSON object with the small fields, the object, and the large ones as they are: digests,
eight bytes a block, and block ids as runs. No token ids and no text are in it.
"""

from __future__ import annotations

import struct
from array import array
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Any

import orjson

from kvloop_connector.digest import Retained
from kvloop_connector.proof import FIELD
from kvloop_router.history import Trail
from kvloop_router.kept import Kept
from kvloop_router.leases import Pace

VERSION = 1

_HEAD = struct.Struct("<BI")
_CHAIN = "chain"
_SMALL_RUNS = "i"
_LARGE_RUNS = "q"


class UnknownRecord(ValueError):
    """A record of another version of this router, or none at all."""


Place = tuple[str, int, int]
"""Where in a record the runs of block ids are: how they are written, their first byte and the one after their last."""


def encode(kept: Kept, *, ahead: float = 0.0, step: int = 1) -> bytes:
    """``kept`` as bytes. ahead: how far the clock that the record's times are on is ahead of the router's.

    step: filled up to a multiple of so many bytes, so that the place of one that is gone fits another.
    """
    return placed(kept, ahead=ahead, step=step)[0]


def placed(kept: Kept, *, ahead: float = 0.0, step: int = 1) -> tuple[bytes, Place]:
    """As above, and where the runs are in it."""
    params, proof = _without_chain(kept.params)
    conversation = b"" if kept.conversation is None else kept.conversation.encode("utf-8", "surrogatepass")
    kind, runs = _packed(kept.blocks)
    large = (kept.tenant_scope, conversation, kept.trail.digests, kept.retained.digests, kept.retained.exact, proof)
    lengths = [len(part) for part in large]
    small = {
        "decode": kept.decode,
        "process": kept.process,
        "revision": kept.kv_revision,
        "params": params,
        "size": kept.block_size,
        "tokens": kept.retained.tokens,
        "shared": kept.trail.shared,
        "answered": kept.trail.answered,
        "named": kept.conversation is not None,
        "times": (kept.deadline + ahead, kept.since + ahead, kept.ends + ahead),
        "pace": (kept.pace.gaps, kept.pace.total, kept.pace.longest),
        "groups": [len(group) for group in kept.blocks],
        "kind": kind,
        "runs": len(runs),
        "lengths": lengths,
    }
    head = orjson.dumps(small)
    start = _HEAD.size + len(head) + sum(lengths)
    end = start + len(runs)
    return b"".join((_HEAD.pack(VERSION, len(head)), head, *large, runs, bytes(-end % step))), (kind, start, end)


def decode(record: bytes, *, ahead: float = 0.0) -> Kept:
    """What ``encode`` was given; ``ahead`` as there. Raises UnknownRecord."""
    try:
        small, start = _small(record)
        parts = []
        for length in small["lengths"]:
            parts.append(record[start : start + length])
            start += length
        scope, conversation, trail, digests, exact, proof = parts
        deadline, since, ends = small["times"]
        return Kept(
            tenant_scope=scope,
            decode=small["decode"],
            process=small["process"],
            kv_revision=small["revision"],
            params=_with_chain(small["params"], proof),
            blocks=_unpacked(small, record[start : start + small["runs"]]),
            retained=Retained(digests=digests, tokens=small["tokens"], exact=exact),
            block_size=small["size"],
            trail=Trail(trail, small["shared"], small["answered"]),
            conversation=conversation.decode("utf-8", "surrogatepass") if small["named"] else None,
            deadline=deadline - ahead,
            since=since - ahead,
            ends=ends - ahead,
            pace=Pace(*small["pace"]),
        )
    except UnknownRecord:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UnknownRecord("malformed") from error


def runs(record: bytes, place: Place) -> Iterable[tuple[int, int]]:
    """The runs of block ids of all KV groups, one after the other."""
    kind, start, end = place
    numbers = iter(array(kind, record[start:end]))
    return zip(numbers, numbers, strict=True)


def _small(record: bytes) -> tuple[dict[str, Any], int]:
    if len(record) < _HEAD.size or record[0] != VERSION:
        raise UnknownRecord(f"version {record[0] if record else 'none'}")
    _, length = _HEAD.unpack_from(record)
    start = _HEAD.size + length
    return orjson.loads(record[_HEAD.size : start]), start


def _packed(blocks: tuple[tuple[tuple[int, int], ...], ...]) -> tuple[str, bytes]:
    flat = [*chain.from_iterable(chain.from_iterable(blocks))]
    try:
        return _SMALL_RUNS, array(_SMALL_RUNS, flat).tobytes()
    except OverflowError:
        return _LARGE_RUNS, array(_LARGE_RUNS, flat).tobytes()


def _unpacked(small: Mapping[str, Any], packed: bytes) -> tuple[tuple[tuple[int, int], ...], ...]:
    flat = array(small["kind"])
    flat.frombytes(packed)
    numbers = iter(flat)
    pairs = zip(numbers, numbers, strict=True)
    return tuple([(*islice(pairs, length),) for length in small["groups"]])


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
    if b64encode(digests).decode() != text:
        return params, b""
    return {**params, FIELD: {**proof, _CHAIN: None}}, digests


def _with_chain(params: dict[str, Any], digests: bytes) -> Mapping[str, Any]:
    if not digests:
        return params
    return {**params, FIELD: {**params[FIELD], _CHAIN: b64encode(digests).decode()}}
