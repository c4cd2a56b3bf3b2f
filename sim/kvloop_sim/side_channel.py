"""The side channel between simulated engines: handshake, reads, completion notifications, heartbeats.

HTTP in place of ZMQ and RDMA, on the address that vLLM's side channel would have. Both directions are recorded:
``pairs`` tells with whom this engine ever shook hands, or refused to.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kvloop_sim.transfer import Compatibility, ConnectorSettings, Location

_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30)


class TransferError(Exception):
    """A handshake, read or notification that failed."""


class HandshakeRefused(TransferError):
    """The peer is not the engine that was meant, or not compatible."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine with which hands were shaken. clock_ahead: its clock less ours, in seconds."""

    engine_id: str
    agent: str
    host: str
    port: int
    clock_ahead: float

    @property
    def url(self) -> str:
        """Where its side channel is."""
        return f"http://{_host(self.host)}:{self.port}"


@dataclass(slots=True)
class Pair:
    """A peer as this engine met it. ``initiated``: whether this engine was the reader."""

    engine_id: str
    name: str
    version: str
    compatibility: str
    initiated: bool
    accepted: bool
    reason: str = ""
    reads: int = 0
    bytes: int = 0


class Pairs:
    """Every peer that this process ever met, in order."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, bool], Pair] = {}

    def record(self, pair: Pair) -> None:
        """Note a handshake; one entry a peer and direction, a refusal is never overwritten."""
        known = self._pairs.get((pair.engine_id, pair.initiated))
        if known is None or known.accepted:
            self._pairs[pair.engine_id, pair.initiated] = pair

    def count_read(self, engine_id: str, size: int) -> None:
        """Note that ``size`` bytes were read from a peer."""
        pair = self._pairs.get((engine_id, True))
        if pair is not None:
            pair.reads += 1
            pair.bytes += size

    def as_json(self) -> list[dict[str, Any]]:
        """All entries, for ``GET /sim/pairs``."""
        return [
            {
                "engine_id": pair.engine_id,
                "name": pair.name,
                "version": pair.version,
                "compatibility": pair.compatibility,
                "initiated": pair.initiated,
                "accepted": pair.accepted,
                "reason": pair.reason,
                "reads": pair.reads,
                "bytes": pair.bytes,
            }
            for pair in self._pairs.values()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this engine is to its peers. agent: new in every process, unlike an engine id that was configured."""

    agent: str
    name: str
    compatibility: Compatibility
    connector: ConnectorSettings

    def as_json(self) -> dict[str, str]:
        """What a handshake says."""
        return {
            "engine_id": self.connector.engine_id,
            "agent": self.agent,
            "name": self.name,
            "version": self.compatibility.version,
            "compatibility": self.compatibility.digest,
        }


