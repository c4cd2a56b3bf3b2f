"""What stands in for the images of a resource on this machine: simulated engines, real vLLM on the CPU, the router."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvloop import cpu_engine
from kvloop.engine_plugin import make_plugin_directory
from kvloop.node.errors import NodeError
from kvloop.node.images import ProcessImage

ENVIRONMENT_VARIABLE = "KVLOOP_ENGINE_ENVIRONMENT"
_MODEL_PARAMETERS = "10M"
"""Enough that computing a prompt takes visibly longer than pulling its KV; few enough for one core an engine."""

_ENTRYPOINT = ("vllm", "serve")


class EngineKind(StrEnum):
    """What the pods of the two roles run."""

    SIM = "sim"
    VLLM = "vllm"


class NoEngineEnvironment(NodeError):
    """Real engines were asked for, and there is no environment with vLLM."""


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """An environment with vLLM's CPU build and NIXL.

    version: as in ``0.32.0``.
    unofficial: whether it is put together from the parts of two releases
        (``requirements/unofficial-engine-environment.sh``).
    """

    path: Path
    version: str
    unofficial: bool = False

    @classmethod
    def find(cls) -> EngineEnvironment:
        """The one that the environment variable names. Raises ``NoEngineEnvironment``, which tells the remedy."""
        named = os.environ.get(ENVIRONMENT_VARIABLE, "")
        remedy = f"run `make engine-environment` and put the path of the environment into {ENVIRONMENT_VARIABLE}"
        if not named:
            raise NoEngineEnvironment(f"{ENVIRONMENT_VARIABLE} is not set: {remedy}")
        path = Path(named).absolute()
        if not (path / "bin" / "vllm").exists():
            raise NoEngineEnvironment(f"{ENVIRONMENT_VARIABLE}: no bin/vllm in {path}: {remedy}")
        code = "import importlib.metadata as m; print(m.version('vllm'))"
        asked = subprocess.run(  # noqa: S603 - the interpreter that the user named
            [path / "bin" / "python", "-c", code], capture_output=True, text=True, check=False
        )
        if asked.returncode != 0:
            raise NoEngineEnvironment(f"no vLLM in {path}: {asked.stderr.strip().rpartition(chr(10))[2]}; {remedy}")
        version, _, build = asked.stdout.strip().partition("+")
        return cls(path, version, unofficial="unofficial" in build)

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"


def cache_directory() -> Path:
    """Where what is slow to make is kept between runs."""
    return Path(os.environ.get("KVLOOP_CACHE") or Path.home() / ".cache" / "kvloop")


def tiny_model(environment: EngineEnvironment) -> Path:
    """The directory of a random-weight model, made on the first call."""
    maker = Path(cpu_engine.__file__).with_name("tiny_model.py")
    digest = hashlib.sha256(maker.read_bytes()).hexdigest()[:12]
    target = cache_directory() / f"tiny-model-{_MODEL_PARAMETERS}-{digest}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        draft = Path(scratch) / "model"
        command = [str(environment.python), str(maker), str(draft), "--parameters", _MODEL_PARAMETERS]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - a module of this package
        try:
            draft.rename(target)
        except OSError:
            # Somebody else made it meanwhile, byte for byte the same.
            if not target.is_dir():
                raise
    return target


def simulated_engine(directory: Path, *, version: str, time_scale: float, stream_handles: bool) -> ProcessImage:
    """vLLM's command line, answered by the simulator. ``directory`` gets the program that stands for ``vllm``.

    stream_handles: whether streamed answers carry the handle, on whichever version.
    """
    words = [sys.executable, "-m", "kvloop_sim"]
    own = ["--sim-version", version, "--sim-time-scale", f"{time_scale:g}"]
    if stream_handles:
        own.append("--sim-stream-handles")
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "vllm"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@" {shlex.join(own)}\n')
    program.chmod(0o755)
    return ProcessImage(path=(directory,), entrypoint=_ENTRYPOINT)


def real_engine(environment: EngineEnvironment, directory: Path) -> ProcessImage:
    """Real vLLM on the CPU, several to a machine. ``directory`` gets kvloop's engine plug-in."""
    plugin = make_plugin_directory(directory / "plugin", patient=True)
    own = {
        # Without it, each start asks a process of its own what the model's class can do.
        "VLLM_CACHE_ROOT": str(cache_directory() / "vllm"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return ProcessImage(
        path=(environment.path / "bin",),
        entrypoint=_ENTRYPOINT,
        environment=cpu_engine.environment(plugin) | own,
        when_ready=cpu_engine.free_affinity,
    )


def router() -> ProcessImage:
    """The router, from the environment that this process runs in."""
    scripts = Path(sys.executable).parent
    return ProcessImage(path=(scripts,), entrypoint=("kvloop-router",))
