from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvloop_connector.errors import InvalidRequest
from kvloop_connector.lease_requests import MOST_HANDLES, Release, Renew, parse_release, parse_renew

IDS = "remote_request_ids"


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_several_handles_are_named_at_once() -> None:
    assert parse_release(body(remote_request_ids=["b", "a"])) == Release(("b", "a"))
    assert parse_renew(body(remote_request_ids=["b", "a"], seconds=90)) == Renew(("b", "a"), 90.0)


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (b"", ""),
        (b"{", ""),
        (b"\xff", ""),
        (b"[" * 100_000, ""),
        (b"[]", ""),
        (body(), IDS),
        (body(remote_request_ids="a"), IDS),
        (body(remote_request_ids=[]), IDS),
        (body(remote_request_ids=["a", 1]), IDS),
        (body(remote_request_ids=["a", ""]), IDS),
        (body(remote_request_ids=["a", "b", "a"]), IDS),
        (body(remote_request_ids=[str(number) for number in range(MOST_HANDLES + 1)]), IDS),
        (body(remote_request_ids=["a"], remote_request_id="a"), "remote_request_id"),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else None,
)
def test_what_is_no_request_is_refused_and_the_field_named(sent: bytes, field: str) -> None:
    for parse in (parse_release, parse_renew):
        with pytest.raises(InvalidRequest) as raised:
            parse(sent if parse is parse_release or field != IDS else with_seconds(sent))

        assert raised.value.field == field
        assert str(raised.value).startswith(field or "body")


@pytest.mark.parametrize("seconds", [None, "60", True, 0, -1, float("nan"), float("inf")])
def test_a_renewal_needs_seconds(seconds: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_renew(body(remote_request_ids=["a"], seconds=seconds))

    assert raised.value.field == "seconds"


def test_a_release_has_no_seconds() -> None:
    with pytest.raises(InvalidRequest, match="seconds: not a field"):
        parse_release(body(remote_request_ids=["a"], seconds=1))


@given(sent=st.binary() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps).map(str.encode))
def test_whatever_is_sent_is_parsed_or_refused(sent: bytes) -> None:
    for parse in (parse_release, parse_renew):
        with pytest.raises(InvalidRequest):
            parse(sent)


def with_seconds(sent: bytes) -> bytes:
    return json.dumps({**json.loads(sent), "seconds": 1}).encode()
