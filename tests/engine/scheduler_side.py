"""Runs in the engine's environment: what becomes of handles on the connector's scheduler sides, without an engine.

Prints one JSON object, case name -> what came of it.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm.v1.request import RequestStatus

from tests.engine.vllm_sides import HISTORY, PREFILLS_ANSWER, blocks, connector, leg, request, turn


def refused(**changes: Any) -> str:
    try:
        connector("kv_producer", **changes)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "started"


decode, prefill = connector("kv_consumer"), connector("kv_producer")
edited = [*HISTORY[:100], 7777, *HISTORY[101:], *range(40)]
grown = [*HISTORY, *range(40)]
twice = turn(decode)
forged = {**turn(decode), "remote_host": "10.9.9.9"}
stock = {name: value for name, value in turn(decode).items() if name != "kvloop"}
hybrid_decode, hybrid_prefill = connector("kv_consumer", hybrid=True), connector("kv_producer", hybrid=True)

# A handle sent to decode, a decode leg sent to prefill, and half a decode leg, as each role sees them after arrival.
misled = {
    "handle on decode": (decode, turn(decode)),
    "decode leg on prefill": (prefill, PREFILLS_ANSWER),
    "half a decode leg": (decode, {"do_remote_prefill": True}),
    "neither": (decode, {"something": 1}),
}
after_arrival = {}
for case, (who, params) in misled.items():
    arrived = request(case, grown, params)
    who.on_new_request(arrived)
    after_arrival[case] = arrived.kv_transfer_params

alone = request("alone", HISTORY, {"kvloop_retain": True})
decode.on_new_request(alone)
decode.update_state_after_alloc(alone, blocks(10), 0)
alone.append_output_token_ids([1, 2, 3])
alone.num_computed_tokens, alone.status = len(HISTORY) + 2, RequestStatus.FINISHED_STOPPED
kept, alone_handle = decode.request_finished_all_groups(alone, (list(range(10)),))
worker_hears = decode.build_connector_meta(SimpleNamespace())

with patch("kvloop_connector.engine.connector.vllm_version", "0.99.0"):
    on_another_vllm = refused()

print(
    json.dumps(
        {
            "decode alone": {
                "kept": kept,
                "in batch": "alone" in worker_hears.reqs_in_batch,
                "has a deadline": "alone" in worker_hears.reqs_to_send,
                "leg": leg(prefill, [*HISTORY, 1, 2, 3, *range(40)], json.loads(json.dumps(alone_handle))),
            },
            "class": type(prefill).__mro__[1].__name__,
            "handle bytes": len(json.dumps(turn(decode)["kvloop"])),
            "grown": leg(prefill, grown, turn(decode)),
            "grown, half cached": leg(prefill, grown, turn(decode), cached=96),
            "all cached": leg(prefill, grown, turn(decode), cached=288),
            "below the threshold": leg(prefill, grown, turn(decode), cached=256),
            "edited": leg(prefill, edited, turn(decode)),
            "truncated": leg(prefill, HISTORY[:150], turn(decode)),
            "nothing in common": leg(prefill, [9, *HISTORY], turn(decode)),
            "same salt": leg(prefill, grown, turn(decode, salt="a"), salt="a"),
            "other salt": leg(prefill, grown, turn(decode, salt="a"), salt="b"),
            "first use": leg(prefill, grown, twice),
            "second use": leg(prefill, grown, twice),
            "forged": leg(prefill, grown, forged),
            "stock": leg(prefill, grown, stock),
            "aborted in the queue": leg(prefill, grown, turn(decode), scheduled=False),
            "cold": leg(prefill, grown, {"do_remote_decode": True, "do_remote_prefill": False}),
            "no parameters": leg(prefill, grown, None),
            "other revision": leg(connector("kv_producer", kvloop_revision="x"), grown, turn(decode)),
            "hybrid, grown": leg(hybrid_prefill, grown, turn(hybrid_decode, groups=2), groups=2),
            "hybrid, edited": leg(hybrid_prefill, edited, turn(hybrid_decode, groups=2), groups=2),
            "hybrid handle": leg(prefill, grown, turn(hybrid_decode, groups=2)),
            "arrival": after_arrival,
            "start without revision": refused(kvloop_revision=""),
            "start without key": refused(kvloop_key_file="/none"),
            "start on another vLLM": on_another_vllm,
        }
    )
)
