"""Which engines serve a turn: pure functions over a snapshot of them. Chance is an argument.

Power of two on load: of two engines drawn at random the less loaded one. Load is work in tokens: at prefill those that
are to be computed, at decode those that are read for each new one. Prefill and decode always have the same KV revision;
a handle's turn stays at the decode engine that issued it where that still serves, and is not overloaded: elsewhere the
whole prompt's KV has to be moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import NamedTuple

from kvloop_connector.settings import Role
from kvloop_router.errors import Unavailable

SEQUENCE_TOKENS = 512
"""What one more sequence costs a decode step, in tokens of KV that it reads."""
_OVERLOAD_FACTOR = 2.0
_OVERLOAD_TOKENS = 32_768
"""The engine that holds a conversation is overloaded with this much more to do than the factor times another's work."""


class Candidate(NamedTuple):
    """An engine as the policy sees it. A tuple: a turn makes many, and a frozen dataclass takes four times as long.

    process: as in EngineSpec. load: work of this router there now, in tokens, for each of its ranks.
    serving: it gets new turns. healthy: it answers, though it may be draining.
    suspect: its legs have failed; passed over as long as there is another. full: it has as many turns as it may; passed
    over likewise.
    """

    name: str
    role: Role
    process: str
    kv_revision: str
    load: float
    serving: bool
    healthy: bool
    suspect: bool = False
    full: bool = False

    @property
    def sound(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.suspect and not self.full


class Pair(NamedTuple):
    """The engines of one turn, by name, and the KV revision of both."""

    prefill: str
    decode: str
    kv_revision: str


def decode_load(sequences: int, tokens: int) -> float:
    """What a decode step costs, in tokens of KV. tokens: of all sequences together."""
    return float(SEQUENCE_TOKENS * sequences + tokens)


def choose_pair(
    engines: Collection[Candidate],
    random: Random,
    *,
    issuer: str | None = None,
    revision: str | None = None,
    avoid_prefill: Collection[str] = (),
    avoid_decode: Collection[str] = (),
    usable: Callable[[str, str], bool] = lambda prefill, decode: True,
) -> Pair:
    """A prefill and a decode engine of the same KV revision. Raises Unavailable.

    issuer: process of the decode engine that holds the conversation; preferred for the decode leg unless it is
        overloaded, full or suspect, never for prefill.
    revision: only engines of it. avoid_*: names to pass over as long as there is another engine.
    usable: whether a pair of names may be used; pairs that may not are passed over as long as there is another.
    """
    served = [revision] if revision is not None else _revisions(engines, random)
    for candidate in served:
        # Whoever issued a handle ends by an assertion if it is asked to pull it.
        prefills = [engine for engine in _serving(engines, Role.PREFILL, candidate) if engine.process != issuer]
        decodes = _serving(engines, Role.DECODE, candidate)
        if not prefills or not decodes:
            continue
        decode = _at_home(decodes, issuer, avoid_decode, random)
        paired = [engine for engine in prefills if usable(engine.name, decode.name)] or prefills
        return Pair(_two(_spare(paired, avoid_prefill), random).name, decode.name, candidate)
    raise Unavailable(*why_unavailable(engines))


def still_serving(
    pair: Pair,
    engines: Collection[Candidate],
    random: Random,
    *,
    avoid: Collection[str] = (),
    usable: Callable[[str, str], bool] = lambda prefill, decode: True,
) -> Pair:
    """The pair for a decode leg whose prefill leg has ended, which can take minutes.

    What prefill holds may go to any decode engine of its revision: another one, where the chosen one has stopped taking
    turns; the chosen one, where there is none. avoid, usable: as for choose_pair.
    """
    decodes = _serving(engines, Role.DECODE, pair.kv_revision)
    if any(engine.name == pair.decode for engine in decodes):
        return pair
    others = [engine for engine in decodes if engine.name not in avoid and usable(pair.prefill, engine.name)]
    return pair._replace(decode=_two(others, random).name) if others else pair


def choose_releaser(
    engines: Collection[Candidate], random: Random, revision: str, *, usable: Callable[[str], bool]
) -> str:
    """The name of a prefill engine that can release a handle of ``revision``. Raises Unavailable.

    usable: whether an engine of that name is thought to reach the handle's issuer; others are passed over as long as
    there is one. One that drains is asked where there is no other: a release is no turn, and it is what the issuer's
    own draining waits for.
    """
    able = [
        engine
        for engine in engines
        if engine.role is Role.PREFILL and engine.healthy and engine.kv_revision == revision
    ]
    if not able:
        raise Unavailable("no_prefill", "No prefill engine of the revision that holds the blocks is healthy.")
    able = [engine for engine in able if usable(engine.name)] or able
    return _two([engine for engine in able if engine.serving] or able, random).name


def choose_one(engines: Collection[Candidate], random: Random, role: Role, avoid: Collection[str] = ()) -> str:
    """The name of an engine of ``role``. Raises Unavailable."""
    serving = [engine for engine in engines if engine.role is role and engine.serving]
    if not serving:
        raise Unavailable(*why_unavailable(engines))
    return _two(_spare(serving, avoid), random).name


def has_pair(engines: Collection[Candidate]) -> bool:
    """Whether some KV revision has a serving engine of each role."""
    return any(_serving(engines, Role.PREFILL, engine.kv_revision) for engine in engines if _decodes(engine))


def why_unavailable(engines: Collection[Candidate]) -> tuple[str, str]:
    """A reason and a message for why there is no pair."""
    for role in (Role.PREFILL, Role.DECODE):
        of_role = [engine for engine in engines if engine.role is role]
        if not of_role:
            return f"no_{role}", f"There is no {role} engine."
        if not any(engine.serving for engine in of_role):
            return f"{role}_unhealthy", f"No {role} engine takes turns: each is unhealthy, not ready or draining."
    return "no_common_revision", "No prefill and decode engine have the same KV revision."


def _decodes(engine: Candidate) -> bool:
    return engine.role is Role.DECODE and engine.serving


def _serving(engines: Collection[Candidate], role: Role, revision: str) -> list[Candidate]:
    return [engine for engine in engines if engine.role is role and engine.serving and engine.kv_revision == revision]


def _revisions(engines: Collection[Candidate], random: Random) -> list[str]:
    """Revisions in an order in which each comes first as often as its share of the decode engines."""
    revisions = sorted(engine.kv_revision for engine in engines if _decodes(engine))
    random.shuffle(revisions)
    return list(dict.fromkeys(revisions))


def _at_home(decodes: Sequence[Candidate], issuer: str | None, avoid: Collection[str], random: Random) -> Candidate:
    """The engine that holds the conversation, or another where that is not to be had or not to be waited for."""
    home = [engine for engine in decodes if engine.process == issuer and engine.name not in avoid]
    others = [engine for engine in decodes if engine not in home]
    if not home:
        return _two(_spare(decodes, avoid), random)
    if not others:
        return home[0]
    other = _two(_spare(others, avoid), random)
    overloaded = home[0].load > _OVERLOAD_FACTOR * other.load + _OVERLOAD_TOKENS
    leaves = (overloaded or not home[0].sound) and other.sound and other.name not in avoid
    return other if leaves else home[0]


def _spare(engines: Sequence[Candidate], avoid: Collection[str]) -> Sequence[Candidate]:
    return [engine for engine in engines if engine.name not in avoid] or engines


def _two(engines: Sequence[Candidate], random: Random) -> Candidate:
    engines = (
        [engine for engine in engines if engine.sound]
        or [engine for engine in engines if not engine.full]
        or [engine for engine in engines if not engine.suspect]
        or engines
    )
    drawn = engines if len(engines) < 2 else random.sample(list(engines), 2)
    return min(drawn, key=lambda engine: engine.load)
