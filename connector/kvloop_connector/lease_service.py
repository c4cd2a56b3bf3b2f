"""What the paths of ``kvloop_connector.lease_requests`` answer, over calls that reach all workers of an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvloop_connector import lease_ranks
from kvloop_connector.errors import InvalidAnswer, InvalidRequest
from kvloop_connector.lease_requests import Outcome, parse_release, parse_renew
from kvloop_connector.proof import SealKey, Term, sealed_term

CallRanks = Callable[[str, tuple[Any, ...]], Awaitable[Sequence[Any]]]
"""Calls a method of ``LeaseWorker`` on every rank; gives the ranks' answers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP status and a body to be sent as JSON."""

    status: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseService:
    """Answers for one engine.

    key: seals the deadlines of renewed handles; None where handles have no proof.
    clock: seconds on the clock of the engine's ``remote_blocks_expiry_time``.
    wall: Unix seconds.
    """

    call: CallRanks
    key: SealKey | None
    clock: Callable[[], float]
    wall: Callable[[], float]

    async def release(self, body: bytes) -> Answer:
        """Release the handles that the request names."""
        try:
            asked = parse_release(body)
            held = await self._released(asked.request_ids)
            # A turn's answer is out before the workers hear that they retain its blocks, at the engine's next step.
            if early := [request_id for request_id in asked.request_ids if request_id not in held]:
                held |= await self._released(early)
        except (InvalidRequest, InvalidAnswer) as error:
            return refusal(error)
        return _answer(
            {request_id: {"outcome": Outcome.RELEASED} for request_id in asked.request_ids if request_id in held},
            asked.request_ids,
        )

    async def _released(self, request_ids: Sequence[str]) -> frozenset[str]:
        return lease_ranks.released(await self.call("kvloop_release", (list(request_ids),)))

    async def renew(self, body: bytes) -> Answer:
        """Renew the handles that the request names. What only some ranks hold is set back to where it was."""
        try:
            asked = parse_renew(body)
            # Before the ranks are asked: what they say remains is then never reckoned from too late.
            expiry, deadline = self.clock(), self.wall()
            renewed = lease_ranks.renewed(await self.call("kvloop_renew", (list(asked.request_ids), asked.seconds)))
            if renewed.set_back:
                await self.call("kvloop_set_back", (dict(renewed.set_back),))
        except (InvalidRequest, InvalidAnswer) as error:
            return refusal(error)
        entries: dict[str, dict[str, Any]] = {}
        for request_id, lease in renewed.leases.items():
            entries[request_id] = {"outcome": Outcome.RENEWED, "seconds": lease.seconds}
            if self.key is not None:
                term = Term(deadline + lease.remaining, expiry + lease.remaining, lease.number)
                entries[request_id]["term"] = sealed_term(
                    self.key, engine_id=renewed.engine_id, request_id=request_id, term=term
                )
        return _answer(entries, asked.request_ids)


def refusal(error: Exception) -> Answer:
    """What is answered where nothing was done, in the shape of vLLM's errors."""
    if isinstance(error, InvalidRequest):
        return _error(400, "BadRequestError", str(error), error.field or None)
    if isinstance(error, InvalidAnswer):
        return _error(500, "InternalServerError", str(error))
    return _error(501, "NotImplementedError", str(error))


def _answer(entries: Mapping[str, Mapping[str, Any]], request_ids: Sequence[str]) -> Answer:
    missing = {"outcome": Outcome.NOT_HELD}
    handles = [{"remote_request_id": request_id, **entries.get(request_id, missing)} for request_id in request_ids]
    return Answer(200, {"handles": handles})


def _error(status: int, kind: str, message: str, field: str | None = None) -> Answer:
    return Answer(status, {"error": {"message": message, "type": kind, "param": field, "code": status}})
