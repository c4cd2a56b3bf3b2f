"""The token ids of a new prompt, once for both legs and for the proof, from an engine's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from kvloop_connector.settings import Role
from kvloop_router import legs, token_ids
from kvloop_router.config import Config
from kvloop_router.engines import Engines
from kvloop_router.errors import EngineError, EngineRejected
from kvloop_router.pairs import Templates
from kvloop_router.policy import choose_one
from kvloop_router.request import Api, Request, prompts, too_long
from kvloop_router.turn_log import TurnReport

_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a prompt before its prefill leg.

    token_ids: None where no engine tells, or where they would not say all about it.
    rendering_known: whether the API renders it to these ids too; None: not known yet.
    why_unprovable: why nothing can be proven of it; empty where it can, or where only the rendering is not known yet.
    """

    token_ids: Sequence[int] | None
    rendering_known: bool | None
    why_unprovable: str


class Tokenizer:
    """Asks engines for token ids."""

    def __init__(self, config: Config, engines: Engines, templates: Templates, random: Random) -> None:
        self._config = config
        self._engines = engines
        self._templates = templates
        self._random = random

    async def prompt(self, request: Request, headers: Mapping[str, str], report: TurnReport) -> Prompt:
        """The prompt's token ids, and that it fits the model.

        Raises RequestError for a prompt that does not fit, EngineRejected for one that the engine refuses, Unavailable.
        """
        if not request.provable:
            return Prompt(None, False, "api")
        body = legs.tokenize(request)
        ids: Sequence[int] | None
        limit: int | None
        if body is None:
            (ids,) = prompts(request.body["prompt"])
            limit = self._engines.longest(request.model)
        else:
            ids, limit = await self._ask(body, request.model, headers, report)
        if ids is None:
            return Prompt(None, False, "no_token_ids")
        report.prompt_tokens = len(ids)
        if limit is not None and (fault := too_long(report.prompt_tokens, request.max_tokens, limit)) is not None:
            raise fault
        known = True if request.api is Api.COMPLETIONS else self._templates.agrees(legs.shape(request))
        return Prompt(ids, known, "template" if known is False else "")

    async def _ask(
        self, body: Mapping[str, Any], model: str, headers: Mapping[str, str], report: TurnReport
    ) -> tuple[Sequence[int] | None, int | None]:
        """The ids and the longest prompt, as some engine says; (None, None) where no engine tells."""
        failed: set[str] = set()
        for _ in range(_ATTEMPTS):
            name = choose_one(self._engines.snapshot(model), self._random, Role.DECODE, failed)
            try:
                with report.leg("tokenize", name) as leg:
                    answer = await self._engines.complete(
                        name, "/tokenize", body, leg.headers(headers), seconds=self._config.timeouts.prefill_seconds
                    )
                if (read := token_ids.told(answer.body)) is not None:
                    return read
                told = orjson.loads(answer.body)
                return list(told["tokens"]), int(told["max_model_len"])
            except EngineRejected as error:
                # An engine may be set up without it.
                if error.status in (404, 405):
                    return None, None
                raise
            except EngineError as error:
                failed.add(name)
                report.attempts.append(f"tokenize {error}")
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
                return None, None
        return None, None
