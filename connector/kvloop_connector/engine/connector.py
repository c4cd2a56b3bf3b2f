"""vLLM's pull connector for NIXL, which reads from a decode engine only what is proven.

An engine loads it by ``kv_connector_module_path: kvloop_connector.engine.connector`` with
``kv_connector: NixlConnector``: vLLM decides several things by that name (``config/vllm.py:1182``,
``platforms/cpu.py:429``), so the class is found under it here too. Both roles of a deployment must have it.

Only the scheduler's side is ours: a decode engine seals its handles, a prefill engine judges them before anything is
looked up, let alone read. What is decided is in ``kvloop_connector.proof`` and ``.verdict``. What became of a handle is
in the prefill leg's answer, as ``kv_transfer_params.kvloop_reuse``, and in the log. Where a share of KV memory is set
for what is retained, a turn that would pass it has no handle (``kvloop_connector.retained_cap``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.version import __version__ as vllm_version

from kvloop_connector.engine.start import Start, checked_start
from kvloop_connector.errors import InvalidHandle
from kvloop_connector.handle import RETAIN_PARAMS, KVHandle
from kvloop_connector.leases import most_blocks
from kvloop_connector.proof import HashScheme, Term, seal
from kvloop_connector.retained_cap import RetainedCap
from kvloop_connector.settings import Role
from kvloop_connector.verdict import REUSE_FIELD, Decision, Outcome, Prompt, Reader, SpentHandles, judge, leg_params

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvloop.connector")


class KvloopScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The scheduler's side of the connector."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig, start: Start) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._start = start
        self._spent = SpentHandles()
        # By request id, from when a handle was judged until its request ends.
        self._decisions: dict[str, Decision] = {}
        self._cap: RetainedCap | None = None
        if start.role is Role.DECODE and start.retained_share is not None:
            self._cap = RetainedCap(most_blocks(start.retained_share, kv_cache_config.num_blocks))

    def on_new_request(self, request: Request) -> None:
        """Called once for each request, before anything is matched: what it carries becomes what is proven."""
        params = request.kv_transfer_params
        if params:
            prefill = self._start.role is Role.PREFILL
            if not (_is_prefill_leg(params) if prefill else params == RETAIN_PARAMS or _is_decode_leg(params)):
                # They would end this engine, or make it retain blocks that nobody asks for.
                logger.warning("Request %s carries KV parameters for another role; ignored", request.request_id)
                request.kv_transfer_params = None
            elif prefill:
                request.kv_transfer_params = self._judged(request, params)
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Called when a request has got its blocks; registers one that decode serves by itself for retention."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._start.role is Role.DECODE and request.kv_transfer_params == RETAIN_PARAMS:
            # Without it the worker never starts the retention's clock, and the blocks are retained for ever.
            self._reqs_in_batch.add(request.request_id)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Seal the handle of a decode engine; add to that of a prefill engine what became of the one it was given."""
        decision = self._decisions.pop(request.request_id, None)
        params = request.kv_transfer_params
        handled = decision is not None and (decision.tokens > 0 or decision.release)
        if handled and params is not None and not params.get("_remote_blocks_processed"):
            # It ended before it was scheduled: nobody will read what the issuer retains for it.
            self._reqs_need_recv[request.request_id] = (request, [], (), False)
        delay, answer = super().request_finished(request, block_ids)
        if answer is None:
            return delay, answer
        if self._start.role is Role.DECODE:
            if delay and self._cap is not None and not self._cap.admit(request.request_id, chain(*block_ids)):
                return self._not_retained(request)
            return delay, self._sealed(request, answer) if delay else answer
        if decision is not None:
            answer[REUSE_FIELD] = {"outcome": decision.outcome.value, "tokens": decision.tokens}
        return delay, answer

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Called with what the workers have done, before the blocks of what they gave up are freed."""
        super().update_connector_output(connector_output)
        if self._cap is not None:
            for request_id in connector_output.finished_sending or ():
                self._cap.ended(request_id)

    def _not_retained(self, request: Request) -> tuple[bool, None]:
        # As vLLM does with a request that was aborted: the workers forget it, and its blocks are freed at once.
        del self._reqs_need_send[request.request_id]
        self._reqs_not_processed.add(request.request_id)
        logger.info("Request %s has no KV handle: as much is retained as may be", request.request_id)
        return False, None

    def _judged(self, request: Request, params: Mapping[str, Any]) -> dict[str, Any]:
        reader = self._reader()
        ids = request.prompt_token_ids if _ids_say_all(request) else None
        # The last tokens are cut off a prompt where decode computes them itself (state-space models, drafters).
        prompt = Prompt(request.block_hashes, max(0, request.num_prompt_tokens - self._prefill_backoff()), ids)
        decision = judge(reader, params, prompt, spent=self._spent, now=time.time())
        self._decisions[request.request_id] = decision
        if decision.outcome not in (Outcome.READ, Outcome.NO_HANDLE):
            logger.info("Request %s reads nothing from its KV handle: %s", request.request_id, decision.outcome.value)
        return leg_params(decision, params, reader)

    def _sealed(self, request: Request, answer: dict[str, Any]) -> dict[str, Any]:
        scheme = self._scheme()
        # The last token's KV is computed on some schedulers only; tokens past those that exist are rejected drafts.
        exist = max(0, min(request.num_computed_tokens, request.num_tokens - 1))
        whole = exist // scheme.block_size
        rest = None
        if exist == answer["remote_num_tokens"] and _ids_say_all(request):
            rest = list(request.all_token_ids[whole * scheme.block_size : exist])
        expiry = answer["remote_blocks_expiry_time"]
        deadline = time.time() + (expiry - time.perf_counter())
        return seal(
            self._start.key,
            answer,
            scheme=scheme,
            revision=self._start.revision,
            tokens=exist,
            hashes=request.block_hashes[:whole],
            rest=rest,
            ends=deadline + self._start.renewable,
            term=Term(deadline, expiry),
        )

    def _reader(self) -> Reader:
        groups = self.kv_cache_config.transfer_groups
        return Reader(
            key=self._start.key,
            engine_id=self.engine_id,
            revision=self._start.revision,
            scheme=self._scheme(),
            block_size=self.block_size,
            groups=len(groups),
            divisible=len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec),
        )

    def _scheme(self) -> HashScheme:
        # The engine settles the seed and the size of a hash block only after it has made the connector.
        return HashScheme.of(
            self._start.key,
            algorithm=self._start.algorithm,
            block_size=self.kv_cache_config.hash_block_size or self.block_size,
            none_hash=kv_cache_utils.NONE_HASH,
        )


class KvloopConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The connector; worker and transfer are vLLM's own. Raises UnsupportedEngine where it may not start."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        parallel = vllm_config.parallel_config
        start = checked_start(
            version=vllm_version,
            kv_role=transfer.kv_role,
            extra=transfer.kv_connector_extra_config,
            algorithm=vllm_config.cache_config.prefix_caching_hash_algo,
            context_parallel=parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size,
            read_key=lambda path: Path(path).read_bytes(),
        )
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KvloopScheduler(vllm_config, self.engine_id, kv_cache_config, start)


NixlConnector = KvloopConnector
"""The name under which an engine is told to look for it."""


def _is_prefill_leg(params: Mapping[str, Any]) -> bool:
    return bool(params.get("do_remote_decode")) and not params.get("do_remote_prefill")


def _is_decode_leg(params: Mapping[str, Any]) -> bool:
    """Whether these are a prefill engine's parameters, whole, so that no field is missing where the engine needs it."""
    if not params.get("do_remote_prefill") or params.get("do_remote_decode"):
        return False
    try:
        KVHandle.parse(params)
    except InvalidHandle:
        return False
    return True


def _ids_say_all(request: Request) -> bool:
    """Whether token ids tell all about a request's tokens: no media, no embeddings."""
    return not request.mm_features and request.prompt_embeds is None
