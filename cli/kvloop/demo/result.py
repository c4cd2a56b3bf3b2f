"""What was measured, and whether it is what reuse promises. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvloop.demo.arms import Arm

REUSED_SHARE = 0.9
"""How much of what the turn before left (prompt and answer) has to be reused from the second turn on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One turn of one arm. ``path``, ``reason`` and ``reused_tokens`` are the router's word."""

    ttft_seconds: float
    prompt_tokens: int
    answer_tokens: int
    path: str
    reason: str
    reused_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One conversation in both arms, turn by turn."""

    off: tuple[Measured, ...]
    on: tuple[Measured, ...]

    def arm(self, arm: Arm) -> tuple[Measured, ...]:
        return self.on if arm is Arm.ON else self.off


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One turn over all repetitions: medians of the times, and of the reuse the worst.

    left_tokens: prompt and answer of the turn before, which decode retained; 0 in the first turn.
    """

    turn: int
    prompt_tokens: int
    left_tokens: int
    path: str
    reused_tokens: int
    off_seconds: float
    on_seconds: float

    @property
    def ratio(self) -> float:
        """How many times shorter the time is with reuse."""
        return self.off_seconds / self.on_seconds if self.on_seconds else float("inf")


def rows(repetitions: Sequence[Played]) -> list[Row]:
    """One row a turn. ``repetitions`` have equally many turns."""
    result = []
    for index in range(len(repetitions[0].on)):
        worst = min((played for played in repetitions), key=lambda played: played.on[index].reused_tokens)
        measured = worst.on[index]
        before = worst.on[index - 1] if index else None
        others = [p.on[index].path for p in repetitions if p.on[index].path != measured.path]
        result.append(
            Row(
                turn=index + 1,
                prompt_tokens=measured.prompt_tokens,
                left_tokens=before.prompt_tokens + before.answer_tokens if before else 0,
                path=measured.path
                if not others or index == 0
                else next(p for p in (measured.path, *others) if p != "warm"),
                reused_tokens=measured.reused_tokens,
                off_seconds=median(played.off[index].ttft_seconds for played in repetitions),
                on_seconds=median(played.on[index].ttft_seconds for played in repetitions),
            )
        )
    return result


def faults(repetitions: Sequence[Played]) -> list[str]:
    """What did not go as it should, one sentence each; empty where the demonstration holds."""
    found = []
    for number, played in enumerate(repetitions, start=1):
        where = f" of repetition {number}" if len(repetitions) > 1 else ""
        for index, (off, on) in enumerate(zip(played.off, played.on, strict=True)):
            turn = f"turn {index + 1}{where}"
            if off.path != "cold" or off.reused_tokens:
                found.append(f"{turn} with reuse off: path {off.path}, {off.reused_tokens} tokens reused")
            if index == 0:
                continue
            left = played.on[index - 1].prompt_tokens + played.on[index - 1].answer_tokens
            if on.path != "warm":
                found.append(f"{turn} with reuse on: path {on.path} ({on.reason or 'no reason given'}), not warm")
            elif on.reused_tokens < REUSED_SHARE * left:
                share = f"{on.reused_tokens} of {left} tokens"
                found.append(f"{turn} with reuse on: {share} reused, less than {REUSED_SHARE:.0%}")
    return found
