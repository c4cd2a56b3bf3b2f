"""Why a turn went as it did, from the reports of the recent turns. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvloop_router import divergence
from kvloop_router.divergence import Tokens
from kvloop_router.turn_log import TurnReport

_BLOCK = 16
_COMPARED = ("", "diverged", "below_threshold")
"""Reasons that leave it known how many tokens were equal."""

WHY = {
    "miss": "no handle is known for this history: a first turn, or one whose earlier turns nobody remembers",
    "no_handle": "the turn before left no handle",
    "expired": "the handle was older than router.handleTtlSeconds",
    "diverged": "the history was changed within its first block: nothing is equal",
    "below_threshold": "what is equal, or not in prefill's own cache, is less than kvRecomputeThreshold",
    "taken": "another turn of this conversation has the handle; a handle is used once",
    "engine_gone": "the decode engine that held the blocks is gone, or is another process",
    "evicted": "the handle was pushed out or released",
    "pair_failed": "the engines that the handle could go between are known to fail, or to reuse wrong KV",
    "no_pair": "no prefill or no decode engine of the KV revision of its blocks takes turns",
    "engine_failed": "an engine failed; the turn was played again, cold",
    "template": "the engines' /tokenize renders such a request otherwise than their chat API, or that is not known yet",
    "api": "a request of this kind leaves no handle that could be proven",
    "no_token_ids": "the engines do not tell the prompt's token ids",
    "cheaper": "another path was expected to be faster, or is set",
    "store_unavailable": "the shared handle store was away, slow or full",
    "off": "reuse is switched off",
    "no_verdict": "the prefill engine said nothing of the handle: it does not run KvloopConnector",
    "spent": "the prefill engine has used this handle before",
    "forged": "something in the handle was changed on the way",
    "foreign_engine": "the handle was sealed with another key: the engines do not share the resource's Secret",
    "unproven": "the handle came without a proof: its issuer runs the stock connector",
    "other_revision": "the engines cannot exchange KV: another KV revision",
    "other_hash": "the engines cannot exchange KV: other block hashes",
    "own_engine": "the handle was sent to the engine that issued it",
    "malformed": "the handle was not whole",
}
"""Every reason for which a turn is not warm."""


def explain(turn: TurnReport, recent: Iterable[TurnReport], *, block_size: int | None) -> dict[str, Any]:
    """All that is known of a turn. ``recent``: the turns of this router, the last one first."""
    before = _before(turn, recent)
    return {
        "turn": turn.told(),
        "why": _why(turn),
        "tokens": {
            "prompt": turn.prompt_tokens,
            "retained": turn.retained_tokens,
            "reusable": turn.proven_tokens,
            "reused": turn.reused_tokens,
            "computed": None if turn.prompt_tokens is None else max(0, turn.prompt_tokens - turn.reused_tokens),
        },
        "before": None if before is None else _told_before(turn, before),
        "history": _history(turn, before, block_size or _BLOCK),
    }


def listed(turn: TurnReport) -> dict[str, Any]:
    """A turn in a list of turns."""
    told = turn.told()
    return {name: told[name] for name in ("request_id", "at", "api", "model", "path", "reason", "status")}


def _why(turn: TurnReport) -> str:
    if turn.path == "warm":
        return "the handle of the turn before was used"
    if turn.path == "local":
        return "the decode engine computed what it did not have itself"
    if not turn.reason:
        return "it ended before a path was chosen" if turn.status >= 400 else ""
    return WHY.get(turn.reason, turn.reason)


def _before(turn: TurnReport, recent: Iterable[TurnReport]) -> TurnReport | None:
    """The turn of the same conversation that came before: the surest one, and of these the last."""
    if turn.outline is None:
        return None
    best, surest, passed = None, 0, False
    for other in recent:
        if other is turn:
            passed = True
        elif passed and other.outline is not None:
            sure = divergence.same_conversation(other.outline, turn.outline)
            if sure > surest:
                best, surest = other, sure
    return best


def _told_before(turn: TurnReport, before: TurnReport) -> dict[str, Any]:
    return {
        "request_id": before.request_id,
        "seconds_before": round(turn.at - before.at, 3),
        "path": before.path,
        "no_handle": before.no_handle,
        "prompt_tokens": before.prompt_tokens,
    }


def _history(turn: TurnReport, before: TurnReport | None, block: int) -> dict[str, Any] | None:
    new = turn.outline
    if new is None:
        return None
    told: dict[str, Any] = {"messages": len(new.messages) or None, "equal_messages": None, "changes": None}
    if before is None or before.outline is None:
        return told
    known = turn.retained_tokens is not None and turn.reason in _COMPARED
    tokens = Tokens(
        prompt_before=before.prompt_tokens,
        retained=turn.retained_tokens,
        proven=turn.proven_tokens if known else None,
        block=block,
    )
    found = divergence.changes(before.outline, new, tokens, reasoned=before.reasoned)
    if new.messages:
        told["equal_messages"] = divergence.equal_messages(before.outline, new)
    told["changes"] = [change.told() for change in found]
    return told
