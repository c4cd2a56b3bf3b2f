"""Answers of vLLM's OpenAI-compatible API: what the engine generated, as JSON in vLLM's shape and order of keys."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvloop_sim import tokenizer
from kvloop_sim.protocol import GenerationRequest
from kvloop_sim.records import Step

Likely = tuple[tuple[int, float], ...]
"""Tokens with their log-probabilities, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to a choice. ``matched``: a stop string ended it, so that the engine's request is aborted.

    likely: for each of ``token_ids`` the log-probabilities there.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: str | None = None
    stop_reason: int | str | None = None
    handle: Mapping[str, Any] | None = None
    matched: bool = False
    likely: tuple[Likely, ...] = ()


class Detokenizer:
    """Turns steps into text, and finds stop strings, holding back what may be the start of one."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._held = max((len(text) for text in request.stop), default=1) - 1 if not request.include_stop else 0
        self._text = ""
        self._sent = 0
        self._tokens = 0

    def feed(self, step: Step) -> Delta:
        """The part of the answer that ``step`` adds."""
        request = self._request
        self._tokens += 1
        before = len(self._text)
        skipped = step.finish == "stop" and not request.include_stop
        if not skipped:
            self._text += tokenizer.decode([step.token], skip_control=request.skip_special_tokens)
        finish, reason = step.finish, step.stop_token
        if request.shape is not None:
            text = request.shape.text(self._text) if finish else ""
            ended = request.shape.finish_reason if finish in ("stop", "length") else finish
            return Delta(text, (step.token,), ended, None, step.handle, likely=(step.likely,))
        matched = self._match(before) if self._tokens > request.min_tokens else None
        if matched is not None:
            return Delta(
                self._take(0),
                (step.token,),
                "stop",
                matched,
                step.handle,
                matched=step.finish is None,
                likely=(step.likely,),
            )
        text = self._take(0 if finish else self._held)
        return Delta(text, (step.token,), finish, reason, step.handle, likely=(step.likely,))

    def _take(self, held: int) -> str:
        end = max(self._sent, len(self._text) - held)
        part = self._text[self._sent : end]
        self._sent = end
        return part

    def _match(self, before: int) -> str | None:
        for stop in self._request.stop:
            start = self._text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                self._text = self._text[: start + len(stop) if self._request.include_stop else start]
                return stop
        return None


@dataclass(slots=True)
class Choice:
    """One answer, collected."""

    prompt: Sequence[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None
    handle: Mapping[str, Any] | None = None
    likely: list[Likely] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.likely += delta.likely
        self.finish = delta.finish or self.finish
        self.stop_reason = delta.stop_reason if delta.finish else self.stop_reason
        self.handle = delta.handle or self.handle


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWriter:
    """Writes the answers to one request.

    created: Unix seconds. handles_in_streams: whether finish chunks carry the handle, as from vLLM 0.33 on.
    """

    request: GenerationRequest
    answer_id: str
    created: int
    handles_in_streams: bool
    null_handles: bool

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of an answer that is not streamed. Of several handles only one is given, as vLLM does."""
        request = self.request
        prompts = {id(choice.prompt): len(choice.prompt) for choice in choices}
        counts = usage(sum(prompts.values()), sum(len(choice.token_ids) for choice in choices))
        if request.chat:
            return {
                "id": self.answer_id,
                "object": "chat.completion",
                "created": self.created,
                "model": request.model,
                "choices": [self._message(index, choice) for index, choice in enumerate(choices)],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": counts,
                "prompt_logprobs": None,
                "prompt_token_ids": tokenizer.plain(choices[0].prompt) if request.return_token_ids else None,
                "prompt_text": None,
                "kv_transfer_params": choices[-1].handle,
                "ec_transfer_params": None,
                "metrics": None,
            }
        # The handle of the first prompt, and of its last sample.
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": request.model,
            "choices": [self._completion(index, choice) for index, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": counts,
            "kv_transfer_params": choices[request.n - 1].handle,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def role_chunk(self, index: int, prompt: Sequence[int]) -> dict[str, Any]:
        """The first chunk of a chat stream."""
        chunk = self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None})
        chunk["choices"][0]["finish_reason"] = None
        if self.request.continuous_usage:
            chunk["usage"] = _counts(len(prompt), 0)
        chunk["prompt_token_ids"] = tokenizer.plain(prompt) if self.request.return_token_ids else None
        chunk["prompt_text"] = None
        return chunk

    def delta_chunk(self, index: int, delta: Delta, prompt: Sequence[int], generated: int) -> dict[str, Any]:
        """A chunk with generated text; ``generated``: tokens of this choice so far."""
        request = self.request
        token_ids = list(delta.token_ids) if request.return_token_ids else None
        if request.chat:
            choice: dict[str, Any] = {
                "index": index,
                "delta": self._content(delta.text),
                "logprobs": self._chat_logprobs(delta.token_ids, delta.likely),
                "finish_reason": delta.finish,
            }
            if delta.finish:
                choice["stop_reason"] = delta.stop_reason
            choice["token_ids"] = token_ids
        else:
            first = generated == len(delta.token_ids)
            text = delta.text
            if first and request.echo and not request.return_token_ids:
                text = tokenizer.decode(prompt) + text
            choice = {
                "index": index,
                "text": text,
                "logprobs": self._completion_logprobs(delta.token_ids, delta.likely),
                "finish_reason": delta.finish,
                "stop_reason": delta.stop_reason,
                "prompt_token_ids": tokenizer.plain(prompt) if first and request.return_token_ids else None,
                "token_ids": token_ids,
            }
        chunk = self._chunk(choice)
        if request.continuous_usage:
            chunk["usage"] = _counts(len(prompt), generated)
        if self.null_handles:
            chunk["kv_transfer_params"] = None
        if delta.finish and self.handles_in_streams:
            chunk["kv_transfer_params"] = delta.handle
        return chunk

    def usage_chunk(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        """The last chunk, where usage was asked for."""
        chunk = self._chunk(None)
        chunk["usage"] = _counts(prompt_tokens, completion_tokens)
        return chunk

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "chat.completion.chunk" if self.request.chat else "text_completion",
            "created": self.created,
            "model": self.request.model,
            "choices": [] if choice is None else [choice],
        }

    def _content(self, text: str) -> dict[str, Any]:
        shape = self.request.shape
        if shape is None or shape.tool is None or not text:
            return {"content": text}
        call = self._call(shape.tool, text)
        return {"tool_calls": [{"index": 0, **call}]}

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        call_id = f"chatcmpl-tool-{secrets.token_hex(8)}"
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _message(self, index: int, choice: Choice) -> dict[str, Any]:
        shape = self.request.shape
        calls = [self._call(shape.tool, choice.text)] if shape is not None and shape.tool is not None else []
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "" if calls else choice.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                **({"tool_calls": calls} if calls else {}),
                "reasoning": None,
            },
            "logprobs": self._chat_logprobs(choice.token_ids, choice.likely),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
            "token_ids": list(choice.token_ids) if self.request.return_token_ids else None,
            "routed_experts": None,
        }

    def _completion(self, index: int, choice: Choice) -> dict[str, Any]:
        text = choice.text
        if self.request.echo and not self.request.return_token_ids:
            text = tokenizer.decode(choice.prompt) + text
        return {
            "index": index,
            "text": text,
            "logprobs": self._completion_logprobs(choice.token_ids, choice.likely),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
            "token_ids": list(choice.token_ids) if self.request.return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": tokenizer.plain(choice.prompt) if self.request.return_token_ids else None,
            "routed_experts": None,
        }

    def _chat_logprobs(self, token_ids: Sequence[int], likely: Sequence[Likely]) -> dict[str, Any] | None:
        top = self.request.logprobs
        if top is None:
            return None
        content = []
        for token, there in zip(token_ids, likely, strict=True):
            chosen = self._chat_logprob(token, dict(there)[token])
            others = [self._chat_logprob(*each) for each in _top(token, there, top)]
            content.append({**chosen, "top_logprobs": others[:top]})
        return {"content": content}

    def _chat_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _completion_logprobs(self, token_ids: Sequence[int], likely: Sequence[Likely]) -> dict[str, Any] | None:
        top = self.request.logprobs
        if top is None:
            return None
        tokens = [self._token_text(token) for token in token_ids]
        return {
            "text_offset": [sum(map(len, tokens[:index])) for index in range(len(tokens))],
            "token_logprobs": [dict(there)[token] for token, there in zip(token_ids, likely, strict=True)],
            "tokens": tokens,
            "top_logprobs": [
                {self._token_text(other): logprob for other, logprob in _top(token, there, top)}
                for token, there in zip(token_ids, likely, strict=True)
            ],
        }

    def _token_text(self, token: int) -> str:
        return f"token_id:{token}" if self.request.tokens_as_ids else tokenizer.token_text(token)


def _top(token: int, likely: Likely, count: int) -> list[tuple[int, float]]:
    """The one that was chosen, and the ``count`` likeliest, as vLLM gives them."""
    return list({token: dict(likely)[token], **dict(likely[:count])}.items())


def _counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {name: value for name, value in usage(prompt_tokens, completion_tokens).items() if value is not None}
