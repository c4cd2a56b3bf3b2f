"""Release and renewal over HTTP on real engines: what is retained is freed at once, or kept and read right."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvloop.cpu_engine import EXTRA_TRANSFER_CONFIG
from kvloop_connector.handle import KVHandle
from kvloop_connector.lease_requests import PLUGIN, RELEASE_PATH, RENEW_PATH, WORKER_EXTENSION
from kvloop_connector.settings import KVTransferSettings, Role, transfer_config
from tests.contract.legs import Answer, Legs, continued, fresh_salt, holds_nothing, story, tokenize, trimmed_to
from tests.harness import client
from tests.harness.client import Reply
from tests.harness.engines import Engine, EngineSpec, Kind, start, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1200), pytest.mark.xdist_group("engines")]

TTL_SECONDS = 30
"""Retention without renewal: waited for by one test, and longer than what is freed at once takes."""

API_KEY = "the engines' key"
SHARE = 0.3

ALLOWED = {"VLLM_PLUGINS": f"kvloop_stream_handle,{PLUGIN}"}
"""Once it is set, it says of every group what is loaded."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines whose retained blocks can be released and renewed.

    verified: whether they run kvloop's connector.
    """

    prefill: Engine
    decode: Engine
    verified: bool

    def ask(self, path: str, *answers: Answer, api_key: str = API_KEY, **fields: Any) -> Reply:
        """Name the handles of these answers to the decode engine."""
        body = {"remote_request_ids": [answer.handle.request_id for answer in answers], **fields}
        return client.post(self.decode.url + path, body, api_key=api_key)

    def outcomes(self, path: str, *answers: Answer, **fields: Any) -> list[str]:
        reply = self.ask(path, *answers, **fields)
        assert reply.status == 200, reply.text
        return [entry["outcome"] for entry in reply.json["handles"]]


@pytest.fixture(scope="module", params=["stock", "verified"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Engines of their own: others have neither the plug-in nor the extension."""
    directory = tmp_path_factory.mktemp(f"leases-{request.param}")
    verified = request.param == "verified"
    key = directory / "key"
    key.write_bytes(os.urandom(32).hex().encode())
    leases: dict[str, Any] = {
        "decoder_kv_blocks_ttl": TTL_SECONDS,
        "kvloop_key_file": str(key),
        "kvloop_revision": "0123456789",
        "kvloop_retained_share_limit": SHARE,
    }
    arguments = {role: [*leasing_arguments(), *(verified_arguments(role, leases) if verified else [])] for role in Role}
    specs = [
        # Whatever a turn reuses comes from decode.
        EngineSpec(
            role=Role.PREFILL,
            transfer_config=leases,
            prefix_caching=False,
            arguments=arguments[Role.PREFILL],
            environment=ALLOWED,
        ),
        EngineSpec(role=Role.DECODE, transfer_config=leases, arguments=arguments[Role.DECODE], environment=ALLOWED),
    ]
    with start(Kind.VLLM, directory, specs) as engines:
        yield Pair(engines.prefill[0], engines.decode[0], verified)


def leasing_arguments() -> list[str]:
    return ["--worker-extension-cls", WORKER_EXTENSION, "--api-key", API_KEY]


def verified_arguments(role: Role, extra: dict[str, Any]) -> list[str]:
    """What makes an engine run kvloop's connector; the last of several configurations counts."""
    config = transfer_config(KVTransferSettings(), role)
    config["kv_connector_module_path"] = "kvloop_connector.engine.connector"
    config["kv_connector_extra_config"] |= {**EXTRA_TRANSFER_CONFIG, **extra}
    return ["--prefix-caching-hash-algo", "sha256_cbor", "--kv-transfer-config", json.dumps(config)]


@pytest.fixture
def legs(pair: Pair) -> Iterator[Legs]:
    """Sends legs; in the end nothing is retained."""
    made = Legs(api_key=API_KEY)
    yield made
    made.settle()


def over(handle: KVHandle) -> bool:
    """Whether a handle's deadline has passed. On one machine all processes share the clock that it is on."""
    return time.perf_counter() >= float(handle.params["remote_blocks_expiry_time"])


def test_a_release_frees_the_blocks_at_once(pair: Pair, legs: Legs) -> None:
    answer = legs.cold(pair.prefill, pair.decode, story("to be released"))
    assert pair.decode.metrics().kv_usage > 0

    assert pair.outcomes(RELEASE_PATH, answer) == ["released"]

    assert wait_until(lambda: holds_nothing(pair.decode))
    assert not over(answer.handle), "freed only at its deadline"
    legs.issued.clear()


def test_a_release_frees_no_other_blocks(pair: Pair, legs: Legs) -> None:
    gone = legs.cold(pair.prefill, pair.decode, story("one of two"))
    alone = pair.decode.metrics().kv_usage
    kept = legs.cold(pair.prefill, pair.decode, story("the other of two"))
    both = pair.decode.metrics().kv_usage
    pair.outcomes(RENEW_PATH, kept, seconds=600)

    assert pair.outcomes(RELEASE_PATH, gone) == ["released"]

    assert wait_until(lambda: pair.decode.metrics().kv_usage == pytest.approx(both - alone))
    assert pair.outcomes(RENEW_PATH, gone, kept, seconds=600) == ["not_held", "renewed"]
    assert pair.outcomes(RELEASE_PATH, kept) == ["released"]
    legs.issued.clear()


