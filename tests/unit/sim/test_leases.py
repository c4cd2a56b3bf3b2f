"""kvloop's plug-in on a simulated engine: switched on as on vLLM, and honest about reads that it does not see."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvloop_connector.lease_requests import ALLOW_VARIABLE, PLUGIN, WORKER_EXTENSION
from kvloop_connector.lifecycle import Event, Lease, transition
from kvloop_connector.settings import LONGEST_LEASE
from kvloop_sim.driver import EngineDriver
from kvloop_sim.faults import FaultPlan, Faults
from kvloop_sim.leases import LeaseEndpoint, LeaseSettings, lease_settings
from kvloop_sim.metrics import Metrics
from kvloop_sim.records import Retained
from kvloop_sim.side_channel import EngineClock, Pairs
from tests.unit.sim.cores import engine

ALLOWED = {"VLLM_PLUGINS": f"cpu,{PLUGIN}"}
CONNECTOR: dict[str, Any] = {"decoder_kv_blocks_ttl": 100, LONGEST_LEASE: 150}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"VLLM_PLUGINS": "kvloop_stream_handle"},
        {ALLOW_VARIABLE: "0"},
        {ALLOW_VARIABLE: "1", "VLLM_PLUGINS": "kvloop_stream_handle"},
    ],
)
def test_what_vllm_would_not_load_is_not_there(environment: dict[str, str]) -> None:
    assert lease_settings(environment, worker_extension=WORKER_EXTENSION, connector=CONNECTOR) is None


@pytest.mark.parametrize("environment", [ALLOWED, {ALLOW_VARIABLE: "1"}])
def test_renewals_add_what_is_left_of_the_longest_lease(environment: dict[str, str]) -> None:
    started = lease_settings(environment, worker_extension=WORKER_EXTENSION, connector=CONNECTOR)

    assert started == LeaseSettings(50)


@pytest.mark.parametrize(
    ("extension", "connector", "why"),
    [
        ("", CONNECTOR, "--worker-extension-cls"),
        (WORKER_EXTENSION, None, "no KV connector"),
        (WORKER_EXTENSION, {LONGEST_LEASE: 1}, LONGEST_LEASE),
    ],
)
def test_an_engine_that_lacks_something_says_what(extension: str, connector: Any, why: str) -> None:
    started = lease_settings(ALLOWED, worker_extension=extension, connector=connector)

    assert started is not None
    assert why in started.fault


async def test_a_release_under_a_read_frees_all_the_same_and_is_counted() -> None:
    core, clock = engine("decode"), EngineClock()
    blocks = core.pool.take(3)
    deadline = clock() + 100
    reading = transition(Lease(deadline), Event.TAKE, clock()).lease
    core.retained["read"] = Retained("read", blocks[:2], 8, "decode", reading)
    core.retained["idle"] = Retained("idle", blocks[2:], 4, "decode", Lease(deadline))
    driver = EngineDriver(
        core, peers=None, pairs=Pairs(), clock=clock, faults=FaultPlan(Faults()), metrics=Metrics(core, "m")
    )
    endpoint = LeaseEndpoint(LeaseSettings(50), driver)

    async with driver:
        renewed = await endpoint.service.renew(json.dumps({"remote_request_ids": ["idle"], "seconds": 900}).encode())
        released = await endpoint.service.release(b'{"remote_request_ids": ["read", "idle"]}')

    assert renewed.body["handles"][0]["seconds"] == pytest.approx(50)
    assert [entry["outcome"] for entry in released.body["handles"]] == ["released", "released"]
    assert core.pool.held == 0
    assert core.counters.kv_expired == 2
    assert core.counters.released_while_read == 1
