"""What ``kvloop explain`` shows: a turn as people read it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

_NAMES = 10


def explained(told: Mapping[str, Any]) -> str:
    """The explanation that a router gives of a turn, as text."""
    turn, tokens = told["turn"], told["tokens"]
    lines = [
        ("Turn", f"{turn['request_id']}  {turn['api']}  {_time(turn['at'])}  {_ending(turn)}"),
        ("Path", _path(turn, told["why"])),
        *_choice(turn.get("expected") or {}),
        ("Engines", f"prefill {turn['prefill'] or '-'}, decode {turn['decode'] or '-'}"),
        ("Tokens", _tokens(tokens)),
        ("Times", _times(turn)),
        *(("Leg", _leg(leg)) for leg in turn["legs"]),
        *(("Failed", attempt) for attempt in turn["attempts"]),
        ("Before", _before(told["before"])),
        *(("History", line) for line in _history(told["history"], told["before"])),
        *(("Template", line) for line in template_lines(told["template"])),
        ("After", "left no handle: " + turn["no_handle"] if turn["no_handle"] else "left a handle for the next turn"),
    ]
    if turn["status"] != 200 and not turn["no_handle"]:
        lines.pop()
    if turn["trace_id"]:
        lines.append(("Trace", turn["trace_id"]))
    return "\n".join(_aligned(lines)) + "\n"


def recent(turns: Sequence[Mapping[str, Any]]) -> str:
    """A list of turns, the last one first."""
    if not turns:
        return "No turn was played yet.\n"
    rows = [("WHEN", "STATUS", "PATH", "REASON", "REQUEST ID")]
    rows += [
        (_time(turn["at"]), str(turn["status"]), turn["path"], turn["reason"] or "-", turn["request_id"])
        for turn in turns
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[4]}\n" for row in rows
    )


def template_lines(template: Mapping[str, Any] | None) -> list[str]:
    """What the probe of the chat template found."""
    if template is None:
        return ["not looked at (yet)"]
    if template["appendOnly"] is None:
        return ["not known: the engine does not tell token ids"]
    cases = ", ".join(f"{case['case']}: {_words(case['verdict'])}" for case in template["cases"])
    return [("append-only" if template["appendOnly"] else "NOT append-only") + f" ({cases})"]


def _aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    shown, last = [], ""
    for name, text in lines:
        shown.append(f"{'' if name == last else name:<{_NAMES}}{text}")
        last = name
    return shown


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _ending(turn: Mapping[str, Any]) -> str:
    status = "the client left" if turn["status"] == 499 else f"status {turn['status']}"
    broken = ", cut off" if turn["broken"] else ""
    return f"{status}{', streamed' if turn['streamed'] else ''}{broken}"


def _path(turn: Mapping[str, Any], why: str) -> str:
    reason = f" ({turn['reason']})" if turn["reason"] else ""
    return f"{turn['path']}{reason}: {why}" if why else f"{turn['path']}{reason}"


def _choice(expected: Mapping[str, float]) -> list[tuple[str, str]]:
    """What each path was expected to cost, where there was a choice."""
    if not expected:
        return []
    return [("Expected", ", ".join(f"{path} {milliseconds(cost)}" for path, cost in expected.items()))]


def _tokens(tokens: Mapping[str, Any]) -> str:
    def said(value: int | None) -> str:
        return "?" if value is None else f"{value:,}"

    covered = "" if tokens["retained"] is None else f" of {tokens['retained']:,} that the handle covers"
    return (
        f"prompt {said(tokens['prompt'])}, reusable {said(tokens['reusable'])}{covered}, "
        f"reused {said(tokens['reused'])}, computed {said(tokens['computed'])}"
    )


def _times(turn: Mapping[str, Any]) -> str:
    return f"first byte {milliseconds(turn['ttft_seconds'])}, whole {milliseconds(turn['seconds'])}"


def milliseconds(seconds: float | None) -> str:
    """A duration for people."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1000:,.1f} ms"


def _leg(leg: Mapping[str, Any]) -> str:
    began, took = milliseconds(leg["began"]), milliseconds(leg["seconds"])
    return f"{leg['leg']:<9}{leg['engine']:<24}after {began}, for {took}: {leg['outcome']}"


def _before(before: Mapping[str, Any] | None) -> str:
    if before is None:
        return "no turn of this conversation is among the recent ones of this router"
    left = f"left no handle: {before['no_handle']}" if before["no_handle"] else "left a handle"
    return f"{before['request_id']}, {before['seconds_before']:,.1f} s earlier, {before['path']}, {left}"


def _history(history: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> list[str]:
    if history is None:
        return ["not known: the request was not played"]
    count = "a prompt without messages" if history["messages"] is None else f"{history['messages']} messages"
    if before is None:
        return [count]
    if history["equal_messages"] is not None:
        count += f", of which the first {history['equal_messages']} are those of the turn before"
    if not history["changes"]:
        return [f"{count}; nothing was changed"]
    return [count, *map(_change, history["changes"])]


def _change(change: Mapping[str, Any]) -> str:
    where = f"message {change['message']}" if change["message"] else "before the messages"
    if change["how"] in ("prompt_changed", "rendered_otherwise"):
        where = "the prompt"
    role = f" ({change['role']})" if change["role"] else ""
    return f"{where}{role}: {_words(change['how'])}: {change['detail']}"


def _words(name: str) -> str:
    return name.replace("_", " ")
