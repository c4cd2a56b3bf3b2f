"""Spans of turns for an OTLP collector: one for each turn, below it one for each leg.

They are made at a turn's end, of what its report says; until then only their names are there, which go to the engines
so that these can go on with the trace. A router that traces nothing does not load any of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from random import Random

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvloop_router import trace_context
from kvloop_router.config import Tracing as Settings
from kvloop_router.trace_context import TraceContext
from kvloop_router.turn_log import TurnReport

_log = logging.getLogger(__name__)
_NANOSECONDS = 1_000_000_000
_EXPORT_SECONDS = 5
_SERVER_ERROR = 500


class _Names(IdGenerator):
    """Gives the names that a turn's report has already."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Counted(SpanExporter):
    """Counts what becomes of spans. An export that fails is nobody else's concern."""

    def __init__(self, exporter: SpanExporter, count: Callable[[str, int], None]) -> None:
        self._exporter = exporter
        self._count = count

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._count("exported" if result is SpanExportResult.SUCCESS else "failed", len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Tracer:
    """Makes spans; see ``turn_log.Tracing``. ``close`` waits until what is left has been sent, or could not be."""

    def __init__(
        self,
        settings: Settings,
        *,
        random: Random,
        attributes: Mapping[str, str],
        count: Callable[[str, int], None],
    ) -> None:
        """attributes: of the resource. count: told outcomes and how many spans; on a thread of its own."""
        # What it says of each export that fails the metric says too, and this in its own time.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._random = random
        self._ratio = settings.sample_ratio
        self._names = _Names()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            id_generator=self._names,
            resource=Resource.create(dict(attributes)),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(_Counted(exporter, count)))
        self._tracer = self._provider.get_tracer("kvloop_router")

    def begin(self, report: TurnReport, incoming: Mapping[str, str]) -> None:
        """Name the turn's span: in the client's trace, where it sends one that may be recorded, else in a new one."""
        client = trace_context.parse(incoming.get(trace_context.PARENT), incoming.get(trace_context.STATE))
        if client is not None:
            if not client.sampled:
                return
            report.trace, report.parent = client.child(self._span_id()), client.span_id
        elif self._random.random() < self._ratio:
            report.trace = TraceContext(f"{self._id(128):032x}", self._span_id(), flags=TraceFlags.SAMPLED)
        report.new_span = self._span_id

    def end(self, report: TurnReport) -> None:
        """Make the spans of a turn that has ended."""
        context = report.trace
        if context is None:
            return
        parent = trace.INVALID_SPAN_CONTEXT
        if report.parent:
            parent = _context(context.child(report.parent), remote=True)
        self._names.trace_id = int(context.trace_id, 16)
        started = int(report.at * _NANOSECONDS)
        failed = report.broken or report.status >= _SERVER_ERROR
        self._span(
            f"POST {report.api}",
            SpanKind.SERVER,
            context=context,
            parent=parent,
            times=(started, started + _nanoseconds(report.seconds)),
            attributes=_of_turn(report),
            failed=failed,
        )
        for leg in report.legs:
            if leg.trace is not None:
                began = started + _nanoseconds(leg.began)
                self._span(
                    leg.leg,
                    SpanKind.CLIENT,
                    context=leg.trace,
                    parent=_context(context, remote=False),
                    times=(began, began + _nanoseconds(leg.seconds)),
                    attributes={"kvloop.engine": leg.engine, "kvloop.outcome": leg.outcome},
                    failed=leg.outcome not in ("ok", "cut", "running"),
                )

    def close(self) -> None:
        """Blocks for as long as an export may take."""
        self._provider.shutdown()

    def _span(
        self,
        name: str,
        kind: SpanKind,
        *,
        context: TraceContext,
        parent: SpanContext,
        times: tuple[int, int],
        attributes: Mapping[str, str | int | float | bool],
        failed: bool,
    ) -> None:
        self._names.span_id = int(context.span_id, 16)
        above = trace.set_span_in_context(NonRecordingSpan(parent))
        began, ended = times
        span = self._tracer.start_span(name, above, kind, attributes, start_time=began)
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(ended)

    def _span_id(self) -> str:
        return f"{self._id(64):016x}"

    def _id(self, bits: int) -> int:
        # Zero names nothing.
        return self._random.getrandbits(bits) or 1


def _of_turn(report: TurnReport) -> dict[str, str | int | float | bool]:
    told: dict[str, str | int | float | bool | None] = {
        "http.request.method": "POST",
        "http.route": report.api,
        "http.response.status_code": report.status,
        "gen_ai.request.model": report.model,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "kvloop.request_id": report.request_id,
        "kvloop.path": report.path,
        "kvloop.reason": report.reason,
        "kvloop.reusable_tokens": report.proven_tokens,
        "kvloop.reused_tokens": report.reused_tokens,
        "kvloop.prefill": report.prefill,
        "kvloop.decode": report.decode,
        "kvloop.no_handle": report.no_handle,
        "kvloop.ttft_seconds": report.ttft_seconds,
        "kvloop.streamed": report.streamed,
    }
    return {name: value for name, value in told.items() if value not in (None, "")}


def _context(context: TraceContext, *, remote: bool) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16), int(context.span_id, 16), is_remote=remote, trace_flags=TraceFlags(context.flags)
    )


def _nanoseconds(seconds: float | None) -> int:
    return int((seconds or 0.0) * _NANOSECONDS)
