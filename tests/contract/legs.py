"""The legs of a turn, sent straight to engines as a router sends them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvloop_connector.handle import COLD_PREFILL_PARAMS, KVHandle
from kvloop_connector.verdict import REUSE_FIELD
from tests.harness import client
from tests.harness.client import Reply
from tests.harness.engines import SERVED_MODEL, Engine, wait_until
from tests.harness.metrics import EngineMetrics

Messages = list[dict[str, Any]]
Params = Mapping[str, Any]

BLOCK = 32
ANSWER_TOKENS = 12
SAMPLING = {"model": SERVED_MODEL, "max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a leg came to, whether it was streamed or not.

    reuse: what prefill said of the handle that the turn came with; only KvloopConnector says it.
    """

    text: str
    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str
    params: dict[str, Any] | None
    reuse: Mapping[str, Any] | None = None

    @property
    def handle(self) -> KVHandle:
        return KVHandle.parse(self.params)

    @property
    def retained_ids(self) -> list[int]:
        """The tokens of prompt and answer."""
        return self.prompt_ids + self.answer_ids


@dataclass(frozen=True, slots=True)
class Reusable:
    """A handle as it is sent on a prefill leg, and how many tokens may be read from it there, the cache being empty."""

    params: Params
    tokens: int


@dataclass(slots=True)
class Legs:
    """Sends legs and keeps account of the handles that decode issued, so that none outlives its test.

    api_key: what the engines ask for, if they do.
    """

    api_key: str = ""
    issued: dict[str, tuple[KVHandle, Engine, Engine]] = field(default_factory=dict)

    def prefill(self, engine: Engine, messages: Messages, params: Params = COLD_PREFILL_PARAMS, **fields: Any) -> Reply:
        """The prefill leg; a handle in ``params`` counts as spent."""
        self.issued.pop(str(params.get("remote_request_id")), None)
        body = chat(messages, **{**fields, "max_tokens": 1, "kv_transfer_params": params})
        return client.post(engine.url + CHAT, body, api_key=self.api_key)

    def cold(self, prefill: Engine, decode: Engine, messages: Messages, **fields: Any) -> Answer:
        """A turn with nothing to reuse: its prompt is computed on ``prefill``, under a salt of its own unless given."""
        return self.turn(prefill, decode, messages, COLD_PREFILL_PARAMS, **{"cache_salt": fresh_salt(), **fields})

    def turn(self, prefill: Engine, decode: Engine, messages: Messages, params: Params, **fields: Any) -> Answer:
        """Both legs of a turn; ``fields`` go to both."""
        of_prefill = self.prefill(prefill, messages, params, **fields)
        assert of_prefill.status == 200, of_prefill.text
        return self.decode(prefill, decode, messages, of_prefill.json["kv_transfer_params"], **fields)

    def decode(self, prefill: Engine, decode: Engine, messages: Messages, params: Params, **fields: Any) -> Answer:
        """The decode leg, with the parameters that ``prefill`` returned."""
        body = chat(messages, return_token_ids=True, kv_transfer_params=params, **fields)
        reply = client.post(decode.url + CHAT, body, api_key=self.api_key)
        assert reply.status == 200, reply.text
        return self.account(replace(answer_of([reply.json]), reuse=params.get(REUSE_FIELD)), prefill, decode)

    def complete(
        self,
        prefill: Engine,
        decode: Engine,
        prompt: Sequence[int],
        params: Params = COLD_PREFILL_PARAMS,
        *,
        salt: str,
    ) -> Answer:
        """Both legs of a completion of token ids."""
        return self.decode_ids(prefill, decode, prompt, self.prefill_ids(prefill, prompt, params, salt=salt), salt=salt)

    def prefill_ids(
        self, engine: Engine, prompt: Sequence[int], params: Params = COLD_PREFILL_PARAMS, *, salt: str
    ) -> Params:
        """The prefill leg of a completion of token ids: what is to be passed on to decode."""
        self.issued.pop(str(params.get("remote_request_id")), None)
        reply = client.post(
            engine.url + COMPLETIONS,
            ids_request(prompt, salt, max_tokens=1, kv_transfer_params=params),
            api_key=self.api_key,
        )
        assert reply.status == 200, reply.text
        return dict(reply.json["kv_transfer_params"])

    def decode_ids(
        self, prefill: Engine, decode: Engine, prompt: Sequence[int], params: Params, *, salt: str
    ) -> Answer:
        """The decode leg of a completion of token ids."""
        reply = client.post(
            decode.url + COMPLETIONS,
            ids_request(prompt, salt, return_token_ids=True, kv_transfer_params=params),
            api_key=self.api_key,
        )
        assert reply.status == 200, reply.text
        return self.account(replace(answer_of([reply.json]), reuse=params.get(REUSE_FIELD)), prefill, decode)

    def account(self, answer: Answer, prefill: Engine, decode: Engine) -> Answer:
        """Remember the answer's handle, if it has one, to be released through ``prefill``."""
        if answer.params is not None:
            self.issued[answer.handle.request_id] = (answer.handle, prefill, decode)
        return answer

    def release(self, prefill: Engine, handle: KVHandle) -> Reply:
        """Release a handle on an unrelated prefill leg."""
        return self.prefill(prefill, story("a filler", words=4), handle.released().params, cache_salt=fresh_salt())

    def settle(self) -> None:
        """Release what is left, and see that no engine that took part holds blocks any more."""
        left, decodes = list(self.issued.values()), set()
        for handle, prefill, decode in left:
            assert self.release(prefill, handle).status == 200
            decodes.add(decode)
        for decode in decodes:
            assert wait_until(partial(holds_nothing, decode)), f"{decode.name} holds blocks"