def test_a_renewed_handle_outlives_its_first_deadline_and_is_read_right_with_its_new_one(
    pair: Pair, legs: Legs
) -> None:
    salt = fresh_salt()
    before = pair.decode.metrics()
    control = legs.cold(pair.prefill, pair.decode, story("kept no longer than usual"))
    first = legs.cold(pair.prefill, pair.decode, story("kept for long"), cache_salt=salt)
    untold = legs.cold(pair.prefill, pair.decode, story("renewed, but nobody was told"), cache_salt=salt)

    reply = pair.ask(RENEW_PATH, first, untold, seconds=600)

    assert reply.status == 200, reply.text
    assert [entry["outcome"] for entry in reply.json["handles"]] == ["renewed", "renewed"]
    assert wait_until(
        lambda: over(untold.handle) and (pair.decode.metrics() - before).expired >= 1, seconds=3 * TTL_SECONDS
    )
    assert pair.outcomes(RENEW_PATH, control, seconds=600) == ["not_held"]
    assert legs.issued.pop(control.handle.request_id)
    renewed = first.handle.renewed(reply.json["handles"][0])
    reads_right(pair, legs, first, renewed, salt)
    is_declined(pair, legs, untold, salt)


def reads_right(pair: Pair, legs: Legs, first: Answer, handle: KVHandle, salt: str) -> None:
    history = continued(story("kept for long"), first)
    if not pair.verified:
        handle = trimmed_to(handle, first.retained_ids, tokenize(pair.decode, history))
    before = pair.prefill.metrics()

    second = legs.turn(pair.prefill, pair.decode, history, handle.params, cache_salt=salt)

    counted = pair.prefill.metrics() - before
    assert counted.reads == 1
    assert counted.external_hits >= 0.8 * len(first.retained_ids)
    assert second.answer_ids == legs.cold(pair.prefill, pair.decode, history).answer_ids


def is_declined(pair: Pair, legs: Legs, first: Answer, salt: str) -> None:
    """A handle that keeps its first deadline is not read after it, although its blocks are there."""
    history = continued(story("renewed, but nobody was told"), first)
    before = pair.prefill.metrics()

    reply = legs.prefill(pair.prefill, history, first.handle.params, cache_salt=salt)

    counted = pair.prefill.metrics() - before
    assert counted.reads == 0
    if pair.verified:
        assert reply.json["kv_transfer_params"]["kvloop_reuse"] == {"outcome": "expired", "tokens": 0}
        legs.decode(pair.prefill, pair.decode, history, reply.json["kv_transfer_params"], cache_salt=salt)
    else:
        assert (reply.status, counted.expired) == (500, 1)
    assert pair.outcomes(RELEASE_PATH, first) == ["released"]


def test_what_is_gone_or_was_never_there_is_said_to_be(pair: Pair, legs: Legs) -> None:
    answer = legs.cold(pair.prefill, pair.decode, story("soon gone"))
    legs.settle()

    assert pair.outcomes(RENEW_PATH, answer, seconds=600) == ["not_held"]
    assert pair.outcomes(RELEASE_PATH, answer) == ["not_held"]
    legs.issued.clear()


@pytest.mark.parametrize("api_key", ["", "another"])
def test_the_engines_key_is_asked_for(pair: Pair, legs: Legs, api_key: str) -> None:
    answer = legs.cold(pair.prefill, pair.decode, story("not for everybody"))

    assert pair.ask(RELEASE_PATH, answer, api_key=api_key).status == 401
    assert pair.ask(RENEW_PATH, answer, api_key=api_key, seconds=600).status == 401

    assert pair.outcomes(RELEASE_PATH, answer) == ["released"]
    legs.issued.clear()


def test_a_request_that_is_none_is_refused_and_the_engine_serves_on(pair: Pair, legs: Legs) -> None:
    answer = legs.cold(pair.prefill, pair.decode, story("asked wrongly"))

    reply = pair.ask(RENEW_PATH, answer, seconds="long")

    assert (reply.status, reply.json["error"]["param"]) == (400, "seconds")
    assert pair.ask(RELEASE_PATH, answer, force=True).json["error"]["param"] == "force"
    assert pair.outcomes(RELEASE_PATH, answer) == ["released"]
    legs.issued.clear()


@pytest.mark.parametrize("pair", ["verified"], indirect=True)
def test_no_more_is_retained_than_the_share_allows(pair: Pair, legs: Legs) -> None:
    answers: list[Answer] = []
    while not answers or answers[-1].params is not None:
        assert len(answers) < 100, "it retains whatever comes"
        answers.append(legs.cold(pair.prefill, pair.decode, story(f"idle conversation {len(answers)}", words=600)))
        pair.outcomes(RENEW_PATH, *(answer for answer in answers if answer.params is not None), seconds=600)

    # What it does not retain is freed at once.
    assert wait_until(lambda: 0 < pair.decode.metrics().kv_usage <= SHARE)
    assert set(pair.outcomes(RELEASE_PATH, *answers[:-1])) == {"released"}
    assert wait_until(lambda: holds_nothing(pair.decode))
    legs.issued.clear()
    assert legs.cold(pair.prefill, pair.decode, story("after them")).params is not None
