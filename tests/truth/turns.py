"""Turns that tempt whoever reuses KV: what clients do to their histories, and what happens to engines and handles.

Pure: a seed, how many turns are wanted and what was answered so far give the next step, always the same. What is drawn
never depends on what an answer says, only on how many there are, so that two arms with the same seed play the same
steps even where one of them answers wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any, Final

SLOTS: Final = 4
"""Conversations that go on side by side."""

LONGEST: Final = 12
"""Messages of a history that is not grown any more."""

ANSWER_TOKENS: Final = 12


class Kind(StrEnum):
    """What a step does, before it asks for an answer."""

    START = "start"
    GROW = "grow"
    EDIT = "edit"
    """A word of an earlier user message is another one."""
    TRUNCATE_HEAD = "truncate-head"
    """The first question and its answer are left out."""
    TRUNCATE_TAIL = "truncate-tail"
    """The last question and its answer are taken back, and something else is asked."""
    COMPACT = "compact"
    """All but the last question and its answer are summed up in a few words."""
    STRIP_REASONING = "strip-reasoning"
    """The first half of the last answer is left out, as clients leave out what a model thought."""
    FORK = "fork"
    """A second conversation goes on from somewhere within this one, under its id or another."""
    REGENERATE = "regenerate"
    """The same request once more."""
    FOREIGN_ID = "foreign-id"
    """The history of this conversation under the id of another."""
    SWAP_TENANT = "swap-tenant"
    """Another tenant goes on under the same id, with the same history or one that is edited."""
    RACE = "race"
    """Two turns of one conversation at the same time."""
    SYSTEM = "system"
    """Another system prompt."""
    TOOLS = "tools"
    """Other tools, which the template puts in front of everything."""
    TEMPLATE = "template"
    """Other arguments for the chat template."""
    SPECIAL = "special"
    """An answer with special tokens that its text does not show; what comes after it is plain growth."""
    EXPIRE = "expire"
    """The handle's time passes first."""
    RESTART = "restart"
    """An engine is ended and started again first."""
    DOUBLE_SPEND = "double-spend"
    """A handle is sent twice to the prefill engine that used it, the second time maybe for another history."""
    FORGED = "forged"
    """A handle of which something was changed is sent to a prefill engine."""


class Forgery(StrEnum):
    """What is changed of a handle. Nothing that would end a stock engine."""

    BLOCKS = "blocks"
    """The order of its blocks."""
    NO_PROOF = "no-proof"
    """It comes as from an engine without KvloopConnector."""
    FOREIGN_KEY = "foreign-key"
    """It comes as from engines with another secret."""


WEIGHTS: Final[Mapping[Kind, int]] = {
    Kind.GROW: 12,
    Kind.START: 2,
    Kind.EDIT: 3,
    Kind.TRUNCATE_HEAD: 2,
    Kind.TRUNCATE_TAIL: 2,
    Kind.COMPACT: 2,
    Kind.STRIP_REASONING: 2,
    Kind.FORK: 2,
    Kind.REGENERATE: 2,
    Kind.FOREIGN_ID: 1,
    Kind.SWAP_TENANT: 2,
    Kind.RACE: 2,
    Kind.SYSTEM: 1,
    Kind.TOOLS: 1,
    Kind.TEMPLATE: 1,
    Kind.SPECIAL: 2,
    Kind.DOUBLE_SPEND: 1,
    Kind.FORGED: 1,
}
"""How often each kind comes in a round. EXPIRE and RESTART, which take seconds, come as often as they are asked for."""

ANSWERS: Final[Mapping[Kind, int]] = {Kind.RACE: 2, Kind.DOUBLE_SPEND: 3, Kind.FORGED: 2}
"""How many answers a step has; one, if it is not named here."""

PAST_ROUTER: Final = frozenset({Kind.DOUBLE_SPEND, Kind.FORGED})
"""Kinds that are sent to engines, past any router: as a router that is wrong would."""

