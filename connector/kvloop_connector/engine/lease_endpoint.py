"""vLLM endpoint plug-in: the paths by which a router releases and renews what the engine retains.

The entry point ``kvloop_leases`` of the group ``vllm.endpoint_plugins``. What is asked and answered is described in
``kvloop_connector.lease_requests``; the workers' side is ``kvloop_connector.engine.lease_worker``. Where the engine is
not one that this was tried with, the paths answer 501 with the reason and nothing in the engine is called.

Under kvloop's connector the answer to a renewal holds a new sealed deadline for the handle; that of the stock connector
is a field of the handle that the router moves itself.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.version import __version__ as vllm_version

from kvloop_connector.engine.start import TRIED_VERSIONS, seal_key
from kvloop_connector.errors import UnsupportedEngine
from kvloop_connector.lease_ranks import renewable_seconds
from kvloop_connector.lease_requests import PLUGIN, RELEASE_PATH, RENEW_PATH, WORKER_EXTENSION
from kvloop_connector.lease_service import LeaseService, refusal

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvloop.leases")

_CONNECTOR_MODULE = "kvloop_connector.engine.connector"


class LeaseEndpoint:
    """What the entry point makes; vLLM's ``EndpointPlugin``."""

    name = PLUGIN
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._service: LeaseService | None = None
        self._refusal = refusal(UnsupportedEngine("the engine has not started yet"))

    def attach_router(self, app: FastAPI) -> None:
        """Called once, before the server starts."""
        app.add_api_route(RELEASE_PATH, self._release, methods=["POST"])
        app.add_api_route(RENEW_PATH, self._renew, methods=["POST"])

    async def init_state(self, engine_client: EngineClient | None, state: Any, args: Namespace) -> None:
        """Called once, when the engine has started."""
        try:
            self._service = _service(engine_client)
            logger.info("Retained blocks are released by %s and renewed by %s", RELEASE_PATH, RENEW_PATH)
        except UnsupportedEngine as error:
            # Raised from here it would end the server.
            self._refusal = refusal(error)
            logger.warning("Retained blocks can be neither released nor renewed: %s", error)

    async def _release(self, request: Request) -> JSONResponse:
        answer = await self._service.release(await request.body()) if self._service else self._refusal
        return JSONResponse(answer.body, status_code=answer.status)

    async def _renew(self, request: Request) -> JSONResponse:
        answer = await self._service.renew(await request.body()) if self._service else self._refusal
        return JSONResponse(answer.body, status_code=answer.status)


def _service(engine_client: EngineClient | None) -> LeaseService:
    if engine_client is None:
        raise UnsupportedEngine("this server has no engine")
    transfer, parallel = engine_client.vllm_config.kv_transfer_config, engine_client.vllm_config.parallel_config
    if vllm_version.partition("+")[0] not in TRIED_VERSIONS:
        raise UnsupportedEngine(
            f"it was tried with vLLM {', '.join(sorted(TRIED_VERSIONS))}, and this is {vllm_version}"
        )
    if transfer is None:
        raise UnsupportedEngine("the engine has no KV connector")
    if parallel.worker_extension_cls != WORKER_EXTENSION:
        raise UnsupportedEngine(f"start the engine with --worker-extension-cls {WORKER_EXTENSION}")
    if parallel.data_parallel_size != 1:
        # Of several engines behind one server only the first one's answer is to be had.
        raise UnsupportedEngine("it was not tried with data parallelism")
    extra = transfer.kv_connector_extra_config
    renewable_seconds(extra)
    sealed = transfer.kv_connector_module_path == _CONNECTOR_MODULE and transfer.kv_role == "kv_consumer"

    async def call(method: str, arguments: tuple[Any, ...]) -> Sequence[Any]:
        # No time limit: replies of a call that was given up would be taken for those of the next.
        return list(await engine_client.collective_rpc(method, args=arguments))

    return LeaseService(
        call=call,
        key=seal_key(extra, lambda path: Path(path).read_bytes()) if sealed else None,
        # The scheduler's clock: the server runs beside it, and on one machine all processes share this clock.
        clock=time.perf_counter,
        wall=time.time,
    )
