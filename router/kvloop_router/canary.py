"""Two turns over each new pair of engines, to see with the engines' own counters that KV moves in both directions.

The prompt is random, and prefill's own cache holds none of the second turn's, so that it has to pull: that turn has
another ``cache_salt``. To KvloopConnector another salt is another history; there decode plays the first turn alone, and
KV goes both ways in the second. It warms the engines' handshake too, which takes seconds where they never met.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from kvloop_connector.digest import DigestKey, retain, reusable_tokens
from kvloop_connector.errors import InvalidHandle
from kvloop_connector.handle import RETAIN_PARAMS, KVHandle
from kvloop_connector.verdict import Outcome
from kvloop_router import exposition, headers, legs, relay
from kvloop_router.config import Config
from kvloop_router.engine import Engine
from kvloop_router.engines import Engines, Upstream
from kvloop_router.errors import EngineError, EngineRejected
from kvloop_router.kept import Why
from kvloop_router.pairs import PairReport, Pairs, Verdict
from kvloop_router.relay import Ended
from kvloop_router.release import Releases
from kvloop_router.request import Api, Request

_log = logging.getLogger(__name__)

_EVERY_SECONDS = 1.0
_FIRST_RETRY_SECONDS = 5.0
_LAST_RETRY_SECONDS = 300.0
_COUNTERS_SECONDS = 10.0
_DETAIL_BYTES = 500
_ANSWER_TOKENS = 2
_NEW_TOKENS = 4
_ONE_WAY = "only prefill to decode was tried, since bidirectionalKvXfer is off"


class CanaryFailed(Exception):
    """What went wrong, for the report."""


@dataclass(frozen=True, slots=True)
class Moved:
    """KV that an engine has read, as it counts: bytes, and the seconds that the transfers took."""

    size: float
    seconds: float


_NOTHING = Moved(0.0, 0.0)


@dataclass(slots=True)
class _Play:
    """One canary on its way. The context of its digests is its own, since nothing of it is kept."""

    prefill: Engine
    decode: Engine
    key: DigestKey
    to_decode: Moved = _NOTHING
    to_prefill: Moved = _NOTHING
    streams: bool | None = None


class Canary:
    """Plays a canary for each pair that is not verified, one at a time, failed ones at growing intervals."""

    def __init__(
        self,
        *,
        config: Config,
        engines: Engines,
        pairs: Pairs,
        releases: Releases,
        clock: Callable[[], float],
        random: Random,
        plays: Callable[[], bool] = lambda: True,
    ) -> None:
        """plays: whether it is up to this one, and to nobody else, to play them now."""
        self._config = config
        self._engines = engines
        self._pairs = pairs
        self._releases = releases
        self._clock = clock
        self._random = random
        self._plays = plays
        self._not_before: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            reports = self._pairs.reports()
            known = set(map(_key, reports))
            self._not_before = {key: due for key, due in self._not_before.items() if key in known}
            for report in reports if self._plays() else ():
                await self._consider(report)
            await asyncio.sleep(_EVERY_SECONDS)

    async def play(self, report: PairReport) -> PairReport:
        """Play the two turns; gives the report with its verdict."""
        prefill = self._engines.get(report.prefill.name)
        decode = self._engines.get(report.decode.name)
        if prefill is None or decode is None:
            return report
        play = _Play(prefill, decode, DigestKey(self._random.randbytes(32), b"canary"))
        verdict, detail = Verdict.VERIFIED, "" if self._config.kv_transfer.bidirectional_kv_xfer else _ONE_WAY
        try:
            async with asyncio.timeout(2 * self._config.timeouts.prefill_seconds):
                await self._two_turns(play)
        except EngineRejected as error:
            verdict, detail = Verdict.FAILED, f"{error}: {error.body[:_DETAIL_BYTES].decode('utf-8', 'replace')}"
        except (CanaryFailed, EngineError, InvalidHandle) as error:
            verdict, detail = Verdict.FAILED, str(error)
        except TimeoutError:
            verdict, detail = Verdict.FAILED, "no answer in time"
        return PairReport(
            prefill=report.prefill,
            decode=report.decode,
            verdict=verdict,
            to_decode_bytes=int(play.to_decode.size),
            to_prefill_bytes=int(play.to_prefill.size),
            to_decode_seconds=play.to_decode.seconds,
            to_prefill_seconds=play.to_prefill.seconds,
            streams=play.streams,
            detail=detail,
        )

    async def _consider(self, report: PairReport) -> None:
        key = _key(report)
        due = self._not_before.get(key, 0.0) <= self._clock()
        serving = self._serving(report.prefill.name) and self._serving(report.decode.name)
        if report.verdict in (Verdict.VERIFIED, Verdict.WRONG) or not due or not serving:
            return
        played = await self.play(report)
        if played.verdict is Verdict.VERIFIED or not self._drains(report):
            # A failure of an engine that is being ended says nothing about the transfer.
            self._pairs.record(played)
        wait = min(_LAST_RETRY_SECONDS, _FIRST_RETRY_SECONDS * 2.0**report.attempts)
        self._not_before[key] = self._clock() + wait
        _log.info(
            "canary",
            extra={
                "prefill": report.prefill.name,
                "decode": report.decode.name,
                "verdict": played.verdict.value,
                "detail": played.detail,
            },
        )

    def _serving(self, name: str) -> bool:
        engine = self._engines.get(name)
        # Without the engine's own facts there is no telling how long a prompt has to be.
        return engine is not None and engine.serving and engine.version is not None

    def _drains(self, report: PairReport) -> bool:
        engines = (self._engines.get(report.prefill.name), self._engines.get(report.decode.name))
        return any(engine is not None and engine.spec.draining for engine in engines)

    async def _two_turns(self, play: _Play) -> None:
        block_size = play.decode.block_size
        if block_size is None:
            raise CanaryFailed("the decode engine does not tell its block size")
        threshold = max(1, self._config.kv_transfer.kv_recompute_threshold)
        prompt = await self._tokens(play, threshold + 2 * block_size)
        longest = play.decode.max_model_len
        if longest is not None and len(prompt) + 2 * _ANSWER_TOKENS + _NEW_TOKENS > longest:
            raise CanaryFailed(f"the model takes {longest} tokens, too few for a pull of {threshold}")

        if self._config.kv_transfer.verified_by_engine:
            await self._second_turn_only(play, prompt)
            return
        pulled = await self._counted(play.decode)
        first = await self._turn(play, prompt, handle=None, stream=False, salt=self._salt())
        play.to_decode = await self._grown(play.decode, pulled, "prefill to decode")
        if not self._config.kv_transfer.bidirectional_kv_xfer:
            return
        if first.handle is None:
            raise CanaryFailed("the decode engine returned no handle: is bidirectional_kv_xfer on there?")

        handle = KVHandle.parse(first.handle)
        held = [*prompt, *first.token_ids]
        following = [*held, *await self._tokens(play, _NEW_TOKENS)]
        pulled = await self._counted(play.prefill)
        second = await self._turn(
            play,
            following,
            handle=_proven(play, handle, held, following, block_size),
            stream=self._config.engine.stream_handles,
            salt=self._salt(),
        )
        play.to_prefill = await self._grown(play.prefill, pulled, "decode to prefill")
        self._end(play, second)

    async def _second_turn_only(self, play: _Play, prompt: Sequence[int]) -> None:
        """What decode computed alone goes to prefill, and the rest of the next prompt back."""
        salt = self._salt()
        name, request = play.decode.spec.name, self._request(play, prompt, stream=False)
        leg = legs.decode(request, params=RETAIN_PARAMS, token_ids=None, salt=salt)
        answer = await self._engines.complete(name, request.api, leg, headers.upstream({}, f"canary-{salt}"))
        _, first = await relay.whole(answer, name, keep_token_ids=True, finished=_nothing)
        if first.handle is None:
            raise CanaryFailed("the decode engine returned no handle: does it run KvloopConnector?")
        following = [*prompt, *first.token_ids, *await self._tokens(play, _NEW_TOKENS)]
        from_decode, from_prefill = await self._counted(play.prefill), await self._counted(play.decode)
        second = await self._turn(
            play,
            following,
            handle=KVHandle.parse(first.handle),
            stream=self._config.engine.stream_handles,
            salt=salt,
        )
        play.to_prefill = await self._grown(play.prefill, from_decode, "decode to prefill")
        play.to_decode = await self._grown(play.decode, from_prefill, "prefill to decode")
        self._end(play, second)

    def _end(self, play: _Play, second: Ended) -> None:
        """Release what the second turn left. Raises CanaryFailed where a stream left nothing."""
        if self._config.engine.stream_handles:
            play.streams = second.handle is not None
        if second.handle is not None:
            self._release(play, KVHandle.parse(second.handle))
        elif self._config.engine.stream_handles:
            raise CanaryFailed("the streamed answer carried no handle")

    async def _turn(
        self, play: _Play, token_ids: Sequence[int], *, handle: KVHandle | None, stream: bool, salt: str
    ) -> Ended:
        """Both legs of a turn."""
        request = self._request(play, token_ids, stream=stream)
        sent = headers.upstream({}, f"canary-{salt}")
        answer = await self._engines.complete(
            play.prefill.spec.name,
            request.api,
            legs.prefill(request, handle=handle, token_ids=None, salt=salt),
            sent,
            seconds=self._config.timeouts.prefill_seconds,
        )
        params = _object(answer.body).get(legs.PARAMS)
        if not isinstance(params, Mapping):
            raise CanaryFailed("the prefill engine returned no kv_transfer_params")
        if handle is not None and self._config.kv_transfer.verified_by_engine:
            _refuse_other_than_read(legs.verdict(params))
        leg = legs.decode(request, params=params, token_ids=None, salt=salt)
        if not stream:
            answer = await self._engines.complete(play.decode.spec.name, request.api, leg, sent)
            _, ended = await relay.whole(answer, play.decode.spec.name, keep_token_ids=True, finished=_nothing)
            return ended
        async with self._engines.stream(play.decode.spec.name, request.api, orjson.dumps(leg), sent) as upstream:
            return await _listen(upstream, self._clock)

    def _request(self, play: _Play, token_ids: Sequence[int], *, stream: bool) -> Request:
        model = self._engines.model_of(play.decode.spec.name)
        body = {
            "model": model,
            "prompt": list(token_ids),
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
            "stream": stream,
        }
        return Request(Api.COMPLETIONS, body, model, None, stream)

    def _salt(self) -> str:
        return self._random.randbytes(16).hex()

    async def _counted(self, engine: Engine) -> Moved:
        text = await self._engines.text(engine.spec.name, "/metrics")
        return Moved(
            exposition.total(text, exposition.BYTES_TRANSFERRED) or 0.0,
            exposition.total(text, exposition.TRANSFER_SECONDS) or 0.0,
        )

    async def _grown(self, engine: Engine, before: Moved, direction: str) -> Moved:
        """What the engine has read since; engines count with a delay. Raises CanaryFailed where it is nothing."""
        until = self._clock() + _COUNTERS_SECONDS
        while (now := await self._counted(engine)).size <= before.size:
            if self._clock() >= until:
                raise CanaryFailed(f"no KV moved from {direction}")
            await asyncio.sleep(_EVERY_SECONDS / 10)
        return Moved(now.size - before.size, now.seconds - before.seconds)

    def _release(self, play: _Play, handle: KVHandle) -> None:
        self._releases.add_handle(
            handle,
            Why.NOT_KEPT,
            process=play.decode.spec.process,
            decode=play.decode.spec.name,
            kv_revision=play.decode.spec.kv_revision,
            deadline=self._clock() + self._config.handle_ttl_seconds,
        )

    async def _tokens(self, play: _Play, count: int) -> list[int]:
        """Ids of random words, so that no two canaries share a block. No word is less than one token."""
        words = " ".join(f"{self._random.randrange(10_000)}" for _ in range(count))
        body = {"model": self._engines.model_of(play.decode.spec.name), "prompt": words}
        answer = await self._engines.complete(
            play.decode.spec.name, "/tokenize", body, headers.upstream({}, "canary"), seconds=_COUNTERS_SECONDS
        )
        return list(_object(answer.body).get("tokens") or ())[:count]


def _key(report: PairReport) -> tuple[str, str]:
    return report.prefill.process, report.decode.process


class _Nobody:
    """A client that takes everything."""

    started = False

    async def start(self, status: int, content_type: str) -> None:
        self.started = True

    async def write(self, data: bytes) -> None:
        return None

    def write_now(self, data: bytes) -> bool:
        return True

    async def comment(self, data: bytes) -> None:
        pass

    async def end(self, data: bytes = b"") -> None:
        return None


async def _listen(upstream: Upstream, clock: Callable[[], float]) -> Ended:
    return await relay.stream(upstream, _Nobody(), keep_token_ids=True, finished=_nothing, clock=clock)


async def _nothing(ended: Ended) -> None:
    return None


def _proven(play: _Play, handle: KVHandle, held: Sequence[int], following: Sequence[int], block_size: int) -> KVHandle:
    """The handle, trimmed as any other turn's would be."""
    retained = retain(play.key, held, handle.num_tokens, block_size)
    tokens = reusable_tokens(
        retained,
        following,
        key=play.key,
        block_size=block_size,
        remote_num_tokens=handle.num_tokens,
        blocks_per_group=handle.group_sizes,
    )
    return handle if handle.kv_groups > 1 else handle.trimmed(tokens, block_size)


def _refuse_other_than_read(verdict: legs.Verdict | None) -> None:
    if verdict is None:
        raise CanaryFailed("the prefill engine says nothing of the handle: does it run KvloopConnector?")
    if verdict.outcome is not Outcome.READ:
        raise CanaryFailed(f"the prefill engine does not read the decode engine's handle: {verdict.outcome.value}")


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise CanaryFailed("an answer that is not JSON") from error
    return answer if isinstance(answer, Mapping) else {}
