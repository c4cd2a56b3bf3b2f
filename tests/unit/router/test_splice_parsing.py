"""Stripping equals parsing, for any answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings, strategies as st

from kvloop_router.splice import UnreadableAnswer, strip

TOP_NAMES = {"kv_transfer_params", "prompt_token_ids"}
CHOICE_NAMES = {"token_ids", "prompt_token_ids"}


def without_own_keys(answer: Any, *, keep_token_ids: bool) -> Any:
    """What stripping means, said on values instead of bytes."""
    if not isinstance(answer, dict):
        return answer
    kept = {name: value for name, value in answer.items() if name not in TOP_NAMES}
    if keep_token_ids and "prompt_token_ids" in answer:
        kept["prompt_token_ids"] = answer["prompt_token_ids"]
    if isinstance(response := kept.get("response"), dict):
        kept["response"] = {name: value for name, value in response.items() if name != "kv_transfer_params"}
    if isinstance(choices := kept.get("choices"), list) and not keep_token_ids:
        kept["choices"] = [
            {name: value for name, value in choice.items() if name not in CHOICE_NAMES}
            if isinstance(choice, dict)
            else choice
            for choice in choices
        ]
    return kept


def is_subsequence(part: bytes, whole: bytes) -> bool:
    remaining = iter(whole)
    return all(byte in remaining for byte in part)


own_names = st.sampled_from(["kv_transfer_params", "prompt_token_ids", "token_ids"])
names = st.one_of(own_names, st.sampled_from(["choices", "response", "index", "delta", "a", "é", 'q"', "\\", "\x00"]))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**40),
    st.floats(allow_nan=False),
    st.sampled_from(["", "kv_transfer_params", ',"token_ids":[1]', "é\u2028\U0001f600", '"', "\\", "\n\x01"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.lists(st.integers(0, 2**18), max_size=3),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4)),
    max_leaves=10,
)
choices = st.lists(st.one_of(values, st.dictionaries(names, values, max_size=5)), max_size=3)
answers = st.dictionaries(names, values, max_size=5).flatmap(
    lambda answer: st.fixed_dictionaries(
        {}, optional={"choices": choices, "response": st.dictionaries(names, values, max_size=4)}
    ).map(lambda more: {**answer, **more})
)


@st.composite
def written(draw: st.DrawFn, value: Any, newline: str = "\n") -> str:
    """``value`` as JSON with spaces, escapes and repeated members wherever JSON allows them."""

    def space() -> str:
        return draw(st.sampled_from(["", "", "", " ", newline, "\t "]))

    def string(text: str) -> str:
        style = draw(st.sampled_from(["ascii", "unicode", "escaped"]))
        if style == "escaped" and text.isascii():
            return '"' + "".join(f"\\u{ord(c):04x}" for c in text) + '"'
        return json.dumps(text, ensure_ascii=style == "ascii")

    def write(value: Any) -> str:
        if isinstance(value, dict):
            members = list(value.items())
            repeated: bool = draw(st.booleans())
            if members and repeated:
                members.insert(0, (members[-1][0], draw(leaves)))
            inner = (space() + string(k) + space() + ":" + space() + write(v) + space() for k, v in members)
            return "{" + (",".join(inner) or space()) + "}"
        if isinstance(value, list):
            return "[" + (",".join(space() + write(v) + space() for v in value) or space()) + "]"
        return string(value) if isinstance(value, str) else json.dumps(value)

    return space() + write(value) + space()


compact_or_not = answers.flatmap(
    lambda answer: st.one_of(
        st.just(json.dumps(answer, separators=(",", ":"))),
        st.just(json.dumps(answer, ensure_ascii=False)),
        written(answer),
    )
)


@settings(max_examples=400)
@given(text=compact_or_not, keep=st.booleans())
def test_a_stripped_body_parses_to_the_answer_without_the_keys(text: str, keep: bool) -> None:
    body = text.encode()

    stripped = strip(body, keep_token_ids=keep)

    assert json.loads(stripped.data) == without_own_keys(json.loads(body), keep_token_ids=keep)
    assert is_subsequence(stripped.data, body)


@settings(max_examples=400)
@given(
    text=compact_or_not,
    keep=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    space=st.sampled_from(["", " "]),
    before=st.sampled_from(["", ": kv_transfer_params\n", "event: e\n", "id: token_ids\r\n"]),
)
def test_an_event_of_several_data_lines_is_stripped_like_its_data(
    text: str, keep: bool, end: str, space: str, before: str
) -> None:
    lines = text.split("\n")
    event = before + "".join(f"data:{space}{line}{end}" for line in lines) + end

    stripped = strip(event.encode(), keep_token_ids=keep).data.decode()

    assert stripped.startswith(before)
    assert stripped.endswith(end * 2)
    fields = stripped.removeprefix(before).split(end)
    assert [line[: len("data:" + space)] for line in fields[:-2]] == ["data:" + space] * len(lines)
    data = "\n".join(line.removeprefix("data:" + space) for line in fields[:-2])
    assert json.loads(data) == without_own_keys(json.loads(text), keep_token_ids=keep)
    assert is_subsequence(stripped.encode(), event.encode())


@settings(max_examples=300)
@given(answer=answers)
def test_what_was_cut_is_what_was_found(answer: dict[str, Any]) -> None:
    stripped = strip(json.dumps(answer).encode(), keep_token_ids=False)

    handle = answer.get("kv_transfer_params")
    if handle is None and isinstance(answer.get("response"), dict):
        handle = answer["response"].get("kv_transfer_params")
    assert stripped.handle == (handle if isinstance(handle, dict) else None)
    listed = answer.get("choices")
    assert len(stripped.token_ids) <= len(listed if isinstance(listed, list) else [])
    assert all(isinstance(ids, list) for ids in stripped.token_ids.values())


@settings(max_examples=300)
@given(answer=answers, cut=st.floats(0, 1, exclude_max=True))
def test_a_body_cut_short_is_refused_or_names_nothing_of_ours(answer: dict[str, Any], cut: float) -> None:
    whole = json.dumps(answer).encode()
    body = whole[: int(len(whole) * cut)]

    try:
        stripped = strip(body, keep_token_ids=False)
    except UnreadableAnswer:
        assert b"token_ids" in body or b"kv_transfer_params" in body
    else:
        assert stripped.data == body
        assert b"kv_transfer_params" not in body
