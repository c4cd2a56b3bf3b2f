"""Arguments and variables of ``vllm serve`` that kvloop sets itself, and the rules that keep them its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvloop_connector.lease_requests import ALLOW_VARIABLE
from kvloop_operator.api.v1alpha1.base import Rule

# Regular expressions for what follows the two dashes. Underscores may stand for dashes; a dot starts a nested
# key, as in `--kv-transfer-config.kv_role`, and an equals sign a value.
_OWN_FLAGS = (
    "kv-transfer-config",
    "host",
    "port",
    "uds",
    "config",
    "model",
    "served-model-name",
    "revision",
    "tensor-parallel-size",
    "data-parallel-[^=]+",
    "pipeline-parallel-size",
    "prefill-context-parallel-size",
    "nnodes",
    "node-rank",
    "master-addr",
    "master-port",
    "headless",
    "block-size",
    "dtype",
    "kv-cache-dtype",
    "max-model-len",
    "(no-)?enable-prefix-caching",
    "(no-)?async-scheduling",
    "shutdown-timeout",
    "api-key",
    "root-path",
    "ssl-[^=]+",
    "(no-)?enable-ssl-refresh",
    "grpc",
)
_SHORT_FLAGS = ("tp", "dp", "pp", "n", "r", "dpn", "dpr", "dpl", "dpa", "dpp", "dph", "dpe", "dpm", "pcp")

# Compared by vLLM in the handshake, or deciding how KV lies in memory.
_EQUAL_FLAGS = (
    "attention-backend",
    "attention-config",
    "cp-kv-cache-interleave-size",
    "dcp-kv-cache-interleave-size",
    "decode-context-parallel-size",
    "(no-)?disable-hybrid-kv-cache-manager",
    "hf-overrides",
    "mamba-cache-dtype",
    "mamba-ssm-cache-dtype",
    "mamba-block-size",
    "quantization",
    "speculative-config",
    "tokenizer",
    "tokenizer-mode",
    "tokenizer-revision",
    "trust-remote-code",
    "chat-template",
    "prefix-caching-hash-algo",
    "worker-cls",
)
_EQUAL_SHORT_FLAGS = ("q", "dcp", "sc", "ac")


def _pattern(flags: Sequence[str], short: Sequence[str]) -> str:
    long = "|".join(re.sub(r"(?<=[a-z])-", "[-_]", flag) for flag in flags)
    return f"^(--({long})([=. ].*)?|-({'|'.join(short)})([= ].*)?)$"


OWN_ARGUMENT_PATTERN = _pattern(_OWN_FLAGS, _SHORT_FLAGS)
EQUAL_ARGUMENT_PATTERN = _pattern(_EQUAL_FLAGS, _EQUAL_SHORT_FLAGS)

_OWN_ENV_NAMES = (
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_ENGINE_READY_TIMEOUT_S",
    "VLLM_API_KEY",
    "VLLM_PORT",
    "FI_PROVIDER",
    "CUDA_VISIBLE_DEVICES",
    "POD_IP",
    ALLOW_VARIABLE,
)


def own_arguments(arguments: Sequence[str]) -> list[int]:
    """Where ``arguments`` repeat what kvloop sets itself."""
    return [index for index, argument in enumerate(arguments) if re.fullmatch(OWN_ARGUMENT_PATTERN, argument)]


def equal_arguments(arguments: Sequence[str]) -> list[int]:
    """Where ``arguments`` have what has to be equal on both roles."""
    return [index for index, argument in enumerate(arguments) if re.fullmatch(EQUAL_ARGUMENT_PATTERN, argument)]


def own_env(env: Sequence[Any]) -> list[int]:
    """Where ``env`` repeats what kvloop sets itself."""
    return [index for index, variable in enumerate(env) if variable.name in _OWN_ENV_NAMES]


OWN_ARGUMENTS = Rule(
    cel=f"!has(self.args) || !self.args.exists(arg, arg.matches('{OWN_ARGUMENT_PATTERN}'))",
    holds=lambda it: not own_arguments(it.args),
    entries=lambda it: own_arguments(it.args),
    field="args",
    fault="kvloop sets this argument itself",
    remedy="remove it; the resource has a field for what may be changed",
)

EQUAL_ARGUMENTS = Rule(
    cel=f"!has(self.args) || !self.args.exists(arg, arg.matches('{EQUAL_ARGUMENT_PATTERN}'))",
    holds=lambda it: not equal_arguments(it.args),
    entries=lambda it: equal_arguments(it.args),
    field="args",
    fault="this argument has to be equal on both roles",
    remedy="move it to engine.args",
)

OWN_ENV = Rule(
    cel="!has(self.env) || !self.env.exists(item, item.name in ["
    + ", ".join(f"'{name}'" for name in _OWN_ENV_NAMES)
    + "])",
    holds=lambda it: not own_env(it.env),
    entries=lambda it: own_env(it.env),
    field="env",
    fault="kvloop sets this variable itself",
    remedy="remove it; the resource has a field for what may be changed",
)
