"""APIs without a prefill leg: to a decode engine as they are, but for what is the router's alone.

A request without KV parameters retains nothing there, so that nothing has to be released. Their answers are copied byte
for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import orjson
from aiohttp import web

from kvloop_connector.settings import Role
from kvloop_router import forms, headers, policy, relay, responses
from kvloop_router.client import Client
from kvloop_router.config import Config
from kvloop_router.engines import Engines
from kvloop_router.errors import EngineFailed, EngineUnreachable, RequestError
from kvloop_router.keep_alive import kept_alive
from kvloop_router.metrics import Metrics
from kvloop_router.request import CONVERSATION_FIELD, parse_json, refuse_own_fields, require_model
from kvloop_router.turn_log import TurnReport

GENERATING = (responses.PATH, headers.MESSAGES)
"""These generate, but give no handle that could be proven or released."""

_POOLING = (
    "/v1/embeddings",
    "/v2/embed",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/score",
    "/pooling",
    "/classify",
    "/generative_scoring",
)
_TOKENS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
_FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
PATHS = (*GENERATING, *_POOLING, *_TOKENS, *_FORMS)
"""All that is passed through; none of it leaves a state in an engine."""

_SALT = "cache_salt"
_ATTEMPTS = 2

Salt = Callable[[str | None], str | None]
"""The salt for the engine's prefix cache, of the request's tenant and of the salt that the client itself chose."""


class PassThrough:
    """Passes requests through."""

    def __init__(self, *, config: Config, engines: Engines, metrics: Metrics, random: Random) -> None:
        self._engines = engines
        self._metrics = metrics
        self._random = random
        self._set_salt = config.cache_salt
        self._timeouts = config.timeouts

    async def read(
        self, request: web.Request, models: frozenset[str], report: TurnReport, salt: Salt
    ) -> tuple[bytes, str]:
        """The body to send on, and its content type. Raises RequestError for what no client may send.

        JSON whatever its content type says, except for the APIs that take forms: engines do not all look at it.
        """
        if request.path in _FORMS:
            return await forms.checked(request, models)
        raw = await request.read()
        body = parse_json(raw)
        refuse_own_fields(body)
        if request.path in GENERATING:
            report.model = require_model(body, models)
            if not isinstance(body.get("stream"), bool | None):
                raise RequestError("'stream' must be a boolean.", param="stream", code="invalid_type")
            report.streamed = bool(body.get("stream"))
        elif body.get("model") is not None:
            report.model = require_model(body, models)
        if not isinstance(body.get(_SALT), str | None):
            raise RequestError(f"'{_SALT}' must be a string.", param=_SALT, code="invalid_type")
        sent = self._salted(request.path, body, salt)
        sent.pop(CONVERSATION_FIELD, None)
        if request.path == responses.PATH:
            sent = responses.stateless(sent)
        return (raw if sent == body else orjson.dumps(sent)), "application/json"

    async def send(
        self, request: web.Request, data: bytes, content_type: str, client: Client, report: TurnReport
    ) -> None:
        """Copy an engine's answer to the client. Raises Unavailable and EngineError as a turn does; one that failed
        before the first byte is asked for once more, of another engine if there is one."""
        sent = headers.upstream(request.headers, report.request_id, content_type)
        report.phase = "decode"
        tried: set[str] = set()
        for attempt in range(_ATTEMPTS):
            report.decode = policy.choose_one(
                self._engines.snapshot(report.model or None), self._random, Role.DECODE, tried
            )
            try:
                with report.leg("decode", report.decode) as leg:
                    async with self._engines.stream(
                        report.decode,
                        request.path,
                        data,
                        leg.headers(sent),
                        stall_seconds=self._timeouts.decode_stall_seconds,
                    ) as upstream:
                        await relay.copy(kept_alive(upstream, client, self._timeouts.keep_alive_seconds), client)
            except (EngineUnreachable, EngineFailed) as error:
                report.attempts.append(f"decode {error}")
                if client.started or attempt + 1 == _ATTEMPTS:
                    raise
                tried.add(report.decode)
                self._metrics.retries.labels("decode").inc()
            else:
                return

    def _salted(self, path: str, body: Mapping[str, Any], salt: Salt) -> dict[str, Any]:
        """Where engines compute nothing, no salt is sent."""
        sent = dict(body)
        if self._set_salt:
            own = sent.pop(_SALT, None)
            if path not in _TOKENS:
                sent[_SALT] = salt(own)
        return sent
