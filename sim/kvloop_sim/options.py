"""The command line of ``vllm serve``, as far as a simulator can follow it.

Flags of vLLM that are not modelled are accepted and ignored, with their value; flags of the simulator start with
``--sim-``. A transfer configuration that vLLM would refuse is refused.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvloop_sim.generation import Style
from kvloop_sim.leases import LeaseSettings, lease_settings
from kvloop_sim.records import EngineSettings
from kvloop_sim.timing import TimingModel
from kvloop_sim.transfer import Compatibility, ConnectorSettings, Policy

DEFAULT_VERSION: Final = "0.33.0"
DEFAULT_PORT: Final = 8000
DEFAULT_MAX_LOGPROBS: Final = 20

_CONFIG_FIELDS: Final = frozenset(
    {
        "kv_connector",
        "engine_id",
        "kv_buffer_device",
        "kv_role",
        "kv_port",
        "kv_connector_extra_config",
        "kv_connector_module_path",
        "enable_permute_local_kv",
        "kv_load_failure_policy",
    }
)
_REMOVED_FIELDS: Final = frozenset({"kv_rank", "kv_parallel_size", "kv_ip", "kv_buffer_size"})
_ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")


class UsageError(ValueError):
    """A command line that vLLM would not start with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A parsed command line. shutdown_timeout, load_seconds and dead_seconds are seconds.

    adapters: names of LoRA adapters. images: how many a prompt may have.
    leases: of kvloop's plug-in; None without it.
    certificate_file, key_file: what is shown where TLS is spoken; the first is empty where it is not, the second where
        the key stands beside the certificate.
    """

    model: str
    served_names: tuple[str, ...]
    host: str = "0.0.0.0"  # noqa: S104 - vLLM's default
    port: int = DEFAULT_PORT
    certificate_file: str = ""
    key_file: str = ""
    max_model_len: int = 40960
    shutdown_timeout: float = 0.0
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    api_key: str = ""
    version: str = DEFAULT_VERSION
    stream_handles: bool = True
    prompt_token_ids: bool = True
    strip_reasoning: bool = False
    prompt_tokens_details: bool = False
    adapters: tuple[str, ...] = ()
    images: int = 0
    load_seconds: float = 0.0
    dead_seconds: float = 5.0
    faults: Mapping[str, Any] = field(default_factory=dict)
    leases: LeaseSettings | None = None
    engine: EngineSettings
    compatibility: Compatibility


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """The options of ``serve …``. Raises UsageError."""
    flags, positional = _split(arguments)
    if positional[:1] != ["serve"]:
        raise UsageError("the only command is: serve MODEL [flags of vllm serve]")
    model = positional[1] if len(positional) > 1 else flags.get("model", "")
    if not model:
        raise UsageError("serve needs a model")
    version = flags.get("sim-version", DEFAULT_VERSION)
    release = version_of(version)
    if release is None:
        raise UsageError(f"--sim-version {version} is not a version")
    number = _Numbers(flags)
    block_size = number.whole("block-size", 16)
    dtype = flags.get("dtype", "bfloat16").replace("auto", "bfloat16")
    connector = _connector(flags.get("kv-transfer-config"), environment, release)
    compatibility = Compatibility(
        version=version,
        model=model,
        dtype=dtype,
        kv_cache_dtype=flags.get("kv-cache-dtype", "auto").replace("auto", dtype),
        block_size=block_size,
        backends=connector.backends if connector else (),
        speculative=flags.get("speculative-config", ""),
        revision=flags.get("revision", ""),
    )
    engine = EngineSettings(
        model=model,
        block_size=block_size,
        num_blocks=number.whole("num-gpu-blocks-override", 16384),
        max_num_seqs=number.whole("max-num-seqs", 256),
        prefix_caching="no-enable-prefix-caching" not in flags,
        logprob_noise=number.seconds("sim-logprob-noise", 0.0),
        overshoot=number.whole("sim-overshoot", 0, least=0),
        style=Style(
            eos_every=number.whole("sim-eos-every", 64, least=0),
            reasoning_tokens=number.whole("sim-reasoning-tokens", 0, least=0),
        ),
        timing=_timing(flags, number),
        connector=connector,
    )
    if "ssl-keyfile" in flags and "ssl-certfile" not in flags:
        raise UsageError("--ssl-keyfile needs --ssl-certfile")
    max_model_len = number.whole("max-model-len", 40960)
    if (engine.num_blocks - 1) * block_size < max_model_len:
        raise UsageError(
            f"one request of --max-model-len {max_model_len} needs more KV cache than the "
            f"{engine.num_blocks - 1} blocks of {block_size} tokens that there are; raise --num-gpu-blocks-override"
        )
    return Options(
        model=model,
        served_names=tuple(flags.get("served-model-name", model).split()),
        host=flags.get("host", "0.0.0.0"),  # noqa: S104 - vLLM's default
        port=number.whole("port", DEFAULT_PORT, least=0),
        certificate_file=flags.get("ssl-certfile", ""),
        key_file=flags.get("ssl-keyfile", ""),
        max_model_len=max_model_len,
        shutdown_timeout=number.seconds("shutdown-timeout", 0.0),
        max_logprobs=number.whole("max-logprobs", DEFAULT_MAX_LOGPROBS, least=0),
        api_key=flags.get("api-key", environment.get("VLLM_API_KEY", "")),
        version=version,
        stream_handles=release >= (0, 33) or "sim-stream-handles" in flags,
        prompt_token_ids=release >= (0, 32),
        strip_reasoning="sim-strip-reasoning" in flags,
        prompt_tokens_details="enable-prompt-tokens-details" in flags,
        adapters=tuple(word.partition("=")[0] for word in flags.get("lora-modules", "").split()),
        images=int(_object("--limit-mm-per-prompt", flags.get("limit-mm-per-prompt", "{}")).get("image", 0)),
        load_seconds=number.seconds("sim-load-seconds", 0.0),
        dead_seconds=number.seconds("sim-dead-seconds", 5.0),
        faults=_object("--sim-faults", flags.get("sim-faults", "{}")),
        leases=lease_settings(
            environment,
            worker_extension=flags.get("worker-extension-cls", ""),
            connector=_extra_config(flags["kv-transfer-config"]) if connector else None,
        ),
        engine=engine,
        compatibility=compatibility,
    )


def version_of(text: str) -> tuple[int, int] | None:
    """Major and minor of a version; None if it is none."""
    match = re.match(r"v?(\d+)\.(\d+)(\D|$)", text)
    return (int(match[1]), int(match[2])) if match else None


_SWITCHES: Final = frozenset({"enable-ssl-refresh", "sim-stream-handles", "sim-strip-reasoning"})
_MANY_VALUES: Final = frozenset({"served-model-name", "lora-modules"})


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    flags: dict[str, str] = {}
    positional: list[str] = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        index += 1
        if not re.match(r"--?[A-Za-z]", word):
            positional.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not equals and name not in _SWITCHES:
            values: list[str] = []
            while index < len(arguments) and not re.match(r"--?[A-Za-z]", arguments[index]):
                values.append(arguments[index])
                index += 1
                if name not in _MANY_VALUES:
                    break
            value = " ".join(values)
        flags[name] = value
    return flags, positional


class _Numbers:
    def __init__(self, flags: Mapping[str, str]) -> None:
        self._flags = flags

    def whole(self, name: str, default: int, least: int = 1) -> int:
        text = self._flags.get(name)
        if text is None:
            return default
        # vLLM reads 1k as 1000 and 1K as 1024.
        match = re.fullmatch(r"(\d+)([kKmM]?)", text)
        if match is None:
            raise UsageError(f"--{name} {text}: not a whole number")
        value = int(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[match[2]]
        if value < least:
            raise UsageError(f"--{name} {text}: less than {least}")
        return value

    def seconds(self, name: str, default: float) -> float:
        text = self._flags.get(name)
        try:
            value = default if text is None else float(text)
        except ValueError as error:
            raise UsageError(f"--{name} {text}: not a number") from error
        if not value >= 0:
            raise UsageError(f"--{name} {text}: negative")
        return value


def _timing(flags: Mapping[str, str], number: _Numbers) -> TimingModel:
    given = _object("--sim-timing", flags.get("sim-timing", "{}"))
    scale = number.seconds("sim-time-scale", 1.0)
    try:
        return replace(TimingModel(), **given, scale=scale)
    except TypeError as error:
        raise UsageError(f"--sim-timing: {error}") from error


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{name}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UsageError(f"{name}: not a JSON object")
    return value


def _extra_config(text: str) -> Mapping[str, Any]:
    extra = _object("--kv-transfer-config", text).get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise UsageError("--kv-transfer-config: kv_connector_extra_config is not an object")
    return extra


def _connector(text: str | None, environment: Mapping[str, str], release: tuple[int, int]) -> ConnectorSettings | None:
    if text is None:
        return None
    config = _object("--kv-transfer-config", text)
    removed = sorted(_REMOVED_FIELDS & config.keys())
    if removed and release >= (0, 32):
        raise UsageError(f"--kv-transfer-config: unexpected keyword argument '{removed[0]}'")
    unknown = sorted(config.keys() - _CONFIG_FIELDS - _REMOVED_FIELDS)
    if unknown:
        raise UsageError(f"--kv-transfer-config: unexpected keyword argument '{unknown[0]}'")
    name, role = config.get("kv_connector"), config.get("kv_role")
    if name is None:
        return None
    if role not in _ROLES:
        raise UsageError(f"--kv-transfer-config: unsupported kv_role: {role}; supported roles are {_ROLES}")
    if name != "NixlConnector":
        raise UsageError(f"--kv-transfer-config: the simulator has no connector {name}, only NixlConnector")
    module = config.get("kv_connector_module_path")
    if module is not None:
        raise UsageError(f"--kv-transfer-config: the simulator has no connector of {module}, only vLLM's NixlConnector")
    extra = _extra_config(text)
    try:
        return ConnectorSettings(
            engine_id=str(config.get("engine_id") or uuid.uuid4()),
            role=role,
            bidirectional=bool(extra.get("bidirectional_kv_xfer", False)),
            recompute_threshold=int(extra.get("kv_recompute_threshold", 64)),
            decoder_ttl=float(extra.get("decoder_kv_blocks_ttl", 480)),
            lease=float(extra.get("kv_lease_duration", 30)),
            policy=Policy(config.get("kv_load_failure_policy", Policy.FAIL)),
            backends=tuple(str(backend) for backend in extra.get("backends", ("UCX",))),
            enforce_compatibility=bool(extra.get("enforce_handshake_compat", True)),
            host=environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"),
            port=int(environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")),
            registration_generation=release >= (0, 33),
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"--kv-transfer-config: {error}") from error
