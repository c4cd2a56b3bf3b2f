"""What people are told of turns: explanations, spans, the probe of the template, and the two commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kvloop.__main__ import main
from tests.integration.router_process import MODEL, RouterUnderTest, chat_body, scripted, until
from tests.integration.scripted_engine import ANSWER, BLOCK_SIZE, ScriptedEngine, fails, starts_then_waits, streams

LONG = "a question that is long enough to be worth a pull"
MORE = "and now something else, please"
TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KVLOOP: dict[str, Any] = {"connector": "KvloopConnector", "kvRecomputeThreshold": 8}


async def explained(router: RouterUnderTest, request_id: str) -> Any:
    return await router.admin(f"/admin/v1/turns/{request_id}/explanation")


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


async def turn(router: RouterUnderTest, name: str, *messages: dict[str, Any], **fields: Any) -> None:
    got = await router.post(
        "/v1/chat/completions", {"model": MODEL, "messages": messages, **fields}, {"X-Request-Id": name}
    )
    assert got.status == 200, got.text


class TestExplanation:
    async def test_of_a_warm_turn(self, router: RouterUnderTest) -> None:
        await turn(router, "one", message("user", LONG))
        await turn(router, "two", message("user", LONG), message("assistant", ANSWER), message("user", MORE))

        told = await explained(router, "two")

        assert told["turn"]["path"] == "warm"
        assert told["tokens"]["reused"] == told["tokens"]["reusable"] > 0
        assert told["tokens"]["reused"] + told["tokens"]["computed"] == told["tokens"]["prompt"]
        assert told["before"]["request_id"] == "one"
        assert told["history"] == {"messages": 3, "equal_messages": 1, "changes": []}
        legs = [(leg["leg"], leg["engine"], leg["outcome"]) for leg in told["turn"]["legs"]]
        expected = [("tokenize", "decode-0"), ("prefill", "prefill-0"), ("decode", "decode-0")]
        assert legs == [(*each, "ok") for each in expected]

    @pytest.mark.parametrize("connector", ["NixlConnector", "KvloopConnector"])
    async def test_of_one_whose_first_question_was_edited(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, connector: str
    ) -> None:
        prefill.verdict = "diverged" if connector == "KvloopConnector" else ""
        async with scripted(tmp_path, prefill, decode, kvTransfer={"connector": connector}) as router:
            session = {"conversation_id": "mine"}
            await turn(router, "one", message("user", LONG), **session)
            edited = "E" + LONG[1:]
            messages = message("user", edited), message("assistant", ANSWER), message("user", MORE)
            await turn(router, "two", *messages, **session)

            told = await explained(router, "two")

        stock = connector == "NixlConnector"
        assert (told["turn"]["path"], told["turn"]["reason"]) == ("cold", "below_threshold" if stock else "diverged")
        assert told["tokens"]["reusable"] == (BLOCK_SIZE if stock else 0)
        (change,) = told["history"]["changes"]
        assert (change["how"], change["message"], change["role"]) == ("edited", 1, "user")

    async def test_of_one_whose_reasoning_the_client_left_out(
        self, router: RouterUnderTest, decode: ScriptedEngine
    ) -> None:
        def thinks(events: list[bytes]) -> list[bytes]:
            thought = b'data: {"choices":[{"index":0,"delta":{"reasoning":"hm"}}]}\n\n'
            return [*events[:1], thought, *events[1:]]

        decode.script = [streams(thinks)]
        await turn(router, "one", message("user", LONG), stream=True)
        await turn(router, "two", message("user", LONG), message("assistant", ANSWER), message("user", MORE))

        (change,) = (await explained(router, "two"))["history"]["changes"]

        assert (change["how"], change["message"]) == ("reasoning_stripped", 2)

    async def test_names_the_legs_that_failed_and_who_played_them(
        self, router: RouterUnderTest, decode: ScriptedEngine
    ) -> None:
        decode.script = [fails(500)]
        await router.chat(LONG, headers={"X-Request-Id": "one"})

        told = await explained(router, "one")

        decodes = [leg["outcome"] for leg in told["turn"]["legs"] if leg["leg"] == "decode"]
        assert decodes == ["failed", "ok"]
        assert told["turn"]["reason"] == "engine_failed"

    async def test_recent_turns_are_listed_the_last_one_first(self, router: RouterUnderTest) -> None:
        for name in ("one", "two"):
            await router.chat(LONG, headers={"X-Request-Id": name})

        turns = (await router.admin("/admin/v1/turns"))["turns"]

        assert [told["request_id"] for told in turns] == ["two", "one"]


@dataclass
class Collector:
    """An OTLP collector that keeps what it is sent."""

    url: str = ""
    status: int = 200
    asked: int = 0
    headers: list[str] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.headers.append(request.headers["Content-Type"])
        if self.status == 200:
            export = ExportTraceServiceRequest.FromString(await request.read())
            for of_resource in export.resource_spans:
                attributes = of_resource.resource.attributes
                self.resources.append({each.key: each.value.string_value for each in attributes})
                for of_scope in of_resource.scope_spans:
                    self.spans += of_scope.spans
        return web.Response(status=self.status)

    def named(self, name: str) -> Span:
        (span,) = [span for span in self.spans if span.name == name]
        return span


@asynccontextmanager
async def collecting(status: int = 200) -> AsyncIterator[Collector]:
    collector = Collector(status=status)
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = "http://{}:{}/v1/traces".format(*runner.addresses[0][:2])
    try:
        yield collector
    finally:
        await runner.cleanup()


def attributes(span: Span) -> dict[str, Any]:
    values = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        assert kind is not None
        values[each.key] = getattr(each.value, kind)
    return values


class TestTraces:
    async def test_a_turn_has_a_span_with_one_for_each_leg_below_it_in_the_clients_trace(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        async with collecting() as collector:
            async with scripted(tmp_path, prefill, decode, tracing={"endpoint": collector.url}) as router:
                sent = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01", "tracestate": "vendor=1", "X-Request-Id": "one"}
                assert (await router.chat(LONG, headers=sent)).status == 200
                told = await router.admin("/admin/v1/turns/one")

            whole = collector.named("POST /v1/chat/completions")
            assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, CLIENT_SPAN)
            assert told["trace_id"] == TRACE
            assert collector.resources[0]["service.name"] == "kvloop-router"
            assert set(collector.headers) == {"application/x-protobuf"}
            named = attributes(whole)
            assert (named["kvloop.path"], named["kvloop.reason"]) == ("cold", "miss")
            assert named["http.response.status_code"] == 200
            sent_to = {"prefill": prefill.legs[0], "decode": decode.legs[0]}
            for leg, asked in sent_to.items():
                span = collector.named(leg)
                assert (span.trace_id.hex(), span.parent_span_id) == (TRACE, whole.span_id)
                # What an engine makes of it lies below the leg.
                assert asked.headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
                assert asked.headers["tracestate"] == "vendor=1"
                assert whole.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert collector.named("prefill").end_time_unix_nano <= collector.named("decode").start_time_unix_nano

    async def test_a_leg_that_failed_says_so(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        decode.script = [fails(500)]
        async with collecting() as collector:
            async with scripted(tmp_path, prefill, decode, tracing={"endpoint": collector.url}) as router:
                assert (await router.chat(LONG)).status == 200
            legs = [span for span in collector.spans if span.name == "decode"]
            assert [span.status.code == Status.STATUS_CODE_ERROR for span in legs] == [True, False]
            (root,) = [span for span in collector.spans if not span.parent_span_id]
            assert {span.trace_id for span in collector.spans} == {root.trace_id}

    async def test_what_a_client_does_not_have_recorded_is_not(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        unsampled = f"00-{TRACE}-{CLIENT_SPAN}-00"
        async with collecting() as collector:
            tracing = {"endpoint": collector.url, "sampleRatio": 0.0}
            async with scripted(tmp_path, prefill, decode, tracing=tracing) as router:
                await router.chat(LONG, headers={"traceparent": unsampled})
                await router.chat(LONG)
            assert collector.spans == []
        assert decode.legs[0].headers["traceparent"] == unsampled
        assert "traceparent" not in decode.legs[1].headers

    async def test_a_collector_that_fails_costs_spans_and_nothing_else(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        async with collecting(status=400) as collector:
            async with scripted(tmp_path, prefill, decode, tracing={"endpoint": collector.url}) as router:
                assert (await router.chat(LONG)).status == 200
                assert router.router is not None
                metrics = router.router.metrics
            assert collector.asked == 1
        assert b'kvloop_router_trace_spans_total{outcome="failed"} 4.0' in metrics.expose()


class TestTemplateProbe:
    async def test_an_append_only_template_is_reported_as_one(
        self, tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine
    ) -> None:
        async with scripted(tmp_path, prefill, decode, templateProbe={"enabled": True}) as router:
            assert router.router is not None
            probe = router.router.probe
            await until(lambda: bool(probe.reports()))
            (told,) = (await router.admin("/admin/v1/templates"))["templates"]
            assert told["appendOnly"] is True
            series = 'kvloop_router_template_append_only{case="answer",model="tiny"}'
            assert await router.metric(series) == 1
            await router.chat(LONG, headers={"X-Request-Id": "one"})
            assert (await explained(router, "one"))["template"] == told


class TestCommands:
    async def test_explain_and_top_of_a_router(
        self, tmp_path: Path, router: RouterUnderTest, capsys: pytest.CaptureFixture[str]
    ) -> None:
        await turn(router, "one", message("user", LONG))
        await turn(router, "two", message("user", LONG), message("assistant", ANSWER), message("user", MORE))
        at = ["--router", router.admin_url, "--token-file", str(tmp_path / "admin-token")]

        async def said(*arguments: str) -> tuple[int, str, str]:
            status = await asyncio.to_thread(main, [*arguments, *at])
            captured = capsys.readouterr()
            return status, captured.out, captured.err

        status, out, _ = await said("explain", "two")
        assert status == 0
        assert "warm: the handle of the turn before was used" in out
        status, out, _ = await said("explain", "two", "--json")
        assert json.loads(out)["before"]["request_id"] == "one"
        status, out, _ = await said("explain")
        assert [line.split()[-1] for line in out.splitlines()[1:]] == ["two", "one"]
        status, _, err = await said("explain", "three")
        assert (status, "no turn three" in err) == (1, True)
        status, out, _ = await said("top", "--once")
        assert status == 0
        assert "decode-0" in out
        status, out, _ = await said("top", "--once", "--json")
        paths = {row["path"]: row["turns"] for row in json.loads(out)["paths"]}
        assert paths == {"cold": 1, "warm": 1}
        (tmp_path / "admin-token").write_text("another")
        status, _, err = await said("top", "--once")
        assert (status, "refuses the token" in err) == (1, True)
        assert "another" not in err


async def test_pieces_of_a_stream_are_timed_by_path(router: RouterUnderTest, decode: ScriptedEngine) -> None:
    go_on = asyncio.Event()
    decode.script = [starts_then_waits(go_on)]
    async with router.session.post(f"{router.url}/v1/chat/completions", json=chat_body(LONG, stream=True)) as answer:
        await answer.content.readany()
        router.clock.ahead += 7
        go_on.set()
        await answer.read()

    assert await router.metric('kvloop_router_inter_token_seconds_count{path="cold"}') >= 1
    assert await router.metric('kvloop_router_inter_token_seconds_sum{path="cold"}') >= 7
    assert await router.metric('kvloop_router_inter_token_seconds_bucket{le="10.0",path="cold"}') >= 1
