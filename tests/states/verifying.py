"""A simulated engine with KvloopConnector: what it proves and refuses is the connector's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvloop_connector.handle import RETAIN_PARAMS
from kvloop_connector.proof import HashScheme, SealKey, Term, seal
from kvloop_connector.verdict import REUSE_FIELD, Decision, Prompt, Reader, SpentHandles, judge, leg_params
from kvloop_sim.records import Admission, EngineRequest, EngineSettings, Sampling
from tests.states.counting import CountingEngine

_KEY: Final = SealKey(b"the key that the engines share..")
_REVISION: Final = "0123456789"


class VerifyingEngine(CountingEngine):
    """As ``KvloopScheduler`` is to vLLM's. ``clock``: the engine's own."""

    def __init__(self, settings: EngineSettings, clock: Callable[[], float]) -> None:
        super().__init__(settings)
        assert settings.connector is not None
        self._clock = clock
        self._spent = SpentHandles()
        self._decisions: dict[str, Decision] = {}
        self._reader = Reader(
            key=_KEY,
            engine_id=settings.connector.engine_id,
            revision=_REVISION,
            scheme=HashScheme.of(_KEY, algorithm="sim", block_size=settings.block_size, none_hash=b"none"),
            block_size=settings.block_size,
            groups=1,
            divisible=True,
        )

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        params: Mapping[str, Any] | None = None,
        salt: str = "",
        adapter: str = "",
    ) -> EngineRequest:
        """What a handle that came with the request is good for is settled here."""
        request = super().submit(request_id, prompt, sampling, params=params, salt=salt, adapter=adapter)
        if request.params and request.params.get("do_remote_decode"):
            request.names.extend(prompt)
            told = Prompt(request.names.names, len(prompt), list(prompt))
            decision = judge(self._reader, request.params, told, spent=self._spent, now=self._clock())
            self._decisions[request_id] = decision
            request.params = leg_params(decision, request.params, self._reader)
        return request

    def _admit(self, request: EngineRequest) -> Admission | None:
        admission = super()._admit(request)
        if admission is not None and request.params == RETAIN_PARAMS:
            request.plan = replace(request.plan, tracked=True)
        return admission

    def _finish(self, request: EngineRequest, reason: str, now: float) -> dict[str, Any] | None:
        decision = self._decisions.pop(request.request_id, None)
        answer = super()._finish(request, reason, now)
        if answer is None:
            return None
        if decision is not None:
            return {**answer, REUSE_FIELD: {"outcome": decision.outcome.value, "tokens": decision.tokens}}
        if not answer["do_remote_decode"]:
            return answer
        exist = max(0, min(answer["remote_num_tokens"], len(request.tokens) - 1))
        request.names.extend(request.tokens)
        expiry = answer["remote_blocks_expiry_time"]
        return seal(
            _KEY,
            answer,
            scheme=self._reader.scheme,
            revision=_REVISION,
            tokens=exist,
            hashes=request.names.names[: exist // self.settings.block_size],
            rest=None,
            ends=expiry,
            term=Term(expiry, expiry),
        )

    def abort(self, request: EngineRequest) -> Any:
        """Nobody asks any more what became of its handle."""
        self._decisions.pop(request.request_id, None)
        return super().abort(request)
