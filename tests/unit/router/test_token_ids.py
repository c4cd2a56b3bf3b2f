"""Token ids that are sent on as they came."""

from __future__ import annotations

import orjson
import pytest

from kvloop_router import token_ids


def answer(tokens: bytes) -> bytes:
    return b'{"count":3,"max_model_len":4096,"tokens":%b,"token_strs":null}' % tokens


@pytest.mark.parametrize("ids", [[7], [0, 7919, 15838], list(range(5000))])
def test_ids_are_read_only_where_they_are_looked_at_and_written_as_they_came(ids: list[int]) -> None:
    told = token_ids.told(answer(orjson.dumps(ids)))

    assert told is not None
    found, limit = told
    assert (len(found), limit) == (len(ids), 4096)
    assert orjson.dumps({"prompt": token_ids.in_json(found)}) == orjson.dumps({"prompt": ids})
    assert list(found) == ids
    assert (found[0], found[-1:], len(found)) == (ids[0], ids[-1:], len(ids))


@pytest.mark.parametrize(
    "other",
    [
        answer(b"[]"),
        answer(b"[1,,2]"),
        answer(b"[,1]"),
        answer(b"[1,]"),
        answer(b"[1, 2]"),
        answer(b"[1,-2]"),
        answer(b"[1.5]"),
        answer(b"[[1]]"),
        answer(b'[1],"tokens":[2]'),
        answer(b"[1]")[:-1],
        answer(b"[1]").replace(b"null", b"[]"),
        b'{"tokens":[1],"max_model_len":4096}',
        b"",
    ],
)
def test_what_is_written_otherwise_is_left_to_a_parser(other: bytes) -> None:
    assert token_ids.told(other) is None


def test_other_ids_are_written_as_a_list() -> None:
    assert token_ids.in_json((1, 2)) == [1, 2]