def holds_nothing(engine: Engine) -> bool:
    """Whether no request runs there and no block is in use or retained."""
    seen = engine.metrics()
    return seen.running == 0 and seen.waiting == 0 and seen.kv_usage == 0


def leave(engine: Engine, body: Mapping[str, Any], *, once: Callable[[EngineMetrics], bool], path: str = CHAT) -> None:
    """Send a request and close the connection as soon as the engine's metrics say ``once``."""
    with client.sent(engine.url + path, body):
        assert wait_until(lambda: once(engine.metrics()), seconds=60, every=0.005), "the phase was not seen"
    engine.check_alive()


def prefill_leg(messages: Messages, params: Params, salt: str) -> dict[str, Any]:
    """A prefill leg's request."""
    return chat(messages, max_tokens=1, cache_salt=salt, kv_transfer_params=params)


def chat(messages: Messages, **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"messages": messages, **SAMPLING, **fields}


def completion(text: str, **fields: Any) -> dict[str, Any]:
    """A completions request."""
    return {"prompt": text, **SAMPLING, **fields}


def ids_request(prompt: Sequence[int], salt: str, **fields: Any) -> dict[str, Any]:
    """A completions request whose prompt is token ids."""
    return completion("", prompt=list(prompt), cache_salt=salt, **fields)


@contextmanager
def streamed(engine: Engine, path: str, body: Mapping[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The chunks of a streamed answer."""
    with client.stream(engine.url + path, body) as payloads:
        yield (json.loads(payload) for payload in payloads if payload != "[DONE]")


def answer_of(chunks: Sequence[Mapping[str, Any]]) -> Answer:
    """The answer in a whole body or in the chunks of a stream, of either API."""
    texts: list[str] = []
    prompt_ids: list[int] = []
    answer_ids: list[int] = []
    reasons: list[str] = []
    params: list[dict[str, Any]] = []
    for chunk in chunks:
        params += [chunk["kv_transfer_params"]] if chunk.get("kv_transfer_params") else []
        prompt_ids += chunk.get("prompt_token_ids") or []
        for choice in chunk["choices"]:
            part = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            texts.append(part.get("content") or "")
            prompt_ids += choice.get("prompt_token_ids") or []
            answer_ids += choice.get("token_ids") or []
            reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    assert len(reasons) == 1, f"an answer ends once, not {len(reasons)} times"
    assert len(params) <= 1, "an answer has one handle"
    return Answer("".join(texts), prompt_ids, answer_ids, reasons[0], params[0] if params else None)


def tokenize(engine: Engine, messages: Messages, **fields: Any) -> list[int]:
    """The ids of a chat's prompt."""
    reply = client.post(engine.url + "/tokenize", {"model": SERVED_MODEL, "messages": messages, **fields})
    assert reply.status == 200, reply.text
    return list(reply.json["tokens"])


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading tokens that are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def trimmed_to(handle: KVHandle, retained: Sequence[int], prompt: Sequence[int]) -> KVHandle:
    """The handle cut to what the new prompt provably shares with the retained tokens."""
    shared = min(common_prefix(retained, prompt), len(retained) - 1, handle.num_tokens)
    return handle.trimmed(shared // BLOCK * BLOCK, BLOCK)


def story(topic: str, *, words: int = 160) -> Messages:
    """A conversation's first messages; the same topic gives the same words."""
    told = [f"{topic} {place}" for place in ("by the river", "on the hill", "in the old town", "under the bridge")]
    text = " ".join((told * words)[: max(1, words // 4)])
    return [{"role": "system", "content": "Tell what you see."}, {"role": "user", "content": text}]


def ids_of(engine: Engine, topic: str, tokens: int) -> list[int]:
    """So many tokens of a story that is told again and again."""
    told = tokenize(engine, story(topic))
    return (told * (tokens // len(told) + 1))[:tokens]


def continued(messages: Messages, answer: Answer, question: str = "What happened next?") -> Messages:
    """The history of the next turn."""
    return [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]


def fresh_salt() -> str:
    """A cache salt that nobody used before."""
    return uuid.uuid4().hex
