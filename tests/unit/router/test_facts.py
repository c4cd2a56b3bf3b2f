"""Small pure parts: headers, scopes, pairs, templates, metrics text, the engines file."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvloop_connector.settings import Role
from kvloop_router import exposition, headers, scope
from kvloop_router.discovery import InvalidEngines, parse_engines
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.pairs import PairReport, Pairs, Templates, Verdict

SECRET = b"s" * 32
ENTRY = {"name": "p0", "role": "prefill", "url": "http://127.0.0.2:8000/", "podUID": "u", "kvRevision": "a", "zone": ""}


def spec(name: str, *, kv_revision: str = "a", **facts: Any) -> EngineSpec:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    defaults = {"url": f"http://{name}", "pod_uid": f"uid-{name}", "process": f"process-{name}"}
    return EngineSpec(name=name, role=role, kv_revision=kv_revision, **(defaults | facts))


PREFILL, DECODE = spec("p0"), spec("d0")

METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",hash_block_size="16",num_gpu_blocks="512"} 1.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="tiny"} 1.5e+06
vllm:nixl_bytes_transferred_sum{engine="1",model_name="tiny"} 500000.0
vllm:nixl_bytes_transferred_sum_other{engine="1"} 7.0
"""


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        ("req-1.a:b@c", True),
        (None, False),
        ("", False),
        ("a b", False),
        ("x" * 129, False),
        ("a\r\nb", False),
        ("a/b", False),
    ],
)
def test_a_request_id_is_taken_over_where_it_is_harmless(offered: str | None, taken: bool) -> None:
    assert headers.request_id(offered, "fresh") == (offered if taken else "fresh")


TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


def test_a_leg_gets_trace_context_and_nothing_else_of_the_client() -> None:
    incoming = {"traceparent": TRACE, "Authorization": "Bearer key", "Cookie": "x", "X-Forwarded-For": "1.2.3.4"}

    assert headers.upstream(incoming, "id") == {
        "Content-Type": "application/json",
        "X-Request-Id": "id",
        "traceparent": TRACE,
    }


@pytest.mark.parametrize(
    ("authorization", "key"),
    [("Bearer k", "k"), ("bearer k", "k"), ("Basic k", None), ("Bearer ", None), ("Bearer", None), (None, None)],
)
def test_the_key_of_a_request(authorization: str | None, key: str | None) -> None:
    assert headers.bearer(authorization) == key


def test_scopes_differ_by_tenant_model_and_salt() -> None:
    scopes = [
        scope.scope(SECRET, scope.tenant(SECRET, key), model, salt, set_salt=True)
        for key in ("a", "b")
        for model in ("m", "n")
        for salt in (None, "s")
    ]

    assert len({one.ident for one in scopes}) == len(scopes)
    assert len({one.salt for one in scopes}) == 4, "models share no KV, so that they may share a salt"


def test_a_scope_can_leave_the_salt_to_the_client() -> None:
    tenant = scope.tenant(SECRET, "a")

    assert scope.scope(SECRET, tenant, "m", "mine", set_salt=False).salt == "mine"
    assert scope.scope(SECRET, tenant, "m", None, set_salt=False).salt is None


def test_another_epoch_is_another_salt_and_the_same_scope() -> None:
    tenant = scope.tenant(SECRET, "a")
    before, after = (scope.scope(SECRET, tenant, "m", "s", set_salt=True, epoch=epoch) for epoch in (b"", b"epoch"))

    assert before == scope.scope(SECRET, tenant, "m", "s", set_salt=True)
    assert (before.ident == after.ident, before.salt == after.salt) == (True, False)


def test_a_scope_tells_nothing_of_the_key() -> None:
    one = scope.scope(SECRET, scope.tenant(SECRET, "key"), "m", "salt", set_salt=True)

    assert b"key" not in one.ident
    assert "salt" not in str(one.salt)
    assert one.token_key("a") != one.token_key("b")


def test_metrics_text_tells_block_size_and_bytes() -> None:
    assert exposition.block_size(METRICS) == 32
    assert exposition.blocks(METRICS) == 512
    assert exposition.total(METRICS, exposition.BYTES_TRANSFERRED) == 2_000_000
    assert exposition.block_size("") is None
    assert exposition.total("", exposition.BYTES_TRANSFERRED) is None


def test_the_engines_file_is_read() -> None:
    read = spec("p0", url="http://127.0.0.2:8000", pod_uid="u", process="u")
    assert parse_engines(json.dumps([ENTRY])) == (read,)
    assert parse_engines("[]") == ()


def test_the_engines_file_may_tell_a_process_from_its_pod_and_that_it_drains() -> None:
    (read,) = parse_engines(json.dumps([{**ENTRY, "process": "u/1", "draining": True}]))
    assert (read.pod_uid, read.process, read.draining) == ("u", "u/1", True)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({}, "list"),
        ([1], "entry 0"),
        ([{**ENTRY, "role": "router"}], "role"),
        ([{**ENTRY, "podUID": ""}], "podUID"),
        ([{name: value for name, value in ENTRY.items() if name != "url"}], "url"),
        ([{**ENTRY, "process": 1}], "process"),
        ([{**ENTRY, "draining": "yes"}], "draining"),
        ([{**ENTRY, "ending": 1}], "ending"),
        ([ENTRY, ENTRY], "same name"),
    ],
)
def test_a_faulty_engines_file_is_refused(entries: Any, named: str) -> None:
    with pytest.raises(InvalidEngines, match=named):
        parse_engines(json.dumps(entries))


