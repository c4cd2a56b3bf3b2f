"""Finding a handle for a turn, proving how far it may be used, and keeping the one that the turn leaves.

With KvloopConnector the prefill engine proves it: here a handle is found by the history alone and goes on untouched.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvloop_connector.digest import Retained, retain
from kvloop_connector.errors import InvalidHandle
from kvloop_connector.handle import RETAIN_PARAMS, KVHandle
from kvloop_router import history, leases, legs, ranks
from kvloop_router.config import Config
from kvloop_router.engine import Engine
from kvloop_router.engines import Engines
from kvloop_router.kept import Absence, Found, HandleStore, Kept, Match, Query, Why, packed, same_name
from kvloop_router.leases import Pace
from kvloop_router.proof import Proof
from kvloop_router.relay import Ended
from kvloop_router.release import Releases
from kvloop_router.request import Request
from kvloop_router.scope import Scope
from kvloop_router.turn_log import TurnReport

_NEVER_PROVABLE = frozenset({"api", "template"})
"""Why nothing can be proven of this turn, nor of any that goes on from it."""


class Option(NamedTuple):
    """A handle that was proven to hold the first ``tokens`` tokens of the new prompt.

    grant: the number under which the store granted it; 0 until it is taken.
    proven: False where the prefill engine proves it; then it may hold as many tokens.
    """

    kept: Kept
    tokens: int
    grant: int = 0
    proven: bool = True

    @property
    def excess(self) -> int:
        """How many tokens it holds that are of no use here; of handles that give as much, others miss this one least
        where these are few."""
        return int(self.kept.params["remote_num_tokens"]) - self.tokens

    @property
    def handle(self) -> KVHandle:
        """What the prefill leg pulls: no more than was proven. Handles of several KV groups are used whole."""
        handle = self.kept.handle
        if not self.proven or handle.kv_groups > 1:
            return handle
        return handle.trimmed(self.tokens, self.kept.block_size)


class Options(NamedTuple):
    """The handles that a turn may use, the longest prefix first; ``reason`` is why there is none. ``equal``: how many
    tokens were proven where these are too few to use any."""

    options: tuple[Option, ...]
    reason: str
    equal: int = 0


class Reuse:
    """The store, the proof, and the release of what is not used."""

    def __init__(
        self,
        config: Config,
        store: HandleStore,
        releases: Releases,
        engines: Engines,
        clock: Callable[[], float],
        epoch: Callable[[], bytes],
    ) -> None:
        """epoch: that in which what is computed now may be reused; see Scope."""
        self._config = config
        self._store = store
        self._releases = releases
        self._engines = engines
        self._clock = clock
        self._epoch = epoch
        margin = config.kv_transfer.decoder_kv_blocks_ttl_seconds - config.handle_ttl_seconds
        self._longest = max(config.handle_ttl_seconds, config.kv_transfer.longest_lease_seconds - margin)

    async def find(self, query: Query, proof: Proof | None, why_unprovable: str) -> Options:
        """The handles that this turn may use. What its conversation can have no use for any more is released; one that
        only has its id may be another thread's.

        proof: of the new prompt; None: nothing can be proven, for the reason given, or without one because the
        engines' rendering of such a request is not known yet.
        """
        found = await self._store.find(query)
        if self._config.kv_transfer.verified_by_engine and self._config.reuse:
            return _unproven(found, query)
        if proof is None or not self._config.reuse:
            if not self._config.reuse:
                await self._give_up(match for match in found.matches if match.certain)
                return Options((), "off")
            if why_unprovable in _NEVER_PROVABLE:
                await self._give_up(_outgrown(found, query))
            return Options((), why_unprovable or ("template" if found.matches else found.absence))
        if not found.matches:
            return Options((), found.absence)
        proven = [Option(match.kept, self._proven(match.kept, proof)) for match in found.matches]
        threshold = max(1, self._config.kv_transfer.kv_recompute_threshold)
        usable = [option for option in proven if option.tokens >= threshold and _worth_it(option, query)]
        if usable:
            return Options(tuple(sorted(usable, key=lambda option: (-option.tokens, option.excess))), "")
        await self._give_up(_outgrown(found, query))
        partly = any(option.tokens or not option.kept.retained.digests for option in proven)
        equal = max(option.tokens for option in proven)
        return Options((), "below_threshold" if partly else "diverged", equal)

    def to_digest(self, proof: Proof | None, decode: str) -> Callable[[], bool] | None:
        """What makes, part by part, a long prompt's digests for the handle that its turn will leave at this engine,
        so that it can be done while engines compute; None where there is nothing to do ahead."""
        leaves = self._config.reuse and self._config.kv_transfer.bidirectional_kv_xfer
        engine = self._engines.get(decode)
        if not leaves or proof is None or not proof.long or engine is None or engine.block_size is None:
            return None
        return partial(proof.digest_more, engine.spec.kv_revision, engine.block_size)

    async def keep(
        self,
        request: Request,
        query: Query,
        scope: Scope,
        decode: Engine,
        proof: Proof | None,
        ended: Ended,
        pace: Pace,
    ) -> str:
        """Keep the handle that a turn left, or release it where nothing can be proven of it.

        proof: of the prompt; None where the router did not choose its ids. Gives why nothing was kept, or "".
        """
        reason = self._unusable(decode, ended) or await self._keep(request, query, scope, decode, proof, ended, pace)
        if reason:
            await self._store.note_absent(
                query, Absence.BELOW_THRESHOLD if reason == "below_threshold" else Absence.NO_HANDLE
            )
        return reason

    @property
    def params_alone(self) -> Mapping[str, Any] | None:
        """What a decode leg carries that has no prefill leg: with KvloopConnector, that the engine is to retain its
        blocks; a stock one would retain them for ever."""
        return RETAIN_PARAMS if self._config.kv_transfer.verified_by_engine else None

    def why_none_returned(self, request: Request, ended: Ended) -> str:
        """Why a decode leg that was to leave a handle left none."""
        if not self._config.kv_transfer.bidirectional_kv_xfer:
            return "off"
        if "abort" in ended.finish_reasons.values():
            return "abort"
        if request.stream and not self._config.engine.stream_handles:
            return "stream"
        if ended.error:
            return "error"
        return "stop_string" if request.body.get("stop") else "unknown"

    async def end(self, scope: Scope, conversation: str) -> int:
        """Release all that is kept of a conversation; gives how many handles."""
        ended = await self._store.end(scope.ident, conversation)
        for kept in ended:
            self._releases.add(kept, Why.ENDED)
        return len(ended)

    async def discard(self, option: Option) -> None:
        """Release a handle that was found and can go nowhere."""
        if await self._store.withdraw(option.kept.ident):
            self._releases.add(option.kept, Why.NO_PAIR)

    async def supersede(self, option: Option | None) -> None:
        """Release a handle that a turn could have read and did not, once that turn has left its own: it holds more."""
        if option is not None and await self._store.withdraw(option.kept.ident):
            self._releases.add(option.kept, Why.SUPERSEDED)

    def _proven(self, kept: Kept, proof: Proof) -> int:
        groups = kept.group_sizes
        if len(groups) > 1 and not self._config.engine.multi_group_reuse:
            return 0
        return proof.reusable(kept)

    async def _give_up(self, matches: Iterable[Match]) -> None:
        for match in matches:
            if await self._store.withdraw(match.kept.ident):
                self._releases.add(match.kept, Why.USELESS)

    def _unusable(self, decode: Engine, ended: Ended) -> str:
        if ended.handle is None:
            return "none_returned"
        if self._engines.get(decode.spec.name) is not decode:
            return "engine_gone"
        return ""

    async def _keep(
        self,
        request: Request,
        query: Query,
        scope: Scope,
        decode: Engine,
        proof: Proof | None,
        ended: Ended,
        pace: Pace,
    ) -> str:
        try:
            handle = KVHandle.parse(ended.handle)
        except InvalidHandle:
            return "malformed"
        since = self._clock() - ended.held_up
        deadline = since + self._config.handle_ttl_seconds
        prompt = proof.token_ids if proof is not None else ended.prompt_token_ids
        await self._notice_restart(decode, handle)
        reason = self._not_worth_keeping(decode, scope, handle) or self._unprovable(request, decode, handle, prompt)
        if not reason:
            retained = self._retained(proof or Proof(scope, prompt or ()), decode, handle, ended)
            params, blocks = packed(handle)
            kept = Kept(
                tenant_scope=scope.ident,
                decode=decode.spec.name,
                process=decode.spec.process,
                kv_revision=decode.spec.kv_revision,
                params=params,
                blocks=blocks,
                retained=retained,
                block_size=decode.block_size or 0,
                trail=query.trail,
                conversation=query.conversation,
                deadline=deadline,
                since=since,
                ends=since + self._longest,
                pace=pace,
            )
            refused = ""
            for given_up in await self._store.put(kept, max_blocks=self._budget(decode, handle)):
                self._releases.add(given_up.kept, given_up.why)
                if given_up.kept.ident == kept.ident:
                    refused = given_up.why.value
            return refused
        self._releases.add_handle(
            handle,
            Why.NOT_KEPT,
            process=decode.spec.process,
            decode=decode.spec.name,
            kv_revision=decode.spec.kv_revision,
            deadline=deadline,
        )
        return reason

    async def _notice_restart(self, decode: Engine, handle: KVHandle) -> None:
        """An engine id that changed is a new process, whose memory holds nothing of the old one's."""
        engine_id = ranks.without(handle.engine_id)
        if decode.engine_id not in (None, engine_id):
            self._releases.orphan(decode.spec.process)
            await self._store.orphan(decode.spec.process)
            decode.leases = None
        decode.engine_id = engine_id

    def _not_worth_keeping(self, decode: Engine, scope: Scope, handle: KVHandle) -> str:
        if scope.epoch != self._epoch():
            return "wrong_reuse"
        if decode.spec.ending:
            return "engine_ending"
        threshold = max(1, self._config.kv_transfer.kv_recompute_threshold)
        if handle.num_tokens < threshold:
            return "below_threshold"
        most = self._retainable(decode)
        if most is not None and _size(handle) > most:
            return "over_budget"
        return ""

    def _retainable(self, decode: Engine) -> int | None:
        """How many of its blocks an engine may retain: pinned blocks take the room of running requests."""
        return None if decode.kv_blocks is None else int(decode.kv_blocks * self._config.kv_transfer.retained_share)

    def _budget(self, decode: Engine, newest: KVHandle) -> int | None:
        """How many of them kept handles may hold."""
        most, capped = self._retainable(decode), self._config.kv_transfer.capped_by_engine
        return None if most is None else leases.budget(most, capped=capped, newest=_size(newest))

    def _unprovable(self, request: Request, decode: Engine, handle: KVHandle, prompt: Sequence[int] | None) -> str:
        """Why nothing could ever be proven of it here; empty where it can, or where that is the engine's to do."""
        if self._config.kv_transfer.verified_by_engine:
            return ""
        if not request.provable:
            return "api"
        if prompt is None:
            return "no_token_ids"
        if decode.block_size is None:
            return "block_size_unknown"
        if handle.kv_groups > 1 and not self._config.engine.multi_group_reuse:
            return "kv_groups"
        return ""

    def _retained(self, prompt: Proof, decode: Engine, handle: KVHandle, ended: Ended) -> Retained:
        """What is to be proven of it later."""
        if self._config.kv_transfer.verified_by_engine or decode.block_size is None:
            return Retained(digests=b"", tokens=0, exact=b"")
        revision = decode.spec.kv_revision
        return retain(
            prompt.key(revision),
            prompt.tokens + array("I", ended.token_ids),
            handle.num_tokens,
            decode.block_size,
            known=prompt.known(revision, decode.block_size),
        )


