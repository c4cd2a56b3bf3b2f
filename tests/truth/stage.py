"""Where the truth test is played: engines that are tempted to be wrong, and a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvloop import cpu_engine
from kvloop_connector.settings import READ_MARGIN_SECONDS, KVTransferSettings, Role
from tests.harness.engines import Engine, Engines, EngineSpec, Kind
from tests.truth import oracle

TTL_SECONDS: Final = 60
BRIEF_TTL_SECONDS: Final = 12
"""Of the decode engine that forgets sooner than the router believes."""

ROUTER_TTL_SECONDS: Final = 30

SPECIAL: Final[Mapping[str, float]] = {"1": 3.4}
"""The tiny model's padding token, made about as likely as its likeliest word."""

_TEMPLATE = Path(__file__).with_name("template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a part is played.

    reference: an engine that the others exchange nothing with.
    router_ttl: seconds for which the router thinks that a handle can be used.
    special: token ids, as text, and how much likelier than usual an answer with special tokens holds them.
    """

    engines: Engines
    reference: Engine
    router_ttl: int
    special: Mapping[str, float] = field(default_factory=dict)

    def rules(self) -> oracle.Rules:
        """The rules that the oracle plays by here."""
        return oracle.Rules(
            block_size=cpu_engine.BLOCK_SIZE,
            threshold=self.engines.decode[0].spec.settings.kv_recompute_threshold,
            router_ttl=self.router_ttl,
            engine_ttl={engine.name: engine_ttl(engine) - READ_MARGIN_SECONDS for engine in self.engines.decode},
        )


def specs(kind: Kind) -> list[EngineSpec]:
    """Two prefill and two decode engines, one prefill engine without prefix caching, and the reference."""
    arguments = ("--chat-template", str(_TEMPLATE)) if kind.is_real else ("--sim-time-scale", "0")
    prefill = EngineSpec(
        role=Role.PREFILL,
        settings=KVTransferSettings(decoder_kv_blocks_ttl=TTL_SECONDS),
        max_model_len=2048,
        kv_blocks=512,
        arguments=arguments,
    )
    return [
        prefill,
        replace(prefill, prefix_caching=False),
        replace(prefill, role=Role.DECODE),
        replace(prefill, role=Role.DECODE, transfer_config={"decoder_kv_blocks_ttl": BRIEF_TTL_SECONDS}),
        replace(prefill, prefix_caching=False, transfers=False),
    ]


def on(engines: Engines) -> Stage:
    """The stage of the engines that were started as `specs` says."""
    return Stage(
        engines=engines,
        reference=next(engine for engine in engines.all if not engine.spec.transfers),
        router_ttl=ROUTER_TTL_SECONDS,
        special=SPECIAL if engines.kind.is_real else {},
    )


def engine_ttl(engine: Engine) -> float:
    """For how many seconds a decode engine retains."""
    return float(engine.spec.transfer_config.get("decoder_kv_blocks_ttl", engine.spec.settings.decoder_kv_blocks_ttl))