_SHORTENING: Final = frozenset({Kind.START, Kind.TRUNCATE_HEAD, Kind.TRUNCATE_TAIL, Kind.COMPACT, Kind.REGENERATE})
_OF_TWO_EXCHANGES: Final = frozenset({Kind.TRUNCATE_HEAD, Kind.TRUNCATE_TAIL, Kind.COMPACT})

_SYSTEM: Final = (
    "You keep the log of a harbour and answer in one line.",
    "You are a gardener who explains what grows where, and why it does.",
    "Read what is written, think about it, and say what follows from it.",
)
_WORDS: Final = (  # noqa: SIM905  one a line reads worse
    "the a of and to in is it on by for with from this that one two three old new small long over under after before "
    "river bridge stone garden market window letter engine ticket harbour winter morning paper yellow quiet heavy "
    "carry follow answer measure remember describe compare explain collect return"
).split()
_TOOLS: Final = ("weather", "calendar", "search")
_NOTES: Final = ("Monday, the first.", "Tuesday, the second.", "Wednesday, the third.")

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation as its client has it.

    name: its id. told: whether the client tells the router that id.
    messages: the history; after an answer it ends with that.
    tools: how many of the tools are offered. arguments: for the chat template.
    """

    name: str
    told: bool
    messages: tuple[Message, ...]
    tenant: int = 0
    tools: int = 0
    arguments: tuple[tuple[str, Any], ...] = ()

    def asked(self, text: str) -> Talk:
        """With one more user message."""
        return replace(self, messages=(*self.messages, {"role": "user", "content": text}))

    def answered(self, text: str) -> Talk:
        """With the answer to its last message."""
        return replace(self, messages=(*self.messages, {"role": "assistant", "content": text}))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    talk: its last message is the question. conversation: the id under which it is sent.
    special: whether the answer is to hold special tokens.
    """

    talk: Talk
    conversation: str
    stream: bool = False
    special: bool = False

    @property
    def told(self) -> bool:
        """Whether the router is told the id."""
        return self.talk.told or self.conversation != self.talk.name

    def body(self) -> dict[str, Any]:
        """The fields of the chat request, but for the model and what belongs to a router."""
        talk = self.talk
        fields: dict[str, Any] = {
            "messages": [dict(message) for message in talk.messages],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if talk.tools:
            # Without "none" vLLM asks for a parser of tool calls; with it, the template still gets the tools.
            fields |= {"tools": [_tool(name) for name in _TOOLS[: talk.tools]], "tool_choice": "none"}
        if talk.arguments:
            fields["chat_template_kwargs"] = dict(talk.arguments)
        return fields


@dataclass(frozen=True, slots=True)
class Step:
    """What is done next.

    slot: the conversation that goes on with the answer to the last of ``asks``; None: none does.
    about: the slot whose handle or history it is about.
    asks: in the order in which they are sent; at the same time in a RACE.
    choice: a number by which whoever plays picks engines.
    """

    number: int
    kind: Kind
    slot: int | None
    about: int
    asks: tuple[Ask, ...]
    choice: int = 0
    forgery: Forgery | None = None

    @property
    def direct(self) -> bool:
        """Whether it is sent past the router."""
        return self.kind in PAST_ROUTER


Talks = Mapping[int, Talk]


def deal(seed: int, turns: int, *, expiries: int = 0, restarts: int = 0, past_router: bool = True) -> tuple[Kind, ...]:
    """Kinds for so many answers, shuffled: some conversations, one of each kind, then rounds of ``WEIGHTS``.

    past_router: whether there are steps that go past the router.
    """
    weights = {kind: weight for kind, weight in WEIGHTS.items() if past_router or kind not in PAST_ROUTER}
    chance = Random(f"deal {seed}")
    left = turns - expiries - restarts
    kinds = [Kind.START] * min(3, max(left, 0))
    left -= len(kinds)
    round_ = list(weights)
    while left > 0:
        chance.shuffle(round_)
        for kind in round_:
            if answers(kind) <= left:
                kinds.append(kind)
                left -= answers(kind)
        round_ = [kind for kind, weight in weights.items() for _ in range(weight)]
    for kind, count in ((Kind.EXPIRE, expiries), (Kind.RESTART, restarts)):
        for index in range(count):
            # Spread over the turns, and never before there is something that could be lost.
            kinds.insert(max(min(6, len(kinds)), len(kinds) * (index + 1) // (count + 1)), kind)
    return tuple(kinds)


def answers(kind: Kind) -> int:
    """How many answers a step of this kind has."""
    return ANSWERS.get(kind, 1)


def draw(seed: int, number: int, kinds: Sequence[Kind], talks: Talks) -> tuple[Step, tuple[Kind, ...]]:
    """The next step, and the kinds that are left: of ``kinds`` the first that some conversation is fit for.

    Where none is, one that makes some fit: a new conversation, or growth.
    """
    chance = Random(f"draw {seed} {number}")
    for index, kind in enumerate(kinds):
        fit = _fit(kind, talks)
        if fit:
            return _step(chance, seed, number, kind, fit, talks), (*kinds[:index], *kinds[index + 1 :])
    kind = Kind.GROW if _fit(Kind.GROW, talks) else Kind.START
    return _step(chance, seed, number, kind, _fit(kind, talks), talks), tuple(kinds)


def follow(step: Step, talks: Talks, texts: Sequence[str]) -> dict[int, Talk]:
    """The conversations after the answers to a step."""
    if step.slot is None:
        return dict(talks)
    return {**talks, step.slot: step.asks[-1].talk.answered(texts[-1])}


def _fit(kind: Kind, talks: Talks) -> list[int]:
    """The slots of conversations that a step of this kind can be about."""
    if kind is Kind.START:
        empty = [slot for slot in range(SLOTS) if slot not in talks]
        return empty[:1] or [_longest(talks, ())]
    least = 5 if kind in _OF_TWO_EXCHANGES else 3
    most = LONGEST if kind not in _SHORTENING else 2 * LONGEST
    fit = [slot for slot, talk in sorted(talks.items()) if least <= len(talk.messages) <= most]
    if kind is Kind.FOREIGN_ID and len(talks) < 2:
        return []
    return fit


def _longest(talks: Talks, others: Sequence[int]) -> int:
    return max((slot for slot in talks if slot not in others), key=lambda slot: (len(talks[slot].messages), -slot))


def _step(chance: Random, seed: int, number: int, kind: Kind, fit: Sequence[int], talks: Talks) -> Step:
    slot = chance.choice(fit)
    stream = chance.random() < 0.5
    choice = chance.randrange(2**16)
    if kind is Kind.START:
        talk = _begun(chance, f"talk-{seed}-{number}")
        return Step(number, kind, slot, slot, (Ask(talk, talk.name, stream),), choice)
    talk = talks[slot]
    if kind is Kind.FORK:
        forked, name = _forked(chance, talk, f"talk-{seed}-{number}")
        into = next((each for each in range(SLOTS) if each not in talks), None)
        target = into if into is not None else _longest(talks, (slot,))
        return Step(number, kind, target, slot, (Ask(forked, name, stream),), choice)
    if kind is Kind.RACE:
        asks = [Ask(talk.asked(_text(chance, 10, 30)), talk.name, each) for each in (stream, not stream)]
        return Step(number, kind, slot, slot, tuple(asks), choice)
    if kind is Kind.DOUBLE_SPEND:
        second = _edited(chance, talk) if chance.random() < 0.5 else talk
        asked = [_again(talk), talk.asked(_text(chance, 10, 30)), second.asked(_text(chance, 10, 30))]
        return Step(number, kind, None, slot, tuple(Ask(each, talk.name) for each in asked), choice)
    if kind is Kind.FORGED:
        asked = [_again(talk), talk.asked(_text(chance, 10, 30))]
        forgery = chance.choice(list(Forgery))
        return Step(number, kind, None, slot, tuple(Ask(each, talk.name) for each in asked), choice, forgery)
    name = talk.name
    if kind is Kind.FOREIGN_ID:
        name = talks[chance.choice([other for other in sorted(talks) if other != slot])].name
    changed = _changed(chance, kind, talk)
    return Step(number, kind, slot, slot, (Ask(changed, name, stream, special=kind is Kind.SPECIAL),), choice)


def _changed(chance: Random, kind: Kind, talk: Talk) -> Talk:
    """The conversation with its next question, after what this kind does to it."""
    system, *said = talk.messages
    question = _text(chance, 10, 30)
    match kind:
        case Kind.REGENERATE:
            return _again(talk)
        case Kind.EDIT:
            return _edited(chance, talk).asked(question)
        case Kind.TRUNCATE_HEAD:
            return replace(talk, messages=(system, *said[2:])).asked(question)
        case Kind.TRUNCATE_TAIL:
            return replace(talk, messages=(system, *said[:-2])).asked(question)
        case Kind.COMPACT:
            summary = [
                {"role": "user", "content": f"What was said before, in short: {_text(chance, 12, 20)}"},
                {"role": "assistant", "content": " Understood."},
            ]
            return replace(talk, messages=(system, *summary, *said[-2:])).asked(question)
        case Kind.STRIP_REASONING:
            words = said[-1]["content"].split(" ")
            stripped = {**said[-1], "content": " " + " ".join(words[(len(words) + 1) // 2 :])}
            return replace(talk, messages=(system, *said[:-1], stripped)).asked(question)
        case Kind.SWAP_TENANT:
            history = _edited(chance, talk) if chance.random() < 0.5 else talk
            return replace(history, tenant=1 - talk.tenant).asked(question)
        case Kind.SYSTEM:
            others = [text for text in _SYSTEM if text != system["content"]]
            return replace(talk, messages=({**system, "content": chance.choice(others)}, *said)).asked(question)
        case Kind.TOOLS:
            counts = [count for count in range(len(_TOOLS) + 1) if count != talk.tools]
            return replace(talk, tools=chance.choice(counts)).asked(question)
        case Kind.TEMPLATE:
            choices = [(), *((("note", note),) for note in _NOTES), (("enable_thinking", False),)]
            arguments = chance.choice([each for each in choices if each != talk.arguments])
            return replace(talk, arguments=arguments).asked(question)
        case _:
            return talk.asked(question)


def _begun(chance: Random, name: str) -> Talk:
    system = {"role": "system", "content": chance.choice(_SYSTEM)}
    return Talk(name, told=chance.random() < 0.6, messages=(system,)).asked(_text(chance, 60, 110))


def _again(talk: Talk) -> Talk:
    return replace(talk, messages=talk.messages[:-1])


def _edited(chance: Random, talk: Talk) -> Talk:
    questions = [index for index, message in enumerate(talk.messages) if message["role"] == "user"]
    index = chance.choice(questions)
    words = talk.messages[index]["content"].split(" ")
    place = chance.randrange(len(words))
    words[place] = chance.choice([word for word in _WORDS if word != words[place]])
    edited = {**talk.messages[index], "content": " ".join(words)}
    return replace(talk, messages=(*talk.messages[:index], edited, *talk.messages[index + 1 :]))


def _forked(chance: Random, talk: Talk, fresh: str) -> tuple[Talk, str]:
    """A conversation that goes on from some answer of ``talk``, and its id: the same or a fresh one."""
    ends = [index for index, message in enumerate(talk.messages) if message["role"] == "assistant"]
    name = talk.name if chance.random() < 0.5 else fresh
    messages = talk.messages[: chance.choice(ends) + 1]
    return replace(talk, name=name, messages=messages).asked(_text(chance, 10, 30)), name


def _text(chance: Random, least: int, most: int) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.randint(least, most)))


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"about": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": f"Look up {name}.", "parameters": parameters}}
