"""Asks an engine of each model once whether its chat template is append-only, for people to see before they rely on it.

Nothing that the router does depends on it: what a prompt shares with what is retained is proven turn by turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import orjson

from kvloop_connector.settings import Role
from kvloop_router import headers, template
from kvloop_router.engine import Engine
from kvloop_router.engines import Engines
from kvloop_router.errors import EngineError, EngineFailed, EngineRejected
from kvloop_router.template import Case, Finding, TemplateReport, Verdict

_log = logging.getLogger(__name__)
_EVERY_SECONDS = 0.5
_ANSWER_SECONDS = 30.0
_LACKS_TOKENIZE = frozenset({404, 405, 501})


class TemplateProbe:
    """The reports on all models' templates, as far as they are known."""

    def __init__(self, engines: Engines, served_name: str) -> None:
        self._engines = engines
        self._served_name = served_name
        self._asked: set[tuple[str, str]] = set()
        self._reports: dict[str, TemplateReport] = {}

    def reports(self) -> tuple[TemplateReport, ...]:
        """One for each model: that of the newest KV revision."""
        return tuple(self._reports.values())

    def by_case(self) -> Iterator[tuple[str, str, bool]]:
        """Model, case, and whether the template is append-only there."""
        for report in self._reports.values():
            for case, append_only in report.by_case():
                yield report.model, case, append_only

    async def run(self) -> None:
        """Ask, whenever there is an engine of a model or KV revision that was not asked yet."""
        while True:
            for engine in tuple(self._engines):
                if engine.spec.role is Role.DECODE and engine.serving:
                    await self._look_at(engine)
            await asyncio.sleep(_EVERY_SECONDS)

    async def _look_at(self, engine: Engine) -> None:
        model = engine.models[0] if engine.models else self._served_name
        key = (model, engine.spec.kv_revision)
        if key in self._asked:
            return
        try:
            findings = await self._findings(engine.spec.name, model)
        except EngineError as error:
            _log.info("the chat template could not be looked at", extra={"model": model, "error": str(error)})
            return
        self._asked.add(key)
        report = TemplateReport(model, engine.spec.name, engine.spec.kv_revision, findings)
        self._reports[model] = report
        _log.info("chat template", extra=report.told())

    async def _findings(self, engine: str, model: str) -> tuple[Finding, ...]:
        """Empty where the engine has no ``/tokenize``. Raises EngineError where it fails."""
        findings: list[Finding] = []
        for case in Case:
            try:
                rendered = [await self._render(engine, body) for body in template.bodies(case, model)]
            except EngineRejected as error:
                if error.status in _LACKS_TOKENIZE:
                    return ()
                findings.append(Finding(case, Verdict.REFUSED))
            else:
                findings.append(template.judge(case, rendered))
        return tuple(findings)

    async def _render(self, engine: str, body: template.Body) -> list[int]:
        sent = headers.upstream({}, "template-probe")
        answer = await self._engines.complete(engine, "/tokenize", body, sent, seconds=_ANSWER_SECONDS)
        try:
            return list(orjson.loads(answer.body)["tokens"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise EngineFailed(engine, "an answer without token ids") from error
