"""The OpenAI-compatible API: from an HTTP request to a turn, and from its outcome to an answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import web

from kvloop_router import headers, pass_through, responses, scope
from kvloop_router.admission import Admission
from kvloop_router.api_keys import ApiKeys, Caller
from kvloop_router.client import CLIENT_LEFT, Client
from kvloop_router.config import Config
from kvloop_router.engines import Engines
from kvloop_router.errors import (
    RequestError,
    RouterError,
    StreamBroken,
    Unavailable,
)
from kvloop_router.metrics import CONTENT_TYPE, Metrics
from kvloop_router.pass_through import PassThrough
from kvloop_router.readiness import unready
from kvloop_router.refusal import json_response, refusal
from kvloop_router.relay import ClientGone
from kvloop_router.request import Api, parse, require_model
from kvloop_router.state import State
from kvloop_router.tenant_limits import TenantLimits
from kvloop_router.turn import Turns
from kvloop_router.turn_log import TurnLog, TurnReport

_log = logging.getLogger(__name__)

_REQUEST_ID = web.RequestKey("request_id", str)


class Pod(Protocol):
    """Who answers for all workers of a router."""

    async def answer(self, path: str) -> web.StreamResponse:
        """What a GET of ``path`` gives."""
        ...


class PublicApi:
    """Handlers of the public listener. ``pod``: None where this process is the whole router."""

    def __init__(
        self,
        *,
        config: Config,
        admission: Admission,
        secret: bytes,
        api_keys: ApiKeys,
        engines: Engines,
        turns: Turns,
        state: State,
        log: TurnLog,
        metrics: Metrics,
        clock: Callable[[], float],
        pod: Pod | None = None,
    ) -> None:
        self._config = config
        self._admission = admission
        self._secret = secret
        self._api_keys = api_keys
        self._engines = engines
        self._turns = turns
        self._state = state
        self._log = log
        self._metrics = metrics
        self._clock = clock
        self._pod = pod
        self._limits = TenantLimits(config.limits.concurrent_requests_per_tenant, metrics.over_limit.inc)
        self._pass_through = PassThrough(config=config, engines=engines, metrics=metrics, random=state.random)

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=self._config.limits.body_bytes, middlewares=[self._in_the_apis_shape])
        app.router.add_post(Api.CHAT, self._turn)
        app.router.add_post(Api.COMPLETIONS, self._turn)
        for path in pass_through.PATHS:
            app.router.add_post(path, self._other)
        app.router.add_route("*", responses.STORED, self._stored_response)
        app.router.add_route("*", responses.STORED + "/{rest:.*}", self._stored_response)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_delete("/kvloop/v1/conversations/{conversation}", self._end_conversation)
        app.router.add_get("/metrics", self._expose)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        # By this name people know it from vLLM.
        app.router.add_get("/health", self._readyz)
        return app

    async def _turn(self, request: web.Request) -> web.StreamResponse:
        report = self._report(request)
        client = Client(request, report, self._clock)
        caller = self._caller(request, report)
        self._begin(caller)
        try:
            return await self._answered(client, report, self._play(request, caller, client, report))
        finally:
            self._over(caller)
            self._end(client, report)

    async def _play(
        self, request: web.Request, caller: Caller, client: Client, report: TurnReport
    ) -> web.StreamResponse:
        turn = parse(
            Api(request.path),
            await request.read(),
            conversation=self._named_conversation(request),
            models=self._served_models(),
        )
        report.model, report.streamed = turn.model, turn.stream
        self._refuse_while_draining()
        space = scope.scope(
            self._secret,
            caller.tenant,
            turn.model,
            turn.body.get("cache_salt"),
            set_salt=self._config.cache_salt,
            epoch=self._state.salt_epoch,
        )
        sent = headers.upstream(request.headers, report.request_id)
        async with self._admission.admitted(turn.model, caller.tenant):
            body = await self._turns.play(turn, space, sent, report, client)
        return client.response if body is None else client.answer(200, "application/json", body)

    async def _other(self, request: web.Request) -> web.StreamResponse:
        """An API without a prefill leg."""
        report = self._report(request)
        client = Client(request, report, self._clock)
        caller = self._caller(request, report)
        self._begin(caller)
        try:
            return await self._answered(client, report, self._copy(request, caller, client, report))
        finally:
            self._over(caller)
            if request.path in pass_through.GENERATING:
                self._end(client, report)
            else:
                self._metrics.requests.labels(report.api, str(report.status or client.status)).inc()

    async def _copy(
        self, request: web.Request, caller: Caller, client: Client, report: TurnReport
    ) -> web.StreamResponse:
        report.reason = "api"

        def salt(own: str | None) -> str | None:
            epoch = self._state.salt_epoch
            return scope.scope(self._secret, caller.tenant, report.model, own, set_salt=True, epoch=epoch).salt

        data, content_type = await self._pass_through.read(request, self._served_models(), report, salt)
        self._refuse_while_draining()
        await self._pass_through.send(request, data, content_type, client, report)
        return client.response

    async def _stored_response(self, request: web.Request) -> web.StreamResponse:
        self._caller(request)
        raise responses.not_stored(request.match_info["response"])

    async def _answered(
        self, client: Client, report: TurnReport, work: Coroutine[Any, Any, web.StreamResponse]
    ) -> web.StreamResponse:
        """The outcome of ``work``, whatever it is, as what the client gets."""
        try:
            return await work
        except asyncio.CancelledError:
            self._client_left(report)
            raise
        except ClientGone:
            self._client_left(report)
            return client.response
        except StreamBroken as error:
            # After the first byte there is no error answer: the connection ends, so that nobody takes it for an end.
            report.broken = True
            self._metrics.breaks.labels(error.engine).inc()
            client.abort()
            return client.response
        except (RouterError, web.HTTPException, web.RequestPayloadError) as error:
            response = refusal(error, report.headers(), report.api)
            report.status = response.status
            return response
        except Exception:
            report.status = HTTPStatus.INTERNAL_SERVER_ERROR
            if client.started:
                client.abort()
            raise

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._caller(request)
        models = [self._model_card(name) for name in sorted(self._served_models())]
        return json_response(200, {"object": "list", "data": models})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._caller(request)
        return json_response(200, self._model_card(require_model(request.match_info, self._served_models())))

    def _model_card(self, name: str) -> dict[str, Any]:
        longest = [engine.max_model_len for engine in self._engines if engine.max_model_len]
        return {
            "id": name,
            "object": "model",
            "created": int(self._state.started),
            "owned_by": "kvloop",
            "root": self._config.model.id,
            "parent": None,
            "max_model_len": min(longest, default=None),
        }

    async def _end_conversation(self, request: web.Request) -> web.StreamResponse:
        conversation = request.match_info["conversation"]
        tenant = self._caller(request).tenant
        released = 0
        for model in self._served_models():
            space = scope.scope(self._secret, tenant, model, None, set_salt=self._config.cache_salt)
            released += await self._turns.end_conversation(space, conversation)
        return json_response(
            200, {"id": conversation, "object": "conversation.deleted", "deleted": True, "released": released}
        )

    async def _expose(self, request: web.Request) -> web.StreamResponse:
        if self._pod is not None:
            return await self._pod.answer(request.path)
        return web.Response(body=self._metrics.expose(), headers={"Content-Type": CONTENT_TYPE})

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        if self._pod is not None:
            return await self._pod.answer(request.path)
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        if self._pod is not None:
            return await self._pod.answer(request.path)
        why = unready(self._config, self._state, self._engines)
        return web.Response(text="ok\n") if why is None else web.Response(status=503, text=why + "\n")

    @web.middleware
    async def _in_the_apis_shape(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Errors that no handler saw, such as an unknown path, in the API's own shape."""
        told = {headers.REQUEST_ID: _request_id(request)}
        try:
            response: web.StreamResponse = await handler(request)
        except RequestError as error:
            return refusal(error, told, request.path)
        except web.HTTPException as error:
            fault = RequestError(
                f"{HTTPStatus(error.status).phrase}: {request.method} {request.path}", status=error.status
            )
            refused = refusal(fault, told, request.path)
            if "Allow" in error.headers:
                refused.headers["Allow"] = error.headers["Allow"]
            return refused
        except Exception:  # noqa: BLE001  the last resort: whatever it is, the client gets an answer in the API's shape
            _log.exception("a request ended by an error", extra={"request_id": _request_id(request)})
            return refusal(RequestError("The router failed.", status=500), told, request.path)
        return response

    def _report(self, request: web.Request) -> TurnReport:
        return self._log.begin(_request_id(request), request.path, request.headers)

    def _caller(self, request: web.Request, report: TurnReport | None = None) -> Caller:
        """Who asks. Raises RequestError where keys are configured and none of them is given."""
        caller = self._api_keys.caller(headers.api_keys(request.headers))
        if caller is None:
            raise RequestError("Incorrect API key provided.", code="invalid_api_key", status=401)
        if report is not None:
            report.tenant = caller.name
        return caller

    def _named_conversation(self, request: web.Request) -> str | None:
        names = (headers.CONVERSATION_ID, *self._config.session_headers)
        return next((request.headers[name] for name in names if request.headers.get(name)), None)

    def _served_models(self) -> frozenset[str]:
        return self._engines.models() | {self._config.model.served_name}

    def _refuse_while_draining(self) -> None:
        if self._state.draining:
            raise Unavailable("draining", "This router is shutting down.")

    def _client_left(self, report: TurnReport) -> None:
        report.status = CLIENT_LEFT
        self._metrics.disconnects.labels(report.phase).inc()

    def _begin(self, caller: Caller) -> None:
        """Raises RequestError."""
        self._limits.begins(caller)
        self._state.begins()

    def _over(self, caller: Caller) -> None:
        self._state.ends()
        self._limits.ends(caller)

    def _end(self, client: Client, report: TurnReport) -> None:
        report.seconds = self._clock() - report.began
        report.status = report.status or client.status
        self._metrics.requests.labels(report.api, str(report.status)).inc()
        if not _is_client_error(report.status):
            self._metrics.turn_ended(report)
        self._log.record(report)


def _request_id(request: web.Request) -> str:
    known = request.get(_REQUEST_ID)
    if known is None:
        known = headers.request_id(request.headers.get(headers.REQUEST_ID), secrets.token_hex(16))
        request[_REQUEST_ID] = known
    return known


def _is_client_error(status: int) -> bool:
    return 400 <= status < 500 and status != CLIENT_LEFT
