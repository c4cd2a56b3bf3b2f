"""The trace context: what is passed on, and what is not."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from kvloop_router import trace_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_context_is_passed_on_as_it_came() -> None:
    told = {"traceparent": PARENT, "tracestate": "vendor=a,other=b"}

    assert trace_context.passed_on(CIMultiDict(told)) == told
    assert trace_context.passed_on(told) == told
    assert trace_context.passed_on({}) == {}


def test_state_in_several_headers_is_one_list() -> None:
    headers = CIMultiDict([("Traceparent", PARENT), ("tracestate", "a=1"), ("Tracestate", "b=2")])

    assert trace_context.passed_on(headers)["tracestate"] == "a=1,b=2"


def test_a_child_has_the_trace_and_its_own_span() -> None:
    context = trace_context.parse(PARENT, "a=1")

    assert context is not None
    assert context.sampled
    assert context.child("0" * 15 + "1").headers() == {
        "traceparent": f"00-{TRACE}-0000000000000001-01",
        "tracestate": "a=1",
    }


def test_a_later_versions_context_goes_on_in_this_one() -> None:
    context = trace_context.parse(f"cc-{TRACE}-{SPAN}-09-what-the-future-holds")

    assert context is not None
    assert context.headers() == {"traceparent": PARENT}


@pytest.mark.parametrize(
    "parent",
    [
        None,
        "",
        "nonsense",
        PARENT.upper(),
        f"{PARENT}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0\u0661",
        f"{PARENT}\r\nX-Injected: 1",
    ],
)
def test_a_malformed_context_is_none(parent: str | None) -> None:
    assert trace_context.parse(parent, "a=1") is None


def test_a_malformed_state_is_left_out() -> None:
    for state in ("a=\xe9", "a=1\r\nX: 1", "a" * 10_000):
        context = trace_context.parse(PARENT, state)
        assert context is not None
        assert context.state == ""
