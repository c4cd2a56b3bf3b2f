"""What a simulated engine answers that reuses nothing, worked out from the prompt alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvloop_sim import generation, tokenizer
from kvloop_sim.answers import Detokenizer
from kvloop_sim.options import Options
from kvloop_sim.protocol import GenerationRequest, parse_generation
from kvloop_sim.records import Step


@dataclass(frozen=True, slots=True)
class Cold:
    """prompt: token ids, as the engine has them. answers: ids and text of each.

    retained: whether the engine itself ended it, and so retains its blocks; whoever stops at a string aborts it.
    """

    prompt: Sequence[int]
    answers: tuple[tuple[Sequence[int], str], ...]
    retained: bool

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(text for _, text in self.answers)


def cold(body: Mapping[str, Any], options: Options, *, chat: bool) -> Cold:
    """The answers to a request with one prompt."""
    request = parse_generation(body, options, chat=chat)
    (prompt,) = request.prompts
    values = generation.values_of(prompt, generation.kv_seed(options.model + request.adapter))
    begun = generation.attend(0, values)
    answers = [_answer(request, options, prompt, values[-1], begun, child) for child in range(request.n)]
    return Cold(prompt, tuple((ids, text) for ids, text, _ in answers), all(retained for *_, retained in answers))


def _answer(
    request: GenerationRequest, options: Options, prompt: Sequence[int], last: int, attention: int, child: int
) -> tuple[list[int], str, bool]:
    detokenizer, ids, text = Detokenizer(request), list[int](), ""
    while True:
        may_end = len(ids) >= request.min_tokens and not request.ignore_eos
        token = generation.next_token(
            attention,
            position=len(ids),
            after=ids[-1] if ids else prompt[-1],
            may_end=may_end,
            style=options.engine.style,
            child=child,
        )
        ids.append(token)
        ended = len(ids) > request.min_tokens and token == tokenizer.MESSAGE_END and not request.ignore_eos
        finish = "stop" if ended else "length" if len(ids) >= request.max_tokens[0] else None
        delta = detokenizer.feed(Step(token, finish))
        text += delta.text
        if delta.finish:
            return ids, text, finish is not None
        last = generation.kv_value(last, token)
        attention = generation.attend(attention, [last])
