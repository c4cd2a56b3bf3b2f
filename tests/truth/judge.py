"""What a part of the truth test came to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from tests.truth.turns import Kind

OK: Final = 200
WRONG_KEPT: Final = 20
"""How many wrong answers a tally tells in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer, beside that of the reference.

    text: what the client read; right: what it should have. status: of the answer.
    path, reason, prefill, decode: what the router said, empty where it was not asked. reused: tokens, as it said.
    had: tokens that were proven, and that the prefill engine had itself but for fewer than the threshold, so that it
        pulled nothing. reusable: tokens, by the oracle's word.
    engine_said: what a prefill engine with KvloopConnector said of a handle that was sent past the router.
    """

    seed: int
    number: int
    kind: Kind
    text: str
    right: str
    status: int = OK
    direct: bool = False
    path: str = ""
    reason: str = ""
    reused: int = 0
    had: int = 0
    reusable: int = 0
    prefill: str = ""
    decode: str = ""
    prompt_tokens: int = 0
    engine_said: str = ""

    @property
    def failed(self) -> bool:
        """Whether there was no answer at all: bad, but nobody takes it for one."""
        return self.status != OK

    @property
    def wrong(self) -> bool:
        return not self.failed and self.text != self.right


@dataclass(frozen=True, slots=True, kw_only=True)
class OfKind:
    """Answers of one kind of step."""

    answers: int = 0
    wrong: int = 0
    failed: int = 0
    warm: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Sums over answers.

    turns: all answers. routed: those that came through the router, of which ``warm`` used a handle.
    reused, reusable: tokens of the routed, by the router's word and by the oracle's. had: of these, what the prefill
        engine had itself where it could have pulled it. reusable_unruled: by that of one
    that does not believe what clients say by conversation ids.
    lost: tokens that the oracle would have reused beyond what was, by the router's reason for it ("warm": some were).
    prompt: tokens of their prompts. reads, pulled_bytes: from decode, by the prefill engines' own counters.
    kinds: by kind of step. reasons: by the router's reason why a turn was not warm. verdicts: by what an engine
    said of a handle that was sent past the router. wrongs: the first of the wrong answers, in full.
    """

    turns: int = 0
    wrong: int = 0
    failed: int = 0
    routed: int = 0
    warm: int = 0
    prompt: int = 0
    reused: int = 0
    had: int = 0
    reusable: int = 0
    reusable_unruled: int = 0
    reads: int = 0
    pulled_bytes: int = 0
    seconds: float = 0.0
    kinds: Mapping[str, OfKind] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    verdicts: Mapping[str, int] = field(default_factory=dict)
    wrongs: tuple[Mapping[str, Any], ...] = ()

    @property
    def warm_share(self) -> float:
        """Of the answers that came through the router."""
        return self.warm / self.routed if self.routed else 0.0

    @property
    def reused_share(self) -> float:
        """Of what the oracle could reuse; what the prefill engine had itself did not have to be."""
        return (self.reused + self.had) / self.reusable if self.reusable else 0.0

    def as_json(self) -> dict[str, Any]:
        """All of it, to be read again by `tally_of`."""
        return asdict(self)


def tally_of(told: Mapping[str, Any]) -> Tally:
    """What `Tally.as_json` told."""
    kinds = {kind: OfKind(**sums) for kind, sums in told["kinds"].items()}
    return Tally(**{**told, "kinds": kinds, "wrongs": tuple(told["wrongs"])})


