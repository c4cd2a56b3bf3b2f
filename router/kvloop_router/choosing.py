"""Chooses the path of a turn that may use a handle, by what is known of the engines and of the turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvloop_router import sizes
from kvloop_router.config import Config
from kvloop_router.engine import Engine
from kvloop_router.engines import Engines
from kvloop_router.kept import Query
from kvloop_router.path_choice import Mode, Path, Sizes, Terms, decode_work, local_work
from kvloop_router.paths import Paths, Watch, unwatched
from kvloop_router.policy import Pair
from kvloop_router.request import Request
from kvloop_router.reuse import Option
from kvloop_router.turn_log import TurnReport

# The ranks of one server have a prefix cache each, and nobody says which of them a request goes to.
_RANK = re.compile(r"_dp\d+$")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a turn that may use a handle is thought to be, and how it goes.

    option: the handle. prefill: the engine that decode is expected to compute like.
    """

    path: Path
    sizes: Sizes
    option: Option
    prefill: str

    @property
    def unread(self) -> Option | None:
        """The handle, where this turn does not read it."""
        return None if self.path is Path.WARM else self.option


class Choosing:
    """The choice of a path, and what decode legs teach."""

    def __init__(self, paths: Paths, engines: Engines) -> None:
        self._paths = paths
        self._engines = engines

    def outlook(
        self,
        request: Request,
        token_ids: Sequence[int] | None,
        query: Query,
        option: Option,
        pair: Pair,
        report: TurnReport,
    ) -> Outlook:
        """How a turn goes that may use ``option`` between the engines of ``pair``; a local one is entered as such."""
        kept, mode = option.kept, self._paths.terms.mode
        rate = self._paths.tokens_per_character
        known = sizes.sizes(request, token_ids, held=option.tokens, recorded=kept.trail, trail=query.trail, rate=rate)
        held = known or Sizes(max(option.tokens + 1, sizes.estimated(request, token_ids, rate)), option.tokens)
        path = Path.WARM
        if known is not None or mode is not Mode.AUTO:
            decode = self._engines.get(pair.decode)
            place = self._paths.place(
                pair.prefill,
                pair.decode,
                running=0 if decode is None else decode.load,
                holds=decode is not None and decode.spec.process == kept.process,
                can_serve_alone=decode is not None and _can_serve_alone(decode, kept.params["remote_engine_id"]),
            )
            chosen, costs = self._paths.choose(held, [place])
            report.expected = {one.value: round(forecast.cost, 6) for one, forecast in costs.items()}
            path = chosen.path
        if path is Path.LOCAL:
            report.path, report.reused_tokens = path.value, option.tokens if option.proven else 0
        return Outlook(path, held, option, pair.prefill)

    def decode_leg(self, engine: Engine, outlook: Outlook | None, report: TurnReport) -> Watch:
        """A decode leg is sent."""
        if outlook is not None and report.path == Path.LOCAL:
            return self._paths.decode_leg(engine.spec.name, local_work(outlook.sizes), like=outlook.prefill)
        prompt = report.prompt_tokens if report.prefill else None
        if prompt is None:
            # Passed on as it is, or by engines that do not tell.
            return unwatched()
        holds = (
            outlook is not None and outlook.option.kept.process == engine.spec.process and bool(engine.prefix_caching)
        )
        turn = Sizes(prompt, outlook.sizes.held if outlook is not None and holds else 0)
        return self._paths.decode_leg(engine.spec.name, decode_work(turn, holds=holds), like=report.prefill)


def terms(config: Config) -> Terms:
    """What the configuration says of the choice."""
    choice, transfer = config.path_choice, config.kv_transfer
    return Terms(
        mode=Mode(choice.mode),
        decode_delay_weight=choice.decode_delay_weight,
        threshold=transfer.kv_recompute_threshold,
        retains=transfer.verified_by_engine,
    )


def paths(config: Config, clock: Callable[[], float]) -> Paths:
    """Nothing is known of any engine yet."""
    return Paths(terms(config), clock)


def _can_serve_alone(decode: Engine, engine_id: str) -> bool:
    return decode.serving and bool(decode.prefix_caching) and not _RANK.search(engine_id)
