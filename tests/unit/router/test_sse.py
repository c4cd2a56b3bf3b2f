from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from kvloop_router.sse import Events, EventTooLarge, data_spans

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
streams = st.lists(
    st.sampled_from(
        [b"data: {}", b"data:", b": ping", b"event: x", b"", b"\n", b"\r", b"\r\n", b"\xef\xbb\xbf", b"\xc3"]
    ),
    max_size=24,
).map(b"".join)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_ends_with_the_blank_line_that_is_part_of_it(end: bytes) -> None:
    first, second = b"data: 1" + end * 2, b": comment" + end + b"data: 2" + end * 2
    events = Events()

    assert events.feed(first + second) == [first, second]
    assert events.rest == b""


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_is_given_out_with_the_read_that_completes_it(end: bytes) -> None:
    event = b"data: 1" + end * 2
    events = Events()

    given_out = [events.feed(event[position : position + 1]) for position in range(len(event))]

    assert given_out == [[]] * (len(event) - 1) + [[event]]


def test_an_event_without_its_end_is_the_rest() -> None:
    events = Events()

    assert events.feed(b"data: 1\n\ndata: 2\n") == [b"data: 1\n\n"]
    assert events.rest == b"data: 2\n"
    assert events.feed(b"\n") == [b"data: 2\n\n"]


def test_line_ends_may_be_mixed() -> None:
    stream = [b"data: 1\r\n\n", b"data: 2\n\r\n", b"data: 3\n\r", b"data: 4\n\n"]

    assert Events().feed(b"".join(stream)) == stream


@given(stream=streams, data=st.data())
def test_events_do_not_depend_on_how_the_stream_is_read(stream: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    whole, split = Events(), Events()

    at_once = whole.feed(stream)
    in_pieces = [event for a, b in pairwise([0, *cuts, len(stream)]) for event in split.feed(stream[a:b])]

    assert in_pieces == at_once
    assert split.rest == whole.rest
    assert b"".join(at_once) + whole.rest == stream


def test_an_event_over_the_bound_is_refused_before_it_is_whole() -> None:
    events = Events(max_event_bytes=16)
    events.feed(b"data: 0123456789")

    with pytest.raises(EventTooLarge) as refusal:
        events.feed(b"a")

    assert refusal.value.limit == 16
    assert "0123456789" not in str(refusal.value)


def test_a_whole_event_over_the_bound_is_refused_too() -> None:
    with pytest.raises(EventTooLarge):
        Events(max_event_bytes=16).feed(b"data: 0123456789\n\n")


def test_the_bound_is_for_one_event_not_for_a_read() -> None:
    assert Events(max_event_bytes=16).feed(b"data: 1\n\n" * 100) == [b"data: 1\n\n"] * 100


@given(
    lines=st.lists(
        st.tuples(st.sampled_from([b"data: ", b"data:"]), st.sampled_from([b"", b"{}", b" x:"])), min_size=1
    ),
    end=line_ends,
    before=st.sampled_from([b"", b"\xef\xbb\xbf", b": comment", b"event: data: x", b"database: no", b"data"]),
)
def test_data_is_what_follows_data_and_one_space(lines: list[tuple[bytes, bytes]], end: bytes, before: bytes) -> None:
    mark = b"\xef\xbb\xbf"
    head = before if before in (b"", mark) else before + end
    event = head + b"".join(name + value + end for name, value in lines) + end
    wanted = [value.removeprefix(b" ") if name == b"data:" else value for name, value in lines]

    assert [event[start:stop] for start, stop in data_spans(event)] == wanted


def test_an_event_that_is_cut_short_still_shows_its_data() -> None:
    assert data_spans(b"data: {") == [(6, 7)]
