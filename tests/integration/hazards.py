"""What a router must never do to a real engine: seen by scripted engines, which would bear it, and noted.

A real engine ends by it, retains memory for ever, waits for ever, or answers with another request's text. What does
which is vLLM's code (0.32.0; ``nixl/`` is ``distributed/kv_transfer/kv_connector/v1/nixl/``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvloop_connector.handle import RETAIN_PARAMS
from kvloop_connector.settings import Role

if TYPE_CHECKING:
    from tests.integration.scripted_engine import ScriptedEngine

_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")
_IDS = "prompt_token_ids"
_LEGS = ("/v1/chat/completions", "/v1/completions")


@dataclass(slots=True)
class _Issued:
    """Parameters that an engine gave out. tokens: those whose KV lies in the blocks. uses: legs that carried them."""

    issuer: ScriptedEngine
    params: Mapping[str, Any]
    tokens: list[int]
    block_size: int
    uses: int = 0


@dataclass(slots=True)
class Witness:
    """Knows what engines gave out and what they were then asked. watching: whether a router serves."""

    hazards: list[str] = field(default_factory=list)
    watching: bool = False
    _issued: dict[tuple[str, str], _Issued] = field(default_factory=dict)

    def gave(self, engine: ScriptedEngine, params: Mapping[str, Any], tokens: list[int], block_size: int) -> None:
        """An engine has answered with these parameters."""
        key = (params.get("remote_engine_id", ""), params.get("remote_request_id", ""))
        self._issued[key] = _Issued(engine, params, tokens, block_size)

    def asked(self, engine: ScriptedEngine, path: str, body: Mapping[str, Any], prompt: list[int]) -> None:
        """An engine is asked to generate. prompt: the ids that it computes."""
        found = list(_of_any_leg(path, body))
        params = {name: value for name, value in (body.get("kv_transfer_params") or {}).items() if name != _IDS}
        if params and dict(params) != dict(RETAIN_PARAMS):
            check = self._prefill_leg if engine.role is Role.PREFILL else self._decode_leg
            found += check(engine, params, prompt)
        if engine.role is Role.PREFILL and path in _LEGS:
            found += _of_prefill_leg(body, params)
        self.hazards += [f"{engine.name} {path}: {hazard}" for hazard in found]

    def refused(self, body: Mapping[str, Any]) -> None:
        """The engine answered with 4xx: it has read nothing."""
        issued = self._known(body.get("kv_transfer_params") or {})
        if issued is not None:
            issued.uses -= 1

    def cancelled(self, engine: ScriptedEngine, path: str) -> None:
        """A request was cancelled while the engine was at it."""
        if self.watching and engine.role is Role.PREFILL and not engine.tries_patience:
            # v1/core/sched/scheduler.py:3224: an abort with a read pending can end the engine.
            self.hazards.append(f"{engine.name} {path}: a prefill leg was cancelled")

    def unused(self) -> set[str]:
        """The request ids under which decode engines retain what nobody has pulled or released."""
        return {
            name for (_, name), issued in self._issued.items() if issued.issuer.role is Role.DECODE and not issued.uses
        }

    def _known(self, params: Mapping[str, Any]) -> _Issued | None:
        return self._issued.get((params.get("remote_engine_id", ""), params.get("remote_request_id", "")))

    def _prefill_leg(self, engine: ScriptedEngine, params: Mapping[str, Any], prompt: list[int]) -> Iterator[str]:
        if params.get("do_remote_prefill") is not False or params.get("do_remote_decode") is not True:
            yield "parameters that are not a prefill leg's"
        given = [name for name in _NEEDED if params.get(name) is not None]
        if not given:
            return
        if len(given) < len(_NEEDED):
            # KeyError in the engine's core, which ends it.
            yield f"only {', '.join(given)} of what a pull needs"
            return
        issued = self._known(params)
        if issued is None:
            yield "a handle that no engine issued"
            return
        yield from _of_any_handle(engine, issued, Role.DECODE)
        if params.get("remote_num_tokens"):
            yield from _of_pull(engine, issued, params, prompt)

    def _decode_leg(self, engine: ScriptedEngine, params: Mapping[str, Any], prompt: list[int]) -> Iterator[str]:
        if params.get("do_remote_prefill") is not True:
            # nixl/pull_scheduler.py:122: it is never registered, and its blocks are never freed.
            yield "parameters that are not what a prefill leg returned: its blocks leak for ever"
            return
        issued = self._known(params)
        if issued is None:
            yield "parameters that no engine returned"
            return
        if params != issued.params:
            yield "parameters that differ from what the prefill leg returned"
        if prompt != issued.tokens:
            yield "another prompt than its prefill leg's"
        yield from _of_any_handle(engine, issued, Role.PREFILL)


def _of_any_leg(path: str, body: Mapping[str, Any]) -> Iterator[str]:
    arguments = body.get("vllm_xargs") or {}
    if "ec_transfer_params" in body or {"kv_transfer_params", "ec_transfer_params"} & {*arguments}:
        yield "a client's parameters"
    if "kv_transfer_params" in body and path not in _LEGS:
        yield "parameters in an API that no leg goes by"


def _of_prefill_leg(body: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[str]:
    if body.get("stream") or body.get("max_tokens") != 1 or body.get("n", 1) != 1:
        yield "a prefill leg is one token of one answer, not streamed"
    if body.get("max_completion_tokens", 1) != 1 or body.get("min_tokens", 0) > 1 or body.get("stream_options"):
        yield "a prefill leg with what makes it longer than a token, or is refused"
    if params.get("remote_num_tokens") and (body.get("echo") or body.get("prompt_logprobs") is not None):
        yield "a handle on a request for which the engine reads nothing"


def _of_any_handle(engine: ScriptedEngine, issued: _Issued, issuer: Role) -> Iterator[str]:
    issued.uses += 1
    if issued.uses > 1:
        # nixl/pull_worker.py:645: freed after the first read, and read again all the same.
        yield "a handle that was used before"
    if issued.issuer is engine or issued.issuer.role is not issuer:
        yield f"a handle of {issued.issuer.name}, at which the engine ends by an assertion"
    if issued.issuer.revision != engine.revision:
        yield "a handle of another KV revision"


def _of_pull(engine: ScriptedEngine, issued: _Issued, params: Mapping[str, Any], prompt: list[int]) -> Iterator[str]:
    tokens, groups = params["remote_num_tokens"], params["remote_block_ids"]
    if len(groups) == 1 and len(groups[0]) != -(-tokens // issued.block_size):
        # nixl/base_worker.py:3453: an assertion where they are too few; where they are too many, other tokens' KV.
        yield f"{len(groups[0])} blocks for {tokens} tokens"
    if any(
        list(group) != list(own[: len(group)])
        for group, own in zip(groups, issued.params["remote_block_ids"], strict=True)
    ):
        yield "blocks that are not the first of those that are retained"
    if engine.verdict:
        # KvloopConnector compares by itself.
        return
    if tokens > len(issued.tokens) or tokens > len(prompt) or prompt[:tokens] != issued.tokens[:tokens]:
        yield "a pull of other tokens than the prompt's: silently another text"


_WITNESSES: list[Witness] = []


def witness() -> Witness:
    """Of the test that runs."""
    return _WITNESSES[-1] if _WITNESSES else Witness()


@contextmanager
def watched() -> Iterator[Witness]:
    """Everything that scripted engines are asked meanwhile."""
    _WITNESSES.append(Witness())
    try:
        yield _WITNESSES[-1]
    finally:
        _WITNESSES.pop()


@contextmanager
def a_router_serves() -> Iterator[None]:
    """Until its end, which cuts off what still runs, prefill legs must not be cancelled."""
    seen = witness()
    seen.watching = True
    try:
        yield
    finally:
        seen.watching = False