def test_pairs_are_of_one_revision() -> None:
    pairs = Pairs()
    other = spec("d1", kv_revision="b")

    pairs.update([PREFILL, DECODE, other])

    assert [(report.prefill.name, report.decode.name) for report in pairs.reports()] == [("p0", "d0")]
    assert pairs.usable("p0", "d0")
    assert not pairs.usable("p0", "d1")


def test_a_pair_that_failed_is_not_usable_until_it_is_verified() -> None:
    pairs = Pairs()
    pairs.update([PREFILL, DECODE])

    pairs.record(PairReport(PREFILL, DECODE, Verdict.FAILED))
    assert not pairs.usable("p0", "d0")
    pairs.record(PairReport(PREFILL, DECODE, Verdict.VERIFIED))
    assert pairs.usable("p0", "d0")
    assert pairs.reports()[0].attempts == 2


def test_a_new_process_makes_a_pair_unknown_again_and_an_old_report_is_void() -> None:
    pairs = Pairs()
    pairs.update([PREFILL, DECODE])
    pairs.record(PairReport(PREFILL, DECODE, Verdict.VERIFIED))
    restarted = replace(DECODE, process="another")

    pairs.update([PREFILL, restarted])
    assert pairs.reports()[0].verdict is Verdict.UNKNOWN
    pairs.record(PairReport(PREFILL, DECODE, Verdict.FAILED))
    assert pairs.reports()[0].verdict is Verdict.UNKNOWN


def test_wrong_reuse_stays_until_one_of_the_two_is_another_process() -> None:
    pairs = Pairs()
    pairs.update([PREFILL, DECODE])
    pairs.record_wrong(PREFILL.process, "another", "what was wrong")
    assert pairs.usable("p0", "d0")

    pairs.record_wrong(PREFILL.process, DECODE.process, "what was wrong")
    pairs.record(PairReport(PREFILL, DECODE, Verdict.VERIFIED))
    (known,) = pairs.reports()
    assert (known.verdict, known.detail, pairs.usable("p0", "d0")) == (Verdict.WRONG, "what was wrong", False)

    pairs.update([replace(PREFILL, process="another"), DECODE])
    assert pairs.usable("p0", "d0")


def test_what_is_to_be_done_with_an_engine_changes_nothing_of_what_is_known_of_its_pairs() -> None:
    pairs = Pairs()
    pairs.update([PREFILL, DECODE])
    pairs.record(PairReport(PREFILL, DECODE, Verdict.VERIFIED, to_decode_bytes=5))

    draining = replace(DECODE, draining=True)
    pairs.update([PREFILL, draining])
    (known,) = pairs.reports()
    assert (known.decode, known.verdict, known.to_decode_bytes) == (draining, Verdict.VERIFIED, 5)

    pairs.record(PairReport(PREFILL, DECODE, Verdict.FAILED))
    (known,) = pairs.reports()
    assert (known.decode, known.verdict, known.attempts) == (draining, Verdict.FAILED, 2)


def test_a_template_that_disagreed_once_is_not_trusted_again() -> None:
    templates = Templates()
    assert templates.agrees(("chat",)) is None

    assert templates.learn(("chat",), [1, 2], (1, 2))
    assert templates.agrees(("chat",)) is True
    assert not templates.learn(("chat",), [1, 2], [1, 3])
    assert templates.learn(("chat",), [1, 2], [1, 2])
    assert templates.agrees(("chat",)) is False
    assert templates.agrees(("chat", "tools")) is None


def test_of_the_shapes_that_clients_make_up_only_so_many_are_known() -> None:
    templates = Templates(most=3)
    templates.learn(("chat", "differs"), [1], [2])

    for number in range(100):
        templates.learn(("chat", f"chat_template_kwargs.{number}"), [1], [1])

    assert len(templates) == 4
    assert templates.agrees(("chat", "differs")) is False
    assert templates.agrees(("chat", "chat_template_kwargs.99")) is True
    assert templates.agrees(("chat", "chat_template_kwargs.0")) is None


def test_where_too_many_shapes_disagree_no_other_is_trusted() -> None:
    templates = Templates(most=3)
    for number in range(4):
        templates.learn(("chat", str(number)), [1], [2])

    templates.learn(("chat", "3"), [1], [1])

    assert len(templates) == 3
    assert templates.agrees(("chat", "3")) is None


@pytest.mark.parametrize(
    ("label", "caches"),
    [('enable_prefix_caching="True",', True), ('enable_prefix_caching="False",', False), ("", None)],
)
def test_whether_an_engine_keeps_prefixes_is_read_where_it_says(label: str, caches: bool | None) -> None:
    text = f'vllm:cache_config_info{{block_size="32",{label}engine="0"}} 1.0\n'

    assert exposition.prefix_caching(text) is caches
