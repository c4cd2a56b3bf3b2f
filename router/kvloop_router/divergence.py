"""Where a history differs from that of the turn before, and how, as far as digests and lengths can tell. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kvloop_router.history import PROMPT_CHARACTERS, PROMPT_TOKEN_IDS, common_messages
from kvloop_router.outline import Message, Outline, shared

_FEWEST_SHARED = 2


class How(StrEnum):
    """What was done to a history."""

    REASONING_STRIPPED = "reasoning_stripped"
    REASONING_CHANGED = "reasoning_changed"
    TOOL_CALLS_CHANGED = "tool_calls_changed"
    EDITED = "edited"
    COMPACTED = "compacted"
    REMOVED = "removed"
    INSERTED = "inserted"
    REORDERED = "reordered"
    SHORTENED = "shortened"
    ANSWER_CHANGED = "answer_changed"
    ANSWER_MISSING = "answer_missing"
    RENDERED_OTHERWISE = "rendered_otherwise"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_ARGUMENTS_CHANGED = "template_arguments_changed"
    PROMPT_CHANGED = "prompt_changed"


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that was done. message: which it begins at, the first is 1; 0: before all of them. role: of that
    message, as the new history has it; empty where there is none."""

    how: How
    message: int
    role: str
    detail: str

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of the tokens, where it is known.

    prompt_before: of the turn before. retained: what its handle covered. proven: how many of these the new prompt
    begins with, in whole blocks of ``block``.
    """

    prompt_before: int | None = None
    retained: int | None = None
    proven: int | None = None
    block: int = 16


def same_conversation(before: Outline, new: Outline) -> int:
    """How surely both are of one conversation: 0 for not at all, else the more the surer."""
    if before.scope != new.scope or (
        before.conversation and new.conversation and before.conversation != new.conversation
    ):
        return 0
    if before.conversation and before.conversation == new.conversation:
        return 2**31
    common = common_messages(before.trail, new.trail)
    if common > before.trail.shared:
        return 2**16 + common
    alike = shared(before.messages, new.messages)
    return alike if alike >= _FEWEST_SHARED else 0


def equal_messages(before: Outline, new: Outline) -> int:
    """How many leading messages are the same."""
    return common_messages(before.trail, new.trail)


def changes(before: Outline, new: Outline, tokens: Tokens, *, reasoned: bool | None) -> list[Change]:
    """What differs, in the order in which a prompt has it. ``reasoned``: whether the answer in between had reasoning;
    None: not known.
    """
    found: list[Change] = []
    if before.tools != new.tools:
        found.append(Change(How.TOOLS_CHANGED, 0, "", "tools are rendered in front of all messages"))
    if before.arguments != new.arguments:
        found.append(Change(How.TEMPLATE_ARGUMENTS_CHANGED, 0, "", "such as chat_template_kwargs or reasoning_effort"))
    if not before.packed or not new.packed:
        found += _of_prompt(before, new)
        return found
    old, now = before.messages, new.messages
    # With another setting the trails have nothing in common.
    equal = equal_messages(before, new) if not found else _leading(old, now)
    if equal < len(old):
        found.append(_in_history(old, now, equal))
    elif not found:
        found += _after_history(old, now, tokens, reasoned)
    return found


def _leading(old: Sequence[Message], new: Sequence[Message]) -> int:
    return next(
        (at for at, (was, now) in enumerate(zip(old, new, strict=False)) if was != now), min(len(old), len(new))
    )


def _of_prompt(before: Outline, new: Outline) -> list[Change]:
    pieces = equal_messages(before, new)
    if pieces == len(before.trail):
        return []
    start = pieces * PROMPT_CHARACTERS
    detail = f"from character {start} on, or from token {pieces * PROMPT_TOKEN_IDS} of a prompt of token ids"
    return [Change(How.PROMPT_CHANGED, 0, "", detail)]


def _in_history(old: Sequence[Message], new: Sequence[Message], at: int) -> Change:
    """The first message that differs: ``old`` has it, ``new`` may end before it."""
    if at == len(new):
        return Change(
            How.SHORTENED, at + 1, "", f"{len(old) - at} messages at its end are gone: a fork, or an answer anew"
        )
    was, now = old[at], new[at]
    if (was.role, was.content) == (now.role, now.content):
        how, detail = _in_message(was, now)
    else:
        how, detail = _from_message(old[at:], new[at:])
    return Change(how, at + 1, now.role, detail)


def _in_message(was: Message, now: Message) -> tuple[How, str]:
    if was.reasoning != now.reasoning:
        if now.reasons:
            return How.REASONING_CHANGED, "its reasoning is another; its text is the same"
        return How.REASONING_STRIPPED, "its reasoning is gone; its text is the same"
    if was.calls != now.calls:
        return How.TOOL_CALLS_CHANGED, "its tool calls are others; its text is the same"
    return How.EDITED, "its other fields, or the middle of a long text"


def _from_message(old: Sequence[Message], new: Sequence[Message]) -> tuple[How, str]:
    """How ``new`` came from ``old``, whose first messages differ."""
    before, after = [_key(message) for message in old], [_key(message) for message in new]
    if not Counter(before) - Counter(after):
        moved = after.index(before[0])
        if after[moved : moved + len(before)] == before:
            return How.INSERTED, f"{moved} messages are new here"
        return How.REORDERED, "the same messages in another order"
    if after[0] in before:
        return How.REMOVED, f"{before.index(after[0])} messages that stood here are gone"
    if after[1:] and after[1] in before[2:]:
        return How.COMPACTED, f"{before.index(after[1])} messages became one of {new[0].length} characters"
    if 1 < len(new) < len(old):
        return How.COMPACTED, f"{len(old)} messages became {len(new)}"
    detail = _lengths(old[0], new[0])
    if len(new) < len(old):
        detail += f"; {len(old) - 1} messages after it are gone"
    return How.EDITED, detail


def _after_history(
    old: Sequence[Message], new: Sequence[Message], tokens: Tokens, reasoned: bool | None
) -> list[Change]:
    """All messages of ``old`` are there; what came after them, the answer first, is judged by its tokens."""
    at = len(old)
    if tokens.proven is not None and tokens.prompt_before is not None:
        within_prompt = tokens.proven + tokens.block < tokens.prompt_before
        if within_prompt and tokens.proven:
            detail = f"after {tokens.proven} tokens: the chat template renders earlier messages otherwise than before"
            return [Change(How.RENDERED_OTHERWISE, 0, "", detail)]
    if at == len(new):
        return []
    answer = new[at]
    if answer.role != "assistant":
        return [Change(How.ANSWER_MISSING, at + 1, answer.role, "the answer before it is not in the history")]
    if reasoned and not answer.reasons:
        return [Change(How.REASONING_STRIPPED, at + 1, answer.role, "the answer was given with reasoning")]
    if tokens.proven is None or tokens.retained is None or tokens.proven + tokens.block >= tokens.retained:
        return []
    detail = "it, or what the chat template makes of it, is not what the engine generated"
    return [Change(How.ANSWER_CHANGED, at + 1, answer.role, detail)]


def _key(message: Message) -> tuple[str, bytes, bytes]:
    return message.role, message.content, message.calls


def _lengths(was: Message, now: Message) -> str:
    if was.role != now.role:
        return f"was of {was.role}, {was.length} characters; is of {now.role}, {now.length}"
    return f"{was.length} characters became {now.length}"
