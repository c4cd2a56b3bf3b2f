"""vLLM worker extension: release and renewal of what the NIXL pull connector retains, in the workers that retain it.

The deadline that counts is the worker's own (``nixl/pull_worker.py:119``): freeing in the scheduler alone would have it
free the blocks a second time when the worker's deadline passes (``scheduler.py:3232``). A worker looks at its deadlines
after each step (``nixl/base_worker.py:3014``), in the thread that runs these methods too, and an engine that retains
anything goes on stepping; so a lease that is ended here is over at the next step, and vLLM logs and counts it as one
that expired.

For the stock connector and for kvloop's, whose worker is the stock one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvloop_connector.errors import InvalidAnswer
from kvloop_connector.lease_ranks import Deadlines, RankAnswer, RankLeases, renewable_seconds

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvloop.leases")


class LeaseWorker:
    """Becomes a base of vLLM's worker class, which has none of these names.

    No method raises: where one worker of several does, the others' replies stay unread, and every later call is
    answered with the one before it (``executor/multiproc_executor.py:440``).
    """

    def kvloop_release(self, request_ids: Sequence[str]) -> RankAnswer:
        """``RankLeases.release`` on this rank."""
        return _answer(self, lambda leases, held, _: leases.release(held, request_ids, time.perf_counter()))

    def kvloop_renew(self, request_ids: Sequence[str], seconds: float) -> RankAnswer:
        """``RankLeases.renew`` on this rank."""
        return _answer(
            self,
            lambda leases, held, engine_id: leases.renew(
                held, request_ids, seconds, now=time.perf_counter(), engine_id=engine_id
            ),
        )

    def kvloop_set_back(self, increments: Mapping[str, float]) -> RankAnswer:
        """``RankLeases.set_back`` on this rank."""
        return _answer(self, lambda leases, held, _: leases.set_back(held, increments))


def _answer(worker: Any, act: Callable[[RankLeases, Deadlines, str], RankAnswer]) -> RankAnswer:
    try:
        deadlines, engine_id = _retained()
        leases = getattr(worker, "_kvloop_leases", None)
        if leases is None:
            extra = worker.vllm_config.kv_transfer_config.kv_connector_extra_config
            leases = worker._kvloop_leases = RankLeases(renewable_seconds(extra))
        return act(leases, deadlines, engine_id)
    except Exception as error:  # noqa: BLE001  whatever it is, the worker has to answer
        logger.warning("Leases cannot be released or renewed: %s", error)
        return {"fault": f"{type(error).__name__}: {error}"}


def _retained() -> tuple[Deadlines, str]:
    """The deadlines of what this worker retains, and its engine's id; raises InvalidAnswer where they are not there."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    if not has_kv_transfer_group():
        raise InvalidAnswer("this engine has no KV connector")
    connector = get_kv_transfer_group()
    worker = getattr(connector, "connector_worker", None)
    if not isinstance(worker, NixlPullConnectorWorker):
        raise InvalidAnswer(f"{type(connector).__name__} is not vLLM's NIXL pull connector")
    deadlines = getattr(worker, "_reqs_to_send", None)
    if type(deadlines) is not dict or not all(isinstance(deadline, float) for deadline in deadlines.values()):
        raise InvalidAnswer("vLLM keeps its deadlines otherwise than the versions that were tried")
    return deadlines, str(worker.engine_id)
