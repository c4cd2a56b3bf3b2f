"""Simulated engines in this process: their API on a loopback port, what goes between them by a call."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from kvloop_connector.lease_requests import ALLOW_VARIABLE, WORKER_EXTENSION
from kvloop_connector.settings import KVTransferSettings, Role, transfer_config_argument
from kvloop_sim.driver import EngineDriver
from kvloop_sim.faults import FaultPlan, Faults
from kvloop_sim.metrics import Metrics
from kvloop_sim.options import Options, parse
from kvloop_sim.server import Server
from kvloop_sim.side_channel import (
    EngineClock,
    HandshakeRefused,
    Identity,
    Pairs,
    Peer,
    SideChannelClient,
    TransferError,
)
from kvloop_sim.transfer import Location
from tests.states.counting import CountingEngine, ask_of
from tests.states.verifying import VerifyingEngine

HOST: Final = "127.0.0.1"
MODEL: Final = "tiny"
KV_REVISION: Final = "0123456789"
BLOCK_SIZE: Final = 16
THRESHOLD: Final = 32
TTL_SECONDS: Final = 60
_LONGEST_PROMPT: Final = 4096


@dataclass(slots=True)
class Network:
    """All engines that run, by the port of their side channel, and what went between them.

    known_to_be_gone: engine ids of which the router was told, or could see, that they are gone.
    told: the process that told an issuer that what it retains for a request is not needed any more.
    violations: what no router may bring about.
    """

    now: Callable[[], float]
    at: dict[int, LocalEngine] = field(default_factory=dict)
    known_to_be_gone: set[str] = field(default_factory=set)
    reads: dict[tuple[str, str], list[int | None]] = field(default_factory=dict)
    told: dict[tuple[str, str], str] = field(default_factory=dict)
    scope_of: dict[int, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def read(self, reader: LocalEngine, issuer: LocalEngine, request_id: str) -> None:
        """Blocks that ``issuer`` retains for a request are read."""
        who = reader.loading_from(request_id)
        readers = self.reads.setdefault((issuer.engine_id, request_id), [])
        readers.append(who)
        if len(readers) > 1:
            self.violations.append(f"what {issuer.name} retains for {request_id} is read by {readers}")
        whose = ask_of(request_id)
        if whose is not None and who is not None and self.scope_of.get(whose) != self.scope_of.get(who):
            self.violations.append(f"ask-{who} of {self.scope_of.get(who)} reads what {self.scope_of.get(whose)} asked")

    def come(self, reader: LocalEngine, issuer: LocalEngine, request_id: str, why: str) -> None:
        """Somebody comes with a handle."""
        what = issuer.engine_id, request_id
        retained = request_id in issuer.engine.retained
        if why == "notify" and retained:
            self.told[what] = reader.agent
        # A release is tried once more where the leg that carried it failed; its engine may have ended in between.
        again = why == "notify" and self.told.get(what, reader.agent) not in {each.agent for each in self.at.values()}
        if not retained and not again:
            self.violations.append(f"{reader.name} comes to {why} {request_id} of {issuer.name}: nothing is retained")

    def stale(self, reader: LocalEngine, engine_id: str) -> None:
        """Somebody comes with a handle of an engine process that has ended."""
        if engine_id in self.known_to_be_gone:
            self.violations.append(f"{reader.name} comes with a handle of {engine_id}, which is known to be gone")


class _Peers(SideChannelClient):
    """The reader's end, without a wire."""

    def __init__(self, network: Network, mine: LocalEngine, identity: Identity, pairs: Pairs, clock: EngineClock):
        # Nothing that would use the session is left.
        super().__init__(None, identity, pairs=pairs, clock=clock)  # type: ignore[arg-type]
        self._network = network
        self._mine = mine

    async def _handshake(self, location: Location) -> Peer:
        other = self._network.at.get(location.port)
        if other is None or other.engine_id != location.engine_id:
            self._network.stale(self._mine, location.engine_id)
            raise HandshakeRefused("another engine is there" if other else "nobody is there")
        return Peer(location.engine_id, other.agent, location.host, location.port, 0.0)

    async def _post(self, peer: Peer, path: str, body: dict[str, Any]) -> bytes:
        await asyncio.sleep(0)
        other = self._network.at.get(peer.port)
        if other is None or other.agent != peer.agent:
            self._network.stale(self._mine, peer.engine_id)
            raise TransferError("NIXL_ERR_REMOTE_DISCONNECT")
        if path == "/heartbeat":
            other.driver.heartbeat(body["request_ids"])
            return b""
        self._network.come(self._mine, other, body["request_id"], path[1:])
        if path == "/notify":
            other.driver.notified(body["request_id"])
            return b""
        self._network.read(self._mine, other, body["request_id"])
        try:
            contents = other.driver.read(body["request_id"], body["blocks"])
        except ValueError as error:
            raise TransferError(str(error)) from error
        return b"".join(block.tobytes() for block in contents)


