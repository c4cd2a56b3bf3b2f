"""The routers under test: how each is started so that it plays a prefill and a decode leg a turn.

Each runs with its defaults, but for what the engines here cannot do: no canary, which looks at counters of bytes, and
no sampling of truth, which looks at log-probabilities.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Engines:
    """Where the engines are."""

    prefill: Address
    decode: Address


@dataclass(frozen=True, slots=True)
class Start:
    """How a router is started. ``environment``: beside this process's own."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Router:
    """A router. ``retains``: whether its engines are bidirectional. ``start``: given a directory and a port."""

    name: str
    retains: bool
    start: Callable[[Path, int, Engines], Start]


def kvloop(name: str, *, connector: str, reuse: bool, store: str | None = None, workers: int = 1) -> Router:
    """kvloop in one of its modes; without reuse, the engines transfer one way only.

    store: the URL of a server of handles; None: they are kept in the router's memory, which takes one worker.
    """

    def start(directory: Path, port: int, engines: Engines) -> Start:
        listed = [
            {"name": role, "role": role, "url": _url(address), "podUID": role, "kvRevision": "a", "zone": ""}
            for role, address in (("prefill", engines.prefill), ("decode", engines.decode))
        ]
        (directory / "engines.json").write_text(json.dumps(listed))
        (directory / "digest-key").write_text("ab" * 32)
        (directory / "admin-token").write_text("token")
        settings = {
            "listen": {"host": "127.0.0.1", "port": port},
            "admin": {"host": "127.0.0.1", "port": 0, "tokenFile": str(directory / "admin-token")},
            "model": {"id": "bench", "servedName": "bench"},
            "discovery": {"file": str(directory / "engines.json")},
            "digestKeyFile": str(directory / "digest-key"),
            "kvTransfer": {"connector": connector, "bidirectionalKvXfer": reuse, "retainedShareLimit": 1.0},
            "engine": {"promptTokenIds": True, "streamHandles": True, "multiGroupReuse": True},
            "reuse": reuse,
            "canary": {"enabled": False},
            "truthSampling": {"everyNthWarmTurn": 0},
            "workers": workers,
        }
        if store is not None:
            settings["handleStore"] = {"kind": "valkey", "url": store}
        # JSON is YAML too.
        (directory / "router.yaml").write_text(json.dumps(settings))
        command = (sys.executable, "-m", "kvloop_router", "--config", str(directory / "router.yaml"))
        return Start(command, {})

    return Router(name, retains=reuse, start=start)


def vllm_router(environment: Path) -> Router:
    """The Rust router that the vLLM project publishes."""

    def start(directory: Path, port: int, engines: Engines) -> Start:
        command = [str(environment / "bin" / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        command += ["--prefill", _url(engines.prefill), "--decode", _url(engines.decode)]
        command += ["--policy", "power_of_two", "--host", "127.0.0.1", "--port", str(port)]
        # Its metrics listen on a port of their own, which may be taken.
        command += ["--prometheus-port", str(port + 1)]
        return Start(tuple(command), {})

    return Router("vllm-router", retains=False, start=start)


def multi_turn_proxy(environment: Path, proxy: Path) -> Router:
    """vLLM's example of a proxy that sends handles back to prefill."""

    def start(directory: Path, port: int, engines: Engines) -> Start:
        command = [str(environment / "bin" / "python"), str(proxy), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prefiller-hosts", engines.prefill[0], "--prefiller-ports", str(engines.prefill[1])]
        command += ["--decoder-hosts", engines.decode[0], "--decoder-ports", str(engines.decode[1])]
        return Start(tuple(command), {})

    return Router("multi-turn proxy", retains=True, start=start)


def xpyd_proxy(environment: Path) -> Router:
    """A proxy for any number of prefill and decode engines."""

    def start(directory: Path, port: int, engines: Engines) -> Start:
        settings = {
            "model": "bench",
            "prefill": [_host(engines.prefill)],
            "decode": [_host(engines.decode)],
            "host": "127.0.0.1",
            "port": port,
            "disaggregated_mode": "nixl",
            # Other ways of choosing ask a tokenizer, which would have to be downloaded.
            "scheduling": "roundrobin",
        }
        (directory / "xpyd.yaml").write_text(json.dumps(settings))
        command = (str(environment / "bin" / "xpyd"), "proxy", "--config", str(directory / "xpyd.yaml"))
        return Start(command, {})

    return Router("xpyd-proxy", retains=False, start=start)


def _host(address: Address) -> str:
    return "{}:{}".format(*address)


def _url(address: Address) -> str:
    return f"http://{_host(address)}"