class SideChannelClient:
    """The reader's end. Peers are cached by engine id, as vLLM does, and never looked up again."""

    def __init__(
        self, session: aiohttp.ClientSession, identity: Identity, *, pairs: Pairs, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._identity = identity
        self._pairs = pairs
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def known(self, engine_id: str) -> Peer | None:
        """The peer, if hands were shaken before."""
        return self._peers.get(engine_id)

    async def connect(self, location: Location, *, seconds: float) -> Peer:
        """The engine at ``location``; shakes hands, taking ``seconds``, where that never happened."""
        lock = self._locks.setdefault(location.engine_id, asyncio.Lock())
        async with lock:
            peer = self._peers.get(location.engine_id)
            if peer is None:
                await asyncio.sleep(seconds)
                peer = self._peers[location.engine_id] = await self._handshake(location)
        return peer

    async def read(self, peer: Peer, request_id: str, blocks: Sequence[int], block_size: int) -> list[array[int]]:
        """The contents of the peer's ``blocks``."""
        body = {"agent": peer.agent, "request_id": request_id, "blocks": list(blocks)}
        data = await self._post(peer, "/read", body)
        width = 8 * block_size
        if len(data) != width * len(blocks):
            raise TransferError("the peer sent another number of blocks")
        return [array("Q", data[start : start + width]) for start in range(0, len(data), width)]

    async def notify(self, peer: Peer, request_id: str) -> None:
        """Tell the peer that its blocks for ``request_id`` are no longer needed."""
        await self._post(peer, "/notify", {"agent": peer.agent, "request_id": request_id})

    async def heartbeat(self, peer: Peer, request_ids: Sequence[str]) -> None:
        """Tell the peer that its blocks for ``request_ids`` are still waited for."""
        await self._post(peer, "/heartbeat", {"agent": peer.agent, "request_ids": list(request_ids)})

    async def _post(self, peer: Peer, path: str, body: dict[str, Any]) -> bytes:
        try:
            async with self._session.post(peer.url + path, json=body, timeout=_REQUEST_TIMEOUT) as response:
                data = await response.read()
                if response.status != 200:
                    raise TransferError(f"{path}: {response.status} {data[:200].decode(errors='replace')}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransferError(f"{path}: {type(error).__name__}") from error
        return data

    async def _handshake(self, location: Location) -> Peer:
        address = Peer(location.engine_id, "", location.host, location.port, 0.0)
        try:
            async with self._session.post(
                address.url + "/handshake", json=self._identity.as_json(), timeout=_REQUEST_TIMEOUT
            ) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TransferError(f"handshake: {type(error).__name__}") from error
        reason = refusal(self._identity, str(answer["compatibility"]))
        if not reason and answer["engine_id"] != location.engine_id:
            reason = f"engine id mismatch: expected {location.engine_id}"
        self._pairs.record(_pair(answer, initiated=True, reason=reason))
        if reason:
            raise HandshakeRefused(reason)
        ahead = float(answer["clock"]) - self._clock()
        return Peer(location.engine_id, str(answer["agent"]), location.host, location.port, ahead)


class SideChannelHandlers:
    """What the owner of retained blocks does on the side channel's requests."""

    def __init__(
        self,
        *,
        read: Callable[[str, Sequence[int]], list[array[int]]],
        notified: Callable[[str], None],
        heartbeat: Callable[[Sequence[str]], None],
        clock: Callable[[], float],
    ) -> None:
        self.read = read
        self.notified = notified
        self.heartbeat = heartbeat
        self.clock = clock


def side_channel_application(identity: Identity, pairs: Pairs, handlers: SideChannelHandlers) -> web.Application:
    """The serving end."""

    def body_for_us(body: dict[str, Any]) -> dict[str, Any]:
        # A process that was replaced by another on the same address is gone for whoever knew it.
        if body.get("agent") != identity.agent:
            raise web.HTTPConflict(text="NIXL_ERR_REMOTE_DISCONNECT")
        return body

    async def handshake(request: web.Request) -> web.Response:
        peer = await request.json()
        pairs.record(_pair(peer, initiated=False, reason=refusal(identity, str(peer["compatibility"]))))
        return web.json_response({**identity.as_json(), "clock": handlers.clock()})

    async def read(request: web.Request) -> web.Response:
        body = body_for_us(await request.json())
        try:
            contents = handlers.read(str(body["request_id"]), body["blocks"])
        except ValueError as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return web.Response(body=b"".join(block.tobytes() for block in contents))

    async def notify(request: web.Request) -> web.Response:
        body = body_for_us(await request.json())
        handlers.notified(str(body["request_id"]))
        return web.Response()

    async def heartbeat(request: web.Request) -> web.Response:
        body = body_for_us(await request.json())
        handlers.heartbeat([str(request_id) for request_id in body["request_ids"]])
        return web.Response()

    application = web.Application(client_max_size=64 * 2**20)
    application.router.add_post("/handshake", handshake)
    application.router.add_post("/read", read)
    application.router.add_post("/notify", notify)
    application.router.add_post("/heartbeat", heartbeat)
    return application


def refusal(identity: Identity, compatibility: str) -> str:
    """Why hands are not shaken; empty where they are."""
    if identity.connector.enforce_compatibility and compatibility != identity.compatibility.digest:
        return "NIXL compatibility hash mismatch"
    return ""


class EngineClock:
    """The engine's clock, in seconds. Tests may put it forward."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self._ahead

    def advance(self, seconds: float) -> None:
        """Put the clock forward."""
        self._ahead += seconds


def _pair(said: dict[str, Any], *, initiated: bool, reason: str) -> Pair:
    return Pair(
        engine_id=str(said["engine_id"]),
        name=str(said["name"]),
        version=str(said["version"]),
        compatibility=str(said["compatibility"]),
        initiated=initiated,
        accepted=not reason,
        reason=reason,
    )


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