def judge(
    answers: Sequence[Answered],
    *,
    reusable_unruled: int = 0,
    reads: int = 0,
    pulled_bytes: int = 0,
    seconds: float = 0.0,
) -> Tally:
    """The tally of a part."""
    routed = [answer for answer in answers if not answer.direct and not answer.failed]
    wrong = [answer for answer in answers if answer.wrong]
    return Tally(
        turns=len(answers),
        wrong=len(wrong),
        failed=sum(answer.failed for answer in answers),
        routed=len(routed),
        warm=sum(answer.path == "warm" for answer in routed),
        prompt=sum(answer.prompt_tokens for answer in routed),
        reused=sum(answer.reused for answer in routed),
        had=sum(_had(answer) for answer in routed),
        reusable=sum(answer.reusable for answer in routed),
        reusable_unruled=reusable_unruled,
        reads=reads,
        pulled_bytes=pulled_bytes,
        seconds=round(seconds, 1),
        kinds={kind.value: _of_kind(answers, kind) for kind in Kind if any(each.kind is kind for each in answers)},
        reasons=dict(Counter(answer.reason for answer in routed if answer.reason)),
        lost=_lost(routed),
        verdicts=dict(Counter(answer.engine_said for answer in answers if answer.engine_said)),
        wrongs=tuple(asdict(answer) for answer in wrong[:WRONG_KEPT]),
    )


def together(tallies: Sequence[Tally]) -> Tally:
    """The tally of several parts."""
    sums = {
        each.name: sum(getattr(tally, each.name) for tally in tallies)
        for each in fields(Tally)
        if each.name not in ("kinds", "reasons", "lost", "verdicts", "wrongs")
    }
    kinds: dict[str, OfKind] = {}
    for tally in tallies:
        for kind, found in tally.kinds.items():
            before = kinds.get(kind, OfKind())
            kinds[kind] = OfKind(
                **{each.name: getattr(before, each.name) + getattr(found, each.name) for each in fields(OfKind)}
            )
    return Tally(
        **{**sums, "seconds": round(sums["seconds"], 1)},
        kinds={kind.value: kinds[kind.value] for kind in Kind if kind.value in kinds},
        reasons=_counted(tally.reasons for tally in tallies),
        lost=_counted(tally.lost for tally in tallies),
        verdicts=_counted(tally.verdicts for tally in tallies),
        wrongs=tuple(wrong for tally in tallies for wrong in tally.wrongs)[:WRONG_KEPT],
    )


def faults(kvloop: Tally, stock: Tally, *, least_share: float = 0.0) -> list[str]:
    """Why the test has failed, or proves nothing; empty where it passed.

    kvloop: the arm that has to be right. stock: the one that shows that the same turns can go wrong.
    least_share: of what the oracle could reuse.
    """
    found = []
    if kvloop.wrong:
        found.append(f"{kvloop.wrong} of {kvloop.turns} answers are wrong")
    if kvloop.failed:
        found.append(f"{kvloop.failed} of {kvloop.turns} requests got no answer")
    if not kvloop.turns:
        found.append("nothing was asked")
    if not kvloop.pulled_bytes:
        found.append("nothing was pulled from decode, so that nothing could have gone wrong: this proves nothing")
    if not stock.turns:
        found.append("no router that compares nothing was played: whether these turns prove anything is not known")
    elif not stock.wrong:
        found.append("without a proof nothing went wrong either: these turns prove nothing")
    if kvloop.reused_share < least_share:
        found.append(
            f"{kvloop.reused_share:.3f} of what could be reused was, less than {least_share}: "
            "who reuses little is right for little"
        )
    return found


def _of_kind(answers: Sequence[Answered], kind: Kind) -> OfKind:
    mine = [answer for answer in answers if answer.kind is kind]
    return OfKind(
        answers=len(mine),
        wrong=sum(answer.wrong for answer in mine),
        failed=sum(answer.failed for answer in mine),
        warm=sum(answer.path == "warm" for answer in mine),
    )


def _lost(routed: Sequence[Answered]) -> dict[str, int]:
    lost: Counter[str] = Counter()
    for answer in routed:
        if (more := answer.reusable - answer.reused - _had(answer)) > 0:
            lost[answer.reason or answer.path] += more
    return dict(lost)


def _had(answer: Answered) -> int:
    return min(answer.had, answer.reusable)


def _counted(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
