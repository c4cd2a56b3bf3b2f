"""Plays a conversation through both routers and measures, at the client, the time to the first token."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from kvloop.demo.arms import Arm
from kvloop.demo.result import Measured, Played
from kvloop.demo.script import Message, Script
from kvloop.node.errors import NodeError

_TURN_SECONDS = 600


class TurnFailed(NodeError):
    """A turn was not answered; the message says which and with what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A client of both routers. ``urls`` by arm; ``answer_tokens`` is the length of every answer."""

    session: aiohttp.ClientSession
    urls: Mapping[Arm, str]
    model: str
    answer_tokens: int

    async def play(self, script: Script, *, repetition: int = 0, advance: Callable[[], None] | None = None) -> Played:
        """The whole conversation, each turn in both arms one after the other; which goes first takes turns.

        Each arm has a conversation of its own, alike but for the name that it begins with, so that neither finds the
        other's tokens in a prefix cache. ``advance`` is called after every turn.
        """
        messages = {arm: script.opening(secrets.token_hex(8)) for arm in Arm}
        measured: dict[Arm, list[Measured]] = {arm: [] for arm in Arm}
        for index in range(len(script.outputs)):
            order = list(Arm) if (index + repetition) % 2 == 0 else list(reversed(Arm))
            for arm in order:
                result, answer = await self.turn(arm, messages[arm])
                measured[arm].append(result)
                if index + 1 < len(script.outputs):
                    messages[arm] = script.next_turn(messages[arm], answer, index + 2)
                if advance is not None:
                    advance()
        return Played(off=tuple(measured[Arm.OFF]), on=tuple(measured[Arm.ON]))

    async def turn(self, arm: Arm, messages: list[Message]) -> tuple[Measured, str]:
        """One streamed turn: what was measured, and the answer's text. Raises ``TurnFailed``."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, first = "", 0.0
        usage: dict[str, int] = {}
        began = time.perf_counter()
        try:
            async with self.session.post(
                f"{self.urls[arm]}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=_TURN_SECONDS)
            ) as response:
                if response.status != HTTPStatus.OK:
                    raise TurnFailed(f"reuse {arm}: status {response.status}: {(await response.text())[:300]}")
                async for chunk in _events(response.content):
                    for choice in chunk.get("choices", []):
                        said = choice.get("delta", {}).get("content") or ""
                        if said and not text:
                            first = time.perf_counter()
                        text += said
                    usage = chunk.get("usage") or usage
                headers = response.headers
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TurnFailed(f"reuse {arm}: {type(error).__name__}: {error}") from error
        if not text or not usage:
            raise TurnFailed(f"reuse {arm}: the stream ended without {'usage' if text else 'a token'}")
        result = Measured(
            ttft_seconds=first - began,
            prompt_tokens=usage["prompt_tokens"],
            answer_tokens=usage["completion_tokens"],
            path=headers.get("X-Kvloop-Path", ""),
            reason=headers.get("X-Kvloop-Reason", ""),
            reused_tokens=int(headers.get("X-Kvloop-Reused-Tokens", "0")),
        )
        return result, text


async def characters_per_token(session: aiohttp.ClientSession, engine_url: str, model: str, text: str) -> float:
    """How long the engine's tokens are in ``text``. Raises ``TurnFailed`` where the engine does not say."""
    try:
        async with session.post(f"{engine_url}/tokenize", json={"model": model, "prompt": text}) as response:
            answer = await response.json()
            return len(text) / int(answer["count"])
    except (aiohttp.ClientError, KeyError, ValueError) as error:
        raise TurnFailed(f"{engine_url}/tokenize: {type(error).__name__}: {error}") from error


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event; their lines are what vLLM writes: ``data: {…}``."""
    async for line in stream:
        data = line.removeprefix(b"data: ").strip()
        if line.startswith(b"data: ") and data != b"[DONE]":
            event: dict[str, Any] = json.loads(data)
            yield event
