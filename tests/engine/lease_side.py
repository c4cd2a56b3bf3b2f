"""Runs in the engine's environment: release and renewal through vLLM's own server, workers and schedulers, no engine.

Prints one JSON object, case name -> what came of it. The workers retain what vLLM's scheduler tells them to, and give
it up by vLLM's own rules; in place of the processes between them stands a call.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import time
from argparse import Namespace
from collections import Counter
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins, init_endpoint_plugins_state
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, run_method
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from kvloop_connector.handle import KVHandle
from kvloop_connector.lease_requests import PLUGIN, RELEASE_PATH, RENEW_PATH, WORKER_EXTENSION
from tests.engine.vllm_sides import HISTORY, connector, ended, leg

LATE = 500.0
"""Seconds; the retention is over by then, and would not be after a renewal of RENEWED."""

RENEWED = 900
GROWN = [*HISTORY, *range(40)]
EXTENSION = resolve_obj_by_qualname(WORKER_EXTENSION)
taken = [name for name in dir(EXTENSION) if not name.startswith("__") and hasattr(Worker, name)]
Worker.__bases__ = (*Worker.__bases__, EXTENSION)


class Decode:
    """A decode engine of two ranks, behind vLLM's server with an API key."""

    def __init__(
        self, *, sealed: bool = True, extension: str = WORKER_EXTENSION, ranks: int = 2, **changes: Any
    ) -> None:
        self.connector = connector("kv_consumer", **changes)
        self.scheduler = self.connector.connector_scheduler
        transfer = self.scheduler.vllm_config.kv_transfer_config
        if not sealed:
            transfer.kv_connector_module_path = None
        parallel = SimpleNamespace(worker_extension_cls=extension, data_parallel_size=1)
        self.config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
        self.ranks = [self.rank() for _ in range(ranks)]
        self.calls = 0
        app = FastAPI()
        attach_endpoint_plugins(app, ("generate",))
        app.add_middleware(AuthenticationMiddleware, tokens=["the key"])
        client = SimpleNamespace(vllm_config=self.config, collective_rpc=self.collective_rpc)
        asyncio.run(init_endpoint_plugins_state(client, app.state, Namespace()))
        self.http = TestClient(app)

    def rank(self) -> tuple[Any, Any]:
        """A worker and its side of the connector, as far as retaining goes."""
        retaining = NixlPullConnectorWorker.__new__(NixlPullConnectorWorker)
        retaining.engine_id = self.scheduler.engine_id
        retaining.pcp_rank = 0
        retaining._ready_requests = queue.Queue()
        retaining._reqs_to_send, retaining._reqs_to_process = {}, set()
        retaining.consumer_notification_counts_by_req = Counter()
        retaining.expected_consumer_notifications_by_req = {}
        retaining.xfer_stats = NixlKVConnectorStats()
        worker = CPUWorker.__new__(CPUWorker)
        worker.vllm_config = self.config
        return worker, SimpleNamespace(connector_worker=retaining)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        self.calls += 1
        answers = []
        for worker, group in self.ranks:
            kv_transfer_state._KV_CONNECTOR_AGENT = group
            answers.append(run_method(worker, method, args, {}))
        # As between the engine's process and the server's.
        return MsgpackDecoder().decode(MsgpackEncoder().encode(answers))

    def turn(self, **how: Any) -> dict[str, Any]:
        """The handle of a turn, whose blocks the workers retain from here on; without a place where they do not."""
        name, retained, handle = ended(self.connector, **how)
        told = self.connector.build_connector_meta(SimpleNamespace())
        told.reqs_to_recv = {}
        for _, group in self.ranks:
            group.connector_worker.start_load_kv(told)
            # As long as it is retained, and no longer, a worker answers for it.
            assert (name in group.connector_worker._reqs_to_process) == retained
        return {"remote_request_id": name} if handle is None else dict(json.loads(json.dumps(handle)))

    def given_up(self) -> list[list[str]]:
        """What each rank gives up at the end of a step."""
        over: list[list[str]] = []
        for _, group in self.ranks:
            done: set[str] = set()
            group.connector_worker._reap_expired_send_leases(done)
            over.append(sorted(done))
        self.connector.update_connector_output(
            SimpleNamespace(finished_sending=set(chain(*over)), finished_recving=None)
        )
        return over

    def post(self, path: str, *handles: dict[str, Any], key: str = "the key", **fields: Any) -> Any:
        body = {"remote_request_ids": [handle["remote_request_id"] for handle in handles], **fields}
        answer = self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        return {"status": answer.status_code, **answer.json()}


