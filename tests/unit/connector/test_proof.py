from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.errors import InvalidProof
from kvloop_connector.handle import KVHandle
from kvloop_connector.proof import FIELD, Proof, SealKey, Term, is_sealed, sealed_fields, sealed_term, with_term
from tests.unit.connector.proofs import ENDS, KEY, NOW, OTHER_KEY, TERM, Issuer, renewed

HANDLE = Issuer(tokens=range(18)).handle()
PROOF = HANDLE[FIELD]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    handle = copy.deepcopy(HANDLE)
    inner = handle
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return handle


@given(tokens=st.lists(st.integers(0, 2**31), min_size=1, max_size=40), block_size=st.integers(1, 8))
def test_a_proof_comes_back_from_json_as_it_went(tokens: list[int], block_size: int) -> None:
    handle = Issuer(tokens=tokens, block_size=block_size).handle()

    proof = Proof.parse(handle[FIELD])

    assert proof.serialise() == handle[FIELD]
    assert (proof.tokens, proof.term, proof.ends) == (len(tokens) - 1, TERM, ENDS)
    assert is_sealed(KEY, handle, proof)


def test_the_handle_stays_one_for_whoever_does_not_look_at_the_proof() -> None:
    bare = Issuer(tokens=range(18)).bare()

    assert {name: value for name, value in HANDLE.items() if name != FIELD} == bare
    assert KVHandle.parse(HANDLE).num_tokens == 17


def test_the_proof_shows_neither_the_key_nor_the_hashes() -> None:
    written = json.dumps(HANDLE).encode()

    assert KEY.secret not in written
    assert KEY.secret.hex().encode() not in written
    assert repr(KEY.secret) not in repr(KEY)


@pytest.mark.parametrize("tokens", [1_000, 32_000])
def test_bytes_that_the_proof_adds_to_a_handle(tokens: int) -> None:
    """With blocks of 32 tokens: 10.7 bytes a block, and some 340 bytes whatever the length."""
    written = len(json.dumps(Issuer(tokens=range(tokens + 1), block_size=32).handle()[FIELD], separators=(",", ":")))

    assert written <= tokens / 32 * 32 / 3 + 400
    assert written >= tokens // 32 * 32 / 3


