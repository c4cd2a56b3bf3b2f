"""How much an oracle could reuse that knows every handle that is alive. Pure.

It knows what was asked and answered in tokens, when, and on which decode engine; and the rules of the game: a handle
covers its turn's prompt and answer but for the last token, in whole blocks; it has one use, within its own tenant,
until the router's or the engine's time for it is over or its engine process has ended; and a prefix shorter than the
threshold is not worth a read. What a client says by conversation ids is believed, as kvloop's router does: different
ids are different conversations, and an id has one handle, that of its newest answer. The oracle does not know the
future: each turn, in the order in which they were sent, takes the handle that gives it most, the newest of several.

It needs nobody to find a handle: what a router does not find, gives to another or lets go of for any other reason is
what the oracle is ahead of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Seconds and tokens.

    router_ttl: on the router's clock. engine_ttl: by name of the decode engine, less the margin of a read.
    ids_believed: whether conversation ids say what belongs together.
    """

    block_size: int
    threshold: int
    router_ttl: float
    engine_ttl: Mapping[str, float]
    ids_believed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn that went through the router.

    tenant: whose KV it may use. conversation: the id that the router was told, or None.
    prompt, answer: token ids; an empty answer leaves no handle.
    decode, process: the engine that has its blocks, and which of the processes that had this name.
    sent, ended: seconds on the engines' clock. router_sent, router_ended: on the router's.
    """

    tenant: int
    conversation: str | None
    prompt: Sequence[int]
    answer: Sequence[int]
    decode: str
    process: str
    sent: float
    ended: float
    router_sent: float
    router_ended: float


@dataclass(frozen=True, slots=True)
class Gone:
    """An engine process ended, and with it what it held."""

    process: str
    at: float


def reusable(turns: Sequence[Turn], gone: Sequence[Gone], rules: Rules) -> list[int]:
    """How many tokens of each turn's prompt the oracle reuses."""
    ended_at = {each.process: each.at for each in gone}
    superseded_at = [_superseded(turn, turns) if rules.ids_believed else inf for turn in turns]
    alive = set(range(len(turns)))
    most = [0] * len(turns)
    for index in sorted(range(len(turns)), key=lambda each: turns[each].sent):
        turn = turns[index]
        worth = {
            other: tokens
            for other in alive
            if superseded_at[other] > turn.sent
            and _usable(turns[other], turn, ended_at, rules)
            and (tokens := common_blocks(turns[other], turn, rules.block_size)) >= max(1, rules.threshold)
        }
        if worth:
            best = max(worth, key=lambda other: (worth[other], turns[other].ended))
            most[index] = worth[best]
            alive.discard(best)
    return most


def common_blocks(earlier: Turn, turn: Turn, block_size: int) -> int:
    """How many leading tokens of a turn's prompt are those of an earlier turn, in whole blocks."""
    retained = [*earlier.prompt, *earlier.answer][:-1]
    common = 0
    for mine, its in zip(turn.prompt, retained, strict=False):
        if mine != its:
            break
        common += 1
    return common // block_size * block_size


def _usable(earlier: Turn, turn: Turn, ended_at: Mapping[str, float], rules: Rules) -> bool:
    return (
        bool(earlier.answer)
        and earlier.ended <= turn.sent
        and earlier.tenant == turn.tenant
        and not (rules.ids_believed and _differ(earlier.conversation, turn.conversation))
        and ended_at.get(earlier.process, inf) > turn.sent
        and turn.router_sent - earlier.router_ended < rules.router_ttl
        and turn.sent - earlier.ended < rules.engine_ttl[earlier.decode]
    )


def _differ(left: str | None, right: str | None) -> bool:
    return left is not None and right is not None and left != right


def _superseded(turn: Turn, turns: Sequence[Turn]) -> float:
    """When an answer under the same id came after this turn's."""
    later = (
        other.ended
        for other in turns
        if (other.tenant, other.conversation) == (turn.tenant, turn.conversation)
        and other.ended > turn.ended
        and other.answer
    )
    return min(later, default=inf) if turn.conversation is not None else inf