def report_reuse(report: TurnReport, option: Option, params: Mapping[str, Any] | None) -> str:
    """Enter what a prefill leg had without computing it because of a handle: the proven prefix where it pulled what its
    own cache had not of that, and else nothing.

    params: what the leg returned. Gives the engine's verdict on the handle; "" where it was proven here.
    """
    told = ""
    if option.proven:
        report.proven_tokens = option.tokens
    else:
        verdict = legs.verdict(params)
        # Without one it runs another connector than this router was told.
        told = "none" if verdict is None else verdict.outcome.value
        report.proven_tokens = 0 if verdict is None else verdict.tokens
        if not report.proven_tokens:
            report.path, report.reason = "cold", "no_verdict" if verdict is None else told
            return told
    cached = (params or {}).get("remote_prefill_cached_tokens")
    end = report.proven_tokens + max(1, option.kept.block_size)
    if isinstance(cached, int) and not report.proven_tokens <= cached < end:
        # What it pulls ends where the proof does. Its own cache had more, or all but fewer than the threshold.
        report.path, report.reason, report.reused_tokens = "cold", "below_threshold", 0
    else:
        report.path, report.reason, report.reused_tokens = "warm", "", report.proven_tokens
    return told


def _unproven(found: Found, query: Query) -> Options:
    """The handles whose history fits, that which has most in common first, for the prefill engine to judge. One that
    only begins alike may be another conversation's: it is tried where there is no other."""
    common = {match.kept.ident: history.common_messages(match.kept.trail, query.trail) for match in found.matches}
    matches = [match for match in found.matches if _worth_a_try(match.kept, query)]
    matches.sort(key=lambda match: (-common[match.kept.ident], len(match.kept.trail)))
    fitting = [match for match in matches if match.certain or history.mostly(match.kept.trail, query.trail)]
    options = [
        Option(match.kept, int(match.kept.params["remote_num_tokens"]), proven=False)
        for match in fitting or matches[:1]
    ]
    if options:
        return Options(tuple(options), "")
    return Options((), "diverged" if any(match.certain for match in found.matches) else found.absence)


def _ours(kept: Kept, query: Query) -> bool:
    return not history.apart(kept.trail, query.trail, named=same_name(kept.conversation, query.conversation))


def _worth_a_try(kept: Kept, query: Query) -> bool:
    """What another conversation's handle gives, and what that loses with it, is not known in tokens here: an answer has
    to be common to both, and most of its history."""
    return _ours(kept, query) or (kept.trail.answered and history.mostly(kept.trail, query.trail))


def _outgrown(found: Found, query: Query) -> list[Match]:
    """Those whose history goes on in this one, so that nobody else is likely to come for them."""
    whole = (match for match in found.matches if match.certain)
    return [match for match in whole if history.common_messages(match.kept.trail, query.trail) == len(match.kept.trail)]


def _worth_it(option: Option, query: Query) -> bool:
    """Whether a handle that may be another conversation's gives this one so much that the other's loss is small."""
    if _ours(option.kept, query):
        return True
    return option.tokens >= history.GAIN * option.excess


def _size(handle: KVHandle) -> int:
    return sum(handle.group_sizes)
