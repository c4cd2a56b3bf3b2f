"""``python -m kvloop_sim serve MODEL …``: a simulated vLLM engine, started as vLLM is."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress

import aiohttp
from aiohttp import web

from kvloop_sim.driver import EngineDriver
from kvloop_sim.engine import Engine
from kvloop_sim.faults import FaultPlan, Faults
from kvloop_sim.metrics import Metrics
from kvloop_sim.options import DEFAULT_VERSION, Options, UsageError, parse
from kvloop_sim.server import Server
from kvloop_sim.side_channel import (
    EngineClock,
    Identity,
    Pairs,
    SideChannelClient,
    SideChannelHandlers,
    side_channel_application,
)

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulator; 0 after a clean end, 1 after the engine died, 2 on a command line that cannot work."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-v"]):
        print(DEFAULT_VERSION)  # noqa: T201
        return 0
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    try:
        options = parse(words, os.environ)
    except UsageError as error:
        print(f"kvloop-sim: error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return asyncio.run(run(options, os.environ))


async def run(options: Options, environment: Mapping[str, str]) -> int:
    """Serve until a signal or the engine's death; the exit status."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    with suppress(TimeoutError):
        # A model is loaded before anything is served.
        await asyncio.wait_for(signalled.wait(), options.load_seconds)
        return 0
    engine = Engine(options.engine)
    metrics, clock, pairs, faults = (
        Metrics(engine, options.served_names[0]),
        EngineClock(),
        Pairs(),
        FaultPlan(Faults()),
    )
    faults.order(options.faults)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        connector = options.engine.connector
        identity = peers = None
        if connector is not None:
            identity = Identity(
                agent=str(uuid.uuid4()),
                name=environment.get("POD_NAME", f"{options.host}:{options.port}"),
                compatibility=options.compatibility,
                connector=connector,
            )
            peers = SideChannelClient(session, identity, pairs=pairs, clock=clock)
        driver = await stack.enter_async_context(
            EngineDriver(engine, peers=peers, pairs=pairs, clock=clock, faults=faults, metrics=metrics)
        )
        if identity is not None and connector is not None:
            handlers = SideChannelHandlers(
                read=driver.read, notified=driver.notified, heartbeat=driver.heartbeat, clock=clock
            )
            application = side_channel_application(identity, pairs, handlers)
            await _listen(stack, application, connector.host, connector.port)
        context = _tls(options)
        await _listen(stack, Server(options, driver, metrics).application(), options.host, options.port, context)
        log.info(
            "SIMULATED engine: no model runs here. vLLM %s, %s as %s on %s://%s:%d, %s",
            options.version,
            options.model,
            ", ".join(options.served_names),
            "http" if context is None else "https",
            options.host,
            options.port,
            f"{connector.role}, side channel {connector.host}:{connector.port}" if connector else "no KV connector",
        )
        if await _until_end(signalled, driver.died):
            await driver.drain(options.shutdown_timeout)
            driver.abort_all()
            return 0
        # vLLM's watchdog looks every five seconds; until then /health tells.
        with suppress(TimeoutError):
            await asyncio.wait_for(signalled.wait(), options.dead_seconds)
        return 1


def _tls(options: Options) -> ssl.SSLContext | None:
    """With the certificate as it is now; one that is renewed later is not seen, whether vLLM would or not."""
    if not options.certificate_file:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.certificate_file, options.key_file or None)
    return context


async def _listen(
    stack: AsyncExitStack, application: web.Application, host: str, port: int, context: ssl.SSLContext | None = None
) -> None:
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=5)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, host, port, reuse_address=True, ssl_context=context).start()


async def _until_end(signalled: asyncio.Event, died: asyncio.Event) -> bool:
    """Whether it was a signal that came first."""
    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(signalled.wait()), tasks.create_task(died.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    return not died.is_set()


if __name__ == "__main__":
    sys.exit(main())