@pytest.mark.parametrize("name", [name for name in PROOF if name != "format"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(InvalidProof) as raised:
        Proof.parse({other: value for other, value in PROOF.items() if other != name})

    assert raised.value.field == name


@pytest.mark.parametrize("name", PROOF["term"])
def test_a_missing_field_of_the_term_is_named(name: str) -> None:
    with pytest.raises(InvalidProof) as raised:
        Proof.parse({**PROOF, "term": {other: value for other, value in PROOF["term"].items() if other != name}})

    assert raised.value.field == name


@pytest.mark.parametrize("value", [None, True, 2, "1"])
def test_a_proof_of_another_format_is_not_read(value: object) -> None:
    with pytest.raises(InvalidProof, match="format"):
        Proof.parse({**PROOF, "format": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chain", "AAAA"),
        ("chain", "not base64!"),
        ("chain", "é"),
        ("tail", 5),
        ("tokens", -1),
        ("tokens", True),
        ("tokens", 1.0),
        ("ends", float("nan")),
        ("ends", float("inf")),
        ("ends", True),
        ("term", []),
    ],
)
def test_a_malformed_field_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidProof) as raised:
        Proof.parse({**PROOF, name: value})

    assert raised.value.field == name
    assert repr(value) not in str(raised.value)


@given(value=json_values)
def test_whatever_stands_for_a_proof_is_read_or_refused(value: Any) -> None:
    with pytest.raises(InvalidProof):
        Proof.parse(value)


def others(value: Any, *, encoded: bool) -> list[Any]:
    """Values that could stand where ``value`` stands."""
    if isinstance(value, str):
        return ["", "AAAAAAAAAAA=" if encoded else f"{value}x"]
    if isinstance(value, list):
        (blocks,) = value
        return [[], [blocks[:-1]], [[*blocks, 9]], [[9, *blocks[1:]]], [blocks, blocks]]
    return [value + 1]


SEALED_PATHS = [
    *((name,) for name in sealed_fields(HANDLE)),
    *((FIELD, name) for name in PROOF if name not in ("format", "term")),
    *((FIELD, "term", name) for name in PROOF["term"]),
    ("remote_blocks_expiry_time",),
]


@pytest.mark.parametrize("path", SEALED_PATHS, ids=".".join)
def test_no_field_that_the_engine_acts_on_can_be_changed(path: tuple[str, ...]) -> None:
    value: Any = HANDLE
    for name in path:
        value = value[name]
    for other in others(value, encoded=path[-1] in ("chain", "tail", "seal")):
        handle = changed(path, other)
        assert not is_sealed(KEY, handle, Proof.parse(handle[FIELD]))


@pytest.mark.parametrize("name", ["remote_host", "remote_block_ids", "tp_size", "remote_blocks_expiry_time"])
def test_no_such_field_can_be_left_out(name: str) -> None:
    handle = {other: value for other, value in HANDLE.items() if other != name}

    assert not is_sealed(KEY, handle, Proof.parse(handle[FIELD]))


def test_a_field_that_engines_do_not_have_yet_cannot_be_slipped_in() -> None:
    handle = {**HANDLE, "remote_registration_generation": 3}

    assert not is_sealed(KEY, handle, Proof.parse(handle[FIELD]))


@pytest.mark.parametrize("name", ["remote_num_tokens", "prompt_token_ids", "do_remote_decode"])
def test_what_its_carrier_may_change_is_not_sealed(name: str) -> None:
    assert is_sealed(KEY, {**HANDLE, name: 0}, Proof.parse(HANDLE[FIELD]))


def test_another_key_fits_no_seal_and_has_another_fingerprint() -> None:
    assert not is_sealed(OTHER_KEY, HANDLE, Proof.parse(HANDLE[FIELD]))
    assert OTHER_KEY.fingerprint != KEY.fingerprint


def test_the_parts_of_two_handles_do_not_fit_together() -> None:
    other = Issuer(tokens=range(18), request_id="turn-2", term=Term(NOW + 900, 500.0, 3)).handle()
    later = {**HANDLE, "remote_blocks_expiry_time": 500.0, FIELD: {**PROOF, "term": other[FIELD]["term"]}}

    assert is_sealed(KEY, other, Proof.parse(other[FIELD]))
    assert not is_sealed(KEY, later, Proof.parse(later[FIELD]))
    assert not is_sealed(KEY, {**other, FIELD: PROOF}, Proof.parse(PROOF))


@pytest.mark.parametrize("whose", [{"engine_id": "another"}, {"request_id": "turn-2"}], ids=["engine", "request"])
def test_a_term_fits_the_handle_of_one_engine_and_request_only(whose: dict[str, str]) -> None:
    term = sealed_term(KEY, **{"engine_id": "decode", "request_id": "turn-1", **whose}, term=TERM)

    handle = with_term(HANDLE, term)

    assert not is_sealed(KEY, handle, Proof.parse(handle[FIELD]))


def test_a_renewal_moves_the_deadline_and_nothing_else() -> None:
    term = Term(NOW + 960, 557.5, 1)

    handle = renewed(KEY, HANDLE, term)

    proof = Proof.parse(handle[FIELD])
    assert is_sealed(KEY, handle, proof)
    assert proof.term == term
    assert handle["remote_blocks_expiry_time"] == 557.5
    before = {**HANDLE, "remote_blocks_expiry_time": 0, FIELD: {**PROOF, "term": {}}}
    assert {**handle, "remote_blocks_expiry_time": 0, FIELD: {**handle[FIELD], "term": {}}} == before


def test_a_renewal_cannot_mend_a_handle_that_was_changed() -> None:
    handle = renewed(KEY, {**HANDLE, "remote_host": "10.9.9.9"}, TERM)

    assert not is_sealed(KEY, handle, Proof.parse(handle[FIELD]))


@pytest.mark.parametrize(
    ("params", "sealed", "field"),
    [
        (Issuer(tokens=range(18)).bare(), PROOF["term"], "kvloop"),
        (HANDLE, {}, "deadline"),
        (HANDLE, {**PROOF["term"], "seal": "?"}, "seal"),
        (HANDLE, None, "term"),
    ],
    ids=["no proof", "nothing", "no base64", "none"],
)
def test_what_is_no_term_or_has_no_proof_is_refused(params: dict[str, Any], sealed: Any, field: str) -> None:
    with pytest.raises(InvalidProof, match=field):
        with_term(params, sealed)


def test_a_digest_for_one_purpose_is_none_for_another() -> None:
    made = {KEY.digest(b"content", purpose=purpose, size=16) for purpose in (b"chain", b"tail", b"handle", b"term")}

    assert len(made) == 4


@pytest.mark.parametrize("secret", [b"", bytes(15), bytes(65)])
def test_a_key_that_is_no_secret_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match="16 to 64"):
        SealKey(secret)
