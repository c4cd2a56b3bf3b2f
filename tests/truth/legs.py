"""Legs sent straight to engines: as by a router that carries handles and compares nothing, and by one that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvloop_connector.handle import COLD_PREFILL_PARAMS, KVHandle
from kvloop_connector.proof import FIELD
from kvloop_connector.verdict import REUSE_FIELD
from tests.harness.engines import SERVED_MODEL, Engine
from tests.truth.judge import OK
from tests.truth.turns import Ask, Forgery

CHAT = "/v1/chat/completions"
PARAMS = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. text: of the answer, streamed or not; empty where there is none."""

    status: int
    text: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def params(self) -> Mapping[str, Any] | None:
        """The parameters that an engine returned."""
        found = self.body.get(PARAMS)
        return found if isinstance(found, Mapping) and found else None


@dataclass(frozen=True, slots=True)
class Turned:
    """Both legs of a turn. handle: what decode retained. said: what prefill said of the handle that it was given."""

    status: int
    text: str
    handle: Mapping[str, Any] | None
    said: str = ""


async def post(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Reply:
    """The answer to a chat request, read to its end."""
    sent = {"model": SERVED_MODEL, **body}
    async with session.post(url + CHAT, json=sent, headers=dict(headers or {})) as answer:
        raw = await answer.text()
        return reply(answer.status, raw, answer.headers)


def reply(status: int, raw: str, headers: Mapping[str, str]) -> Reply:
    """An answer from its bytes: a body, or the events of a stream."""
    if status != OK:
        return Reply(status, "", headers, {})
    if not raw.startswith("data:"):
        body = json.loads(raw)
        return Reply(status, body["choices"][0]["message"]["content"] or "", headers, body)
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    if any("error" in event for event in events):
        return Reply(int(events[-1].get("error", {}).get("code", 500)), "", headers, {})
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return Reply(status, "".join(delta.get("content") or "" for delta in deltas), headers, {})


async def turn(
    session: aiohttp.ClientSession,
    prefill: Engine,
    decode: Engine,
    body: Mapping[str, Any],
    params: Mapping[str, Any] = COLD_PREFILL_PARAMS,
) -> Turned:
    """Both legs; ``params``: those of the prefill leg, as they are."""
    first = await post(session, prefill.url, {**body, "max_tokens": 1, PARAMS: dict(params)})
    if first.status != OK or first.params is None:
        return Turned(first.status, "", None)
    said = first.params.get(REUSE_FIELD, {})
    second = await post(session, decode.url, {**body, PARAMS: dict(first.params)})
    return Turned(second.status, second.text, second.params, said.get("outcome", ""))


async def release(session: aiohttp.ClientSession, prefill: Engine, params: Mapping[str, Any]) -> None:
    """Have decode free what a handle names, whether or not it still retains it."""
    filler = {"messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    await post(session, prefill.url, {**filler, PARAMS: dict(KVHandle.parse(params).released().params)})


def forged(params: Mapping[str, Any], forgery: Forgery) -> dict[str, Any]:
    """A handle of which something was changed on the way."""
    match forgery:
        case Forgery.BLOCKS:
            return {**params, "remote_block_ids": [list(reversed(group)) for group in params["remote_block_ids"]]}
        case Forgery.NO_PROOF:
            return {name: value for name, value in params.items() if name != FIELD}
        case Forgery.FOREIGN_KEY:
            proof = params.get(FIELD)
            return {**params, FIELD: {**proof, "key": "00" * 8}} if isinstance(proof, Mapping) else dict(params)


class NaiveRouter:
    """A router that carries handles by conversation id and compares nothing, as vLLM's example of one for turns does.

    A handle has one use, a prefill leg that fails is sent once more, cold; engines take turns, but for the decode
    engine that has the conversation.
    """

    def __init__(self, session: aiohttp.ClientSession, prefills: Sequence[Engine], decodes: Sequence[Engine]) -> None:
        self._session = session
        self._prefills = prefills
        self._decodes = decodes
        self._turns = 0
        self._kept: dict[str, tuple[Mapping[str, Any], Engine]] = {}

    async def chat(self, ask: Ask, body: Mapping[str, Any]) -> tuple[Turned, Engine, Engine]:
        """A turn, and the engines that it went to."""
        self._turns += 1
        prefill = self._prefills[self._turns % len(self._prefills)]
        params, decode = self._kept.pop(
            ask.conversation, (COLD_PREFILL_PARAMS, self._decodes[self._turns // 2 % len(self._decodes)])
        )
        turned = await turn(self._session, prefill, decode, body, params)
        if turned.status != OK and params is not COLD_PREFILL_PARAMS:
            turned = await turn(self._session, prefill, decode, body)
        if turned.handle is not None:
            superseded, self._kept[ask.conversation] = self._kept.get(ask.conversation), (turned.handle, decode)
            if superseded is not None:
                await release(self._session, prefill, superseded[0])
        return turned, prefill, decode

    async def close(self) -> None:
        """Release what it carries."""
        kept, self._kept = self._kept, {}
        for params, _ in kept.values():
            await release(self._session, self._prefills[0], params)
