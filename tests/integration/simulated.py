"""Legs sent to simulated engines, and what only a simulated engine tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvloop_connector.handle import COLD_PREFILL_PARAMS
from kvloop_connector.settings import Role
from tests.harness import client
from tests.harness.client import Reply
from tests.harness.engines import SERVED_MODEL, Engine, EngineSpec

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "tell me, " + "and then, " * 60}]
ANSWER_TOKENS = 12

Messages = Sequence[Mapping[str, Any]]


def spec(role: Role, *arguments: str, **fields: Any) -> EngineSpec:
    """A simulated engine that takes no time."""
    return EngineSpec(role=role, arguments=("--sim-time-scale", "0", *arguments), **fields)


def leg(engine: Engine, messages: Messages, params: Mapping[str, Any] | None, **fields: Any) -> Reply:
    """A chat request to one engine."""
    body = {
        "model": SERVED_MODEL,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "kv_transfer_params": params,
        **fields,
    }
    return client.post(engine.url + CHAT, body)


def turn(
    prefill: Engine, decode: Engine, messages: Messages, handle: Mapping[str, Any] | None = None, **fields: Any
) -> Any:
    """A prefill leg, then a decode leg; the decode engine's answer."""
    of_prefill = leg(prefill, messages, handle or COLD_PREFILL_PARAMS, **{**fields, "max_tokens": 1})
    assert of_prefill.status == 200, of_prefill.text
    of_decode = leg(decode, messages, of_prefill.json["kv_transfer_params"], **fields)
    assert of_decode.status == 200, of_decode.text
    return of_decode.json


def text_of(answer: Any) -> str:
    """What the answer says."""
    return str(answer["choices"][0]["message"]["content"])


def continued(messages: Messages, answer: Any) -> list[Mapping[str, Any]]:
    """The history after an answer and one more question."""
    return [*messages, {"role": "assistant", "content": text_of(answer)}, {"role": "user", "content": "go on"}]


def state(engine: Engine) -> Any:
    """What the engine holds."""
    return client.get(f"{engine.url}/sim/state").json


def pairs(engine: Engine) -> list[dict[str, Any]]:
    """With whom it shook hands."""
    return list(client.get(f"{engine.url}/sim/pairs").json)


def order(engine: Engine, **faults: Any) -> None:
    """Order faults."""
    reply = client.post(f"{engine.url}/sim/faults", faults)
    assert reply.status == 200, reply.text


def advance(engine: Engine, seconds: float) -> None:
    """Put the engine's clock forward."""
    reply = client.post(f"{engine.url}/sim/clock", {"advance_seconds": seconds})
    assert reply.status == 200, reply.text
