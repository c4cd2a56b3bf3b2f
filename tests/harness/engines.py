"""Starts prefill and decode engines, simulated or real, as processes. What a test sees is the same for all kinds.

::

    with start(Kind.SIM, directory, [EngineSpec(role=Role.PREFILL), EngineSpec(role=Role.DECODE)]) as engines:
        engines.prefill[0].url

Each engine has a loopback address of its own and the same ports on it, as a pod has. All are started side by side.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import pytest

from kvloop import cpu_engine
from kvloop.engine_plugin import make_plugin_directory
from kvloop.tiny_model import write_model
from kvloop_connector.settings import VERIFIED_ARGUMENTS, KVTransferSettings, Role, Verification, transfer_config
from tests.harness import metrics
from tests.harness.addresses import free_loopback_address
from tests.harness.metrics import EngineMetrics

SERVED_MODEL = "tiny"
HTTP_PORT = 8000
SIDE_CHANNEL_PORT = 5600
START_SECONDS = 600.0
"""Half a minute on an idle machine; a deadline for one with other work. A process that ends is noticed at once."""
STOP_SECONDS = 60.0
KV_REVISION = "0123456789"
GRACE_SECONDS = 30.0
"""What the processes of an engine have to tidy up after its first one has ended."""


class Kind(StrEnum):
    """What serves."""

    SIM = "sim"
    VLLM = "vllm"
    """Real vLLM with its own connector."""
    VLLM_KVLOOP = "vllm-kvloop"
    """Real vLLM with KvloopConnector."""

    @property
    def is_real(self) -> bool:
        return self is not Kind.SIM

    @property
    def verifies(self) -> bool:
        """Whether the prefill engine itself proves what it reads from a handle, which then has to come untouched."""
        return self is Kind.VLLM_KVLOOP


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How one engine is started.

    transfer_config: merged into ``kv_connector_extra_config`` unchecked, for settings that no deployment may have,
        such as a retention of a few seconds.
    kv_blocks: size of the KV cache; few, so that freed blocks are soon used again.
    transfers: False for an engine that exchanges KV with nobody, as a reference for those that do.
    tls: whom to trust where ``arguments`` give the engine a certificate.
    """

    role: Role
    settings: KVTransferSettings = field(default_factory=KVTransferSettings)
    transfer_config: Mapping[str, Any] = field(default_factory=dict)
    prefix_caching: bool = True
    max_model_len: int = 4096
    kv_blocks: int = 256
    transfers: bool = True
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None


RUNNING: Final[list[Engine]] = []
"""The engines that `start` has running now."""


class EngineFailed(AssertionError):
    """An engine ended, or was not ready in time; the message holds the end of its log."""