class _LoopClock(EngineClock):
    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self._ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What all engines of a house have in common.

    verifying: with KvloopConnector. leases: with kvloop's plug-in. reasoning: the model thinks first, and the template
    leaves that out of the history. path: how the router chooses the path of a turn (``pathChoice.mode``).
    """

    verifying: bool = False
    leases: bool = False
    reasoning: bool = False
    path: str = "Warm"

    def options(self, role: Role, port: int, *, prefix_caching: bool) -> Options:
        """The command line of one engine."""
        settings = KVTransferSettings(decoder_kv_blocks_ttl=TTL_SECONDS, kv_recompute_threshold=THRESHOLD)
        arguments = [
            "serve",
            "model",
            *("--served-model-name", MODEL),
            *("--lora-modules", f"{MODEL}-1=one", f"{MODEL}-2=two"),
            *("--limit-mm-per-prompt", '{"image": 20}'),
            *("--block-size", str(BLOCK_SIZE)),
            *("--max-model-len", str(_LONGEST_PROMPT)),
            *("--num-gpu-blocks-override", "2048"),
            *("--kv-transfer-config", transfer_config_argument(settings, role)),
            *("--sim-timing", json.dumps({"handshake": 0.05, "handshake_timeout": 1.0})),
            *(() if prefix_caching else ("--no-enable-prefix-caching",)),
            *(("--sim-reasoning-tokens", "4", "--sim-strip-reasoning") if self.reasoning else ()),
            *(("--worker-extension-cls", WORKER_EXTENSION) if self.leases else ()),
        ]
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        return parse(arguments, environment | ({ALLOW_VARIABLE: "1"} if self.leases else {}))


class LocalEngine:
    """One engine, which can be ended and started again: on the same port, as another process."""

    def __init__(self, name: str, role: Role, kind: Kind, network: Network, *, number: int, prefix_caching: bool):
        self.name = name
        self.role = role
        self.pod_uid = ""
        self.agent = ""
        self.port = 0
        self._kind = kind
        self._network = network
        self._number = number
        self._prefix_caching = prefix_caching
        self._stack = AsyncExitStack()

    @property
    def engine_id(self) -> str:
        """Of the process that runs."""
        assert self.options.engine.connector is not None
        return self.options.engine.connector.engine_id

    async def start(self) -> None:
        """Start it as a new process."""
        self.pod_uid, self.agent = str(uuid.uuid4()), str(uuid.uuid4())
        self.options = self._kind.options(self.role, self._number, prefix_caching=self._prefix_caching)
        connector = self.options.engine.connector
        assert connector is not None
        clock, pairs = _LoopClock(), Pairs()
        settings = self.options.engine
        self.engine = VerifyingEngine(settings, clock) if self._kind.verifying else CountingEngine(settings)
        identity = Identity(
            agent=self.agent, name=self.name, compatibility=self.options.compatibility, connector=connector
        )
        metrics = Metrics(self.engine, MODEL)
        self.driver = EngineDriver(
            self.engine,
            peers=_Peers(self._network, self, identity, pairs, clock),
            pairs=pairs,
            clock=clock,
            faults=FaultPlan(Faults()),
            metrics=metrics,
        )
        await self._stack.enter_async_context(self.driver)
        self._network.at[self._number] = self
        runner = web.AppRunner(
            Server(self.options, self.driver, metrics).application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.1,
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, HOST, self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        """End it at once; requests that run fail."""
        self._network.at.pop(self._number, None)
        self.driver.die("killed")
        await self._stack.aclose()

    def entry(self, **more: Any) -> dict[str, Any]:
        """As the router's discovery has it."""
        return {
            "name": self.name,
            "role": self.role.value,
            "url": f"http://{HOST}:{self.port}",
            "podUID": self.pod_uid,
            "kvRevision": KV_REVISION,
            **more,
        }

    def loading_from(self, request_id: str) -> int | None:
        """Whose request reads what another engine retains for ``request_id``."""
        for request in self.engine.loading:
            if (request.params or {}).get("remote_request_id") == request_id:
                return ask_of(request.request_id)
        return None

    @property
    def idle(self) -> bool:
        """Whether no request is there."""
        engine = self.engine
        return not (engine.waiting or engine.loading or engine.running or engine.hung)