def read_late(handle: dict[str, Any]) -> list[Any]:
    """What a prefill engine makes of it when the first deadline is over: its scheduler, and its worker."""
    with patch("kvloop_connector.engine.connector.time", SimpleNamespace(time=lambda: time.time() + LATE)):
        reuse = leg(connector("kv_producer"), GROWN, handle)["reuse"]
    worker = NixlPullConnectorWorker.__new__(NixlPullConnectorWorker)
    worker._engine_clock_offset = {handle["remote_engine_id"]: LATE}
    remote = RemoteMeta(
        block_ids=handle["remote_block_ids"],
        host="",
        port=0,
        engine_id=handle["remote_engine_id"],
        request_id=handle["remote_request_id"],
        blocks_expiry_time=handle["remote_blocks_expiry_time"],
    )
    meta = ReqMeta(local_block_ids=([1],), local_physical_block_ids=([1],), tp_size=1, remote=remote)
    return [reuse["outcome"], "declined" if worker._is_turn2_read_expired(meta) else "read"]


def moved(handle: dict[str, Any], answer: Any) -> dict[str, Any]:
    return dict(KVHandle.parse(handle).renewed(answer["handles"][0]).params)


os.environ["VLLM_PLUGINS"] = PLUGIN
cases: dict[str, Any] = {"names taken": taken}

decode = Decode()
kept, gone = decode.turn(), decode.turn()
cases["release"] = {
    "answer": decode.post(RELEASE_PATH, gone),
    "given up": decode.given_up() == [[gone["remote_request_id"]]] * 2,
    "again": decode.post(RELEASE_PATH, gone),
    "renewed after it": decode.post(RENEW_PATH, gone, seconds=RENEWED),
    "left": [list(group.connector_worker._reqs_to_send) == [kept["remote_request_id"]] for _, group in decode.ranks],
}

renewal = decode.post(RENEW_PATH, kept, seconds=RENEWED)
later = moved(kept, renewal)
cases["renewal"] = {
    "status": renewal["status"],
    "seconds": renewal["handles"][0]["seconds"],
    "ranks keep it": all(
        group.connector_worker._reqs_to_send[kept["remote_request_id"]] >= later["remote_blocks_expiry_time"]
        for _, group in decode.ranks
    ),
    "before": read_late(kept),
    "after": read_late(later),
}

stock = Decode(sealed=False)
bare = stock.turn()
renewal = stock.post(RENEW_PATH, bare, seconds=RENEWED)
bare.pop("kvloop")
cases["renewal, stock"] = {
    "has a term": "term" in renewal["handles"][0],
    "before": read_late(bare),
    "after": read_late(moved(bare, renewal)),
}

limited = Decode(kvloop_longest_lease_seconds=490)
first = limited.turn()
cases["longest lease"] = limited.post(RENEW_PATH, first, seconds=3600)["handles"][0]["seconds"]

torn = Decode()
half = torn.turn()
torn.ranks[1][1].connector_worker._reqs_to_send.clear()
before = torn.ranks[0][1].connector_worker._reqs_to_send[half["remote_request_id"]]
cases["one rank holds it"] = {
    "outcome": torn.post(RENEW_PATH, half, seconds=RENEWED)["handles"][0]["outcome"],
    "moved by": abs(torn.ranks[0][1].connector_worker._reqs_to_send[half["remote_request_id"]] - before),
}

# 10 blocks a turn; 30 % of 256 are 76.
capped = Decode(kvloop_retained_share_limit=0.3)
turns = [capped.turn(first_block=10 * number) for number in range(8)]
cases["past the cap"] = {
    "retained": ["remote_block_ids" in handle for handle in turns],
    "release": capped.post(RELEASE_PATH, turns[7], turns[2]),
}
capped.given_up()
cases["past the cap"]["then"] = "remote_block_ids" in capped.turn(first_block=80)
cases["past the cap"]["and then"] = "remote_block_ids" in capped.turn(first_block=90)

cases["wrong key"] = decode.post(RELEASE_PATH, kept, key="another")
cases["unknown field"] = decode.post(RELEASE_PATH, kept, force=True)
cases["no seconds"] = decode.post(RENEW_PATH, kept)

changed = Decode()
calls = changed.turn()
for _, group in changed.ranks:
    group.connector_worker._reqs_to_send = list(group.connector_worker._reqs_to_send)
cases["another vLLM"] = changed.post(RELEASE_PATH, calls)
for index, (worker, _) in enumerate(changed.ranks):
    changed.ranks[index] = (worker, SimpleNamespace())
cases["another connector"] = changed.post(RELEASE_PATH, calls)

unextended = Decode(extension="")
cases["no extension"] = {**unextended.post(RELEASE_PATH, kept), "calls": unextended.calls}

os.environ.pop("VLLM_PLUGINS")
cases["not allowed"] = Decode().post(RELEASE_PATH, kept)["status"]

print(json.dumps(cases))