class Engine:
    """One engine process. ``pod_uid`` is new after each restart, as its engine id is."""

    def __init__(self, kind: Kind, name: str, spec: EngineSpec, *, directory: Path, model: Path) -> None:
        self.kind = kind
        self.name = name
        self.spec = spec
        self.role = spec.role
        self.host = free_loopback_address(HTTP_PORT, SIDE_CHANNEL_PORT)
        self.url = f"{'http' if spec.tls is None else 'https'}://{self.host}:{HTTP_PORT}"
        self.log = directory / f"{name}.log"
        self.pod_uid = ""
        self._model = model
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the process, without waiting for it."""
        assert self._process is None, f"{self.name} runs already"
        self.pod_uid = str(uuid.uuid4())
        arguments = _arguments(self.kind, self.spec, self.host, _key_file(self._directory))
        command = [*_serve_command(self.kind), str(self._model), *arguments]
        environment = {**_environment(self.kind, self._directory), **self.spec.environment}
        environment |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT),
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("supervise.py")), str(GRACE_SECONDS), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait for ``/health``; raises EngineFailed where the process ends or the time is over."""

        def healthy() -> bool:
            self.check_alive()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5, context=self.spec.tls) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, OSError):
                return False

        if not wait_until(healthy, seconds=seconds, every=0.2):
            raise EngineFailed(f"{self.name} was not healthy within {seconds:.0f} s\n{self.log_tail()}")
        if self.kind.is_real:
            cpu_engine.free_affinity(self._group())

    def check_alive(self) -> None:
        """Raises EngineFailed where the process has ended."""
        if self._process is None or self._process.poll() is not None:
            raise EngineFailed(f"{self.name} has ended\n{self.log_tail()}")

    def metrics(self) -> EngineMetrics:
        """The engine's counters now."""
        return metrics.parse(self.metrics_text())

    def metrics_text(self) -> str:
        """The engine's Prometheus exposition now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30, context=self.spec.tls) as answer:
            return str(answer.read().decode())

    def log_tail(self, lines: int = 40) -> str:
        """The end of what the engine wrote."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- end of {self.log}\n" + "\n".join(text.splitlines()[-lines:])

    def resident_bytes(self) -> int:
        """Memory of all the engine's processes, shared pages counted in part (PSS)."""
        total = 0
        for pid in self._group():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
        return total

    def kill(self) -> None:
        """End all of it at once, as a node that fails does."""
        self._end(seconds=0)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within this context the engine computes nothing and neither serves reads nor hears of them.

        The server of a real one goes on taking requests; the simulator is one process, whose connections wait.
        """
        pids = [pid for pid in self._group() if _is_core(self.kind, pid)]
        assert pids, f"{self.name} has no core"
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Send SIGTERM, without waiting."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ask the engine to end, and see to it that it does within ``seconds``."""
        self.ask_to_stop()
        self._end(seconds=seconds)

    def restart(self) -> None:
        """End it at once, start it again on the same address and wait until it is ready."""
        self.kill()
        self.launch()
        self.wait_until_ready()

    def _end(self, *, seconds: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        finally:
            process.stdin.close()

    def _group(self) -> list[int]:
        assert self._process is not None
        return [pid for pid in _pids() if _group_of(pid) == self._process.pid]


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines that exchange KV with one another."""

    kind: Kind
    all: tuple[Engine, ...]
    start_seconds: float

    @property
    def prefill(self) -> list[Engine]:
        return [engine for engine in self.transferring if engine.role is Role.PREFILL]

    @property
    def decode(self) -> list[Engine]:
        return [engine for engine in self.transferring if engine.role is Role.DECODE]

    @property
    def transferring(self) -> list[Engine]:
        """All that exchange KV."""
        return [engine for engine in self.all if engine.spec.transfers]

    def as_discovery_file(self, revision: str = KV_REVISION) -> list[dict[str, str]]:
        """The engines as the router's static discovery lists them."""
        return [
            {
                "name": engine.name,
                "role": engine.role.value,
                "url": engine.url,
                "podUID": engine.pod_uid,
                "kvRevision": revision,
                "zone": "",
            }
            for engine in self.transferring
        ]


@contextmanager
def start(kind: Kind, directory: Path, specs: Sequence[EngineSpec]) -> Iterator[Engines]:
    """Start an engine for each of ``specs`` and stop them all in the end. Logs, model and key are in ``directory``."""
    if kind.is_real:
        engine_environment()
    directory.mkdir(parents=True, exist_ok=True)
    _key_file(directory).write_text(secrets.token_hex(32))
    write_model(directory / "model")
    with _running(_engines(kind, directory, specs, dict.fromkeys(Role, 0))) as engines:
        yield engines


@contextmanager
def start_beside(engines: Engines, specs: Sequence[EngineSpec]) -> Iterator[Engines]:
    """Start more engines that exchange KV with ``engines``: of their kind, with their model and their key."""
    count = {role: sum(engine.role is role for engine in engines.all) for role in Role}
    with _running(_engines(engines.kind, engines.all[0].log.parent, specs, count)) as more:
        yield more


def _engines(kind: Kind, directory: Path, specs: Sequence[EngineSpec], count: dict[Role, int]) -> list[Engine]:
    """Engines that do not run yet. count: how many there are of each role, counted on."""
    engines: list[Engine] = []
    for spec in specs:
        name = f"{kind}-{spec.role}-{count[spec.role]}" if spec.transfers else f"{kind}-alone"
        engines.append(Engine(kind, name, spec, directory=directory, model=directory / "model"))
        count[spec.role] += spec.transfers
    return engines


@contextmanager
def _running(engines: Sequence[Engine]) -> Iterator[Engines]:
    begun = time.monotonic()
    RUNNING.extend(engines)
    try:
        for engine in engines:
            engine.launch()
        for engine in engines:
            engine.wait_until_ready()
        yield Engines(engines[0].kind, tuple(engines), time.monotonic() - begun)
    finally:
        for engine in engines:
            engine.ask_to_stop()
        for engine in engines:
            engine.stop()
            RUNNING.remove(engine)


def wait_until(condition: Callable[[], bool], *, seconds: float = 30.0, every: float = 0.05) -> bool:
    """Ask until ``condition`` holds; returns whether it did before the time was over."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every)
    return True


def engine_environment() -> Path:
    """The environment of real vLLM. Where it is not named, the test is skipped, and fails under CI."""
    named = os.environ.get("KVLOOP_ENGINE_ENVIRONMENT")
    if named and (Path(named) / "bin" / "vllm").exists():
        return Path(named)
    reason = "no real vLLM: run `make engine-environment` and put the path it prints into KVLOOP_ENGINE_ENVIRONMENT"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _serve_command(kind: Kind) -> list[str]:
    if kind is Kind.SIM:
        return [sys.executable, "-m", "kvloop_sim", "serve"]
    return [str(engine_environment() / "bin" / "vllm"), "serve"]


def _key_file(directory: Path) -> Path:
    return directory / "seal-key"


def _arguments(kind: Kind, spec: EngineSpec, host: str, key_file: Path) -> list[str]:
    verification = Verification(key_file=str(key_file), revision=KV_REVISION) if kind.verifies else None
    config = transfer_config(spec.settings, spec.role, verification=verification)
    config["kv_connector_extra_config"] |= spec.transfer_config
    if kind.is_real:
        config["kv_connector_extra_config"] |= cpu_engine.EXTRA_TRANSFER_CONFIG
    return [
        *("--served-model-name", SERVED_MODEL),
        *("--host", host),
        *("--port", str(HTTP_PORT)),
        *cpu_engine.arguments(max_model_len=spec.max_model_len),
        *("--num-gpu-blocks-override", str(spec.kv_blocks)),
        "--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching",
        *(["--no-async-scheduling"] if spec.role is Role.PREFILL else []),
        *(VERIFIED_ARGUMENTS if kind.verifies and spec.transfers else ()),
        *(("--kv-transfer-config", json.dumps(config)) if spec.transfers else ()),
        *spec.arguments,
    ]


def _environment(kind: Kind, directory: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "UCX_", "NIXL_"))}
    if kind is Kind.SIM:
        return kept
    plugin = make_plugin_directory(directory / "plugin", patient=True)
    return {**kept, **cpu_engine.environment(plugin)}


def _is_core(kind: Kind, pid: int) -> bool:
    """Whether it is a process of an engine that schedules, computes or transfers."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    # vLLM names these processes after what they are; its server keeps its command line.
    return command.startswith(b"VLLM::") if kind.is_real else b"kvloop_sim" in command and b"supervise" not in command


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
