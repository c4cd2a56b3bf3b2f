"""Engines that are shared by all tests of a run: two prefill, one decode, one decode that forgets soon.

Real engines take a minute and 2 GiB each, so that no test has a set of its own. Tests keep out of each other's way by
fresh cache salts, and leave no handle behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvloop_connector.lease_requests import PLUGIN, WORKER_EXTENSION
from kvloop_connector.settings import Role
from tests.harness.engines import Engines, EngineSpec, Kind, start

BRIEF_TTL_SECONDS = 12
"""Retention of the forgetful decode engine: too short for a deployment, long enough to be waited for."""

PIECE = 128
"""Tokens that the second prefill engine computes in one step: a prompt takes many."""

RETAINED_SHARE = 0.3
"""Of the forgetful decode engine's KV blocks, with KvloopConnector."""

_LEASING = EngineSpec(
    role=Role.DECODE,
    arguments=("--worker-extension-cls", WORKER_EXTENSION),
    # Once it is set, it says of every group what is loaded.
    environment={"VLLM_PLUGINS": f"kvloop_stream_handle,{PLUGIN}"},
)
"""A decode engine whose retained blocks can be released and renewed."""

SPECS = (
    EngineSpec(role=Role.PREFILL),
    EngineSpec(
        role=Role.PREFILL, arguments=("--max-num-batched-tokens", str(PIECE), "--max-num-seqs", str(PIECE // 2))
    ),
    _LEASING,
    replace(_LEASING, transfer_config={"decoder_kv_blocks_ttl": BRIEF_TTL_SECONDS}),
)

SIM_SPECS = (
    SPECS[0],
    # A prompt is one piece there; a long one takes about as long as in many.
    replace(SPECS[1], arguments=("--sim-timing", '{"prefill_per_token_and_context_token": 2e-7}')),
    *SPECS[2:],
)

KVLOOP_SPECS = (
    SPECS[0],
    # Blocks are hashed for the connector where no cache wants it too: on a reader and on an issuer of handles.
    replace(SPECS[1], prefix_caching=False),
    SPECS[2],
    replace(
        SPECS[3],
        prefix_caching=False,
        transfer_config={**SPECS[3].transfer_config, "kvloop_retained_share_limit": RETAINED_SHARE},
    ),
)

REAL_ENGINES = (pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("engines"))
"""Marks of a test that runs real engines: whichever comes first waits for their start too."""


@pytest.fixture(scope="session")
def sim_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Simulated engines."""
    with start(Kind.SIM, tmp_path_factory.mktemp("sim-engines"), SIM_SPECS) as engines:
        yield engines


@pytest.fixture(scope="session")
def vllm_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Real vLLM engines with its own connector."""
    yield from _real(Kind.VLLM, tmp_path_factory.mktemp("vllm-engines"), SPECS)


@pytest.fixture(scope="session")
def vllm_kvloop_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Real vLLM engines with KvloopConnector."""
    yield from _real(Kind.VLLM_KVLOOP, tmp_path_factory.mktemp("vllm-kvloop-engines"), KVLOOP_SPECS)


def _real(kind: Kind, directory: Path, specs: tuple[EngineSpec, ...]) -> Iterator[Engines]:
    with start(kind, directory, specs) as engines:
        memory = sum(engine.resident_bytes() for engine in engines.all) / 2**30
        print(f"{len(engines.all)} engines ready in {engines.start_seconds:.0f} s, {memory:.1f} GiB")
        yield engines
