"""What a template's rendering of a synthetic chat is taken for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvloop_router.template import Body, Case, Finding, TemplateReport, Verdict, bodies, judge
from kvloop_sim.template import TemplateOptions, render


def append_only(body: Body) -> str:
    options = TemplateOptions(add_generation_prompt=body["add_generation_prompt"])
    return render(body["messages"], body.get("tools"), options)


def strips(body: Body) -> str:
    """As templates of reasoning models do."""
    options = TemplateOptions(add_generation_prompt=body["add_generation_prompt"], strip_reasoning=True)
    return render(body["messages"], body.get("tools"), options)


def begins_to_think(body: Body) -> str:
    """Its prompts end with the beginning of a thought, which earlier answers do not have."""
    return strips(body) + ("<think>\n" if body["add_generation_prompt"] else "")


def knows_no_reasoning(body: Body) -> str:
    plain = [{name: message[name] for name in ("role", "content")} for message in body["messages"]]
    return append_only({**body, "messages": plain})


def counts(body: Body) -> str:
    """Says in front how long the chat is."""
    return f"{len(body['messages'])} messages\n" + append_only(body)


def verdicts(template: Any) -> dict[Case, Verdict]:
    found = {}
    for case in Case:
        rendered = [list(template(body).encode()) for body in bodies(case, "tiny")]
        found[case] = judge(case, rendered).verdict
    return found


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (append_only, ("append_only", "append_only", "append_only", "append_only")),
        (strips, ("append_only", "dropped", "append_only", "changed")),
        (begins_to_think, ("changed", "changed", "changed", "changed")),
        (knows_no_reasoning, ("append_only", "no_reasoning", "append_only", "append_only")),
        (counts, ("changed", "changed", "changed", "changed")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_template_does_is_seen(template: Any, expected: tuple[str, ...]) -> None:
    assert tuple(verdicts(template).values()) == tuple(Verdict(name) for name in expected)


def test_what_changed_says_how_much_is_left() -> None:
    assert judge(Case.TOOL_CALL, [[1, 2, 3, 4], [1, 2, 9]]) == Finding(Case.TOOL_CALL, Verdict.CHANGED, 2, 4)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((), None),
        ((Verdict.REFUSED, Verdict.NO_REASONING), None),
        ((Verdict.APPEND_ONLY, Verdict.REFUSED), True),
        ((Verdict.APPEND_ONLY, Verdict.DROPPED), False),
    ],
)
def test_a_template_is_append_only_where_it_is_in_every_case_that_it_renders(
    found: tuple[Verdict, ...], expected: bool | None
) -> None:
    findings = tuple(Finding(case, verdict) for case, verdict in zip(Case, found, strict=False))

    assert TemplateReport("tiny", "decode-0", "a", findings).append_only is expected


def test_what_is_asked_is_json_that_a_chat_template_takes() -> None:
    for case in Case:
        for body in bodies(case, "tiny"):
            assert json.loads(json.dumps(body)) == body
            assert body["messages"][0]["role"] == "user"
