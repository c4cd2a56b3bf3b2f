"""Shows what was measured: a table, a JSON document, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kvloop.demo.result import Row
from kvloop.node.stand_in import EngineKind

_OFF_COLOUR, _ON_COLOUR = "#b5502f", "#2f6fb5"
_HEADROOM = 1.25


def title(engine: EngineKind, version: str) -> str:
    """Says what kind of engines the times are of."""
    engines = "SIMULATED engines" if engine is EngineKind.SIM else f"vLLM {version} on this machine's CPU"
    return f"Time to first token with KV reuse off and on ({engines})"


def table(measured: Sequence[Row], heading: str) -> Table:
    """One line a turn."""
    result = Table(title=heading)
    for column in ("turn", "prompt tokens", "path", "tokens reused", "TTFT off", "TTFT on", "ratio"):
        result.add_column(column, justify="left" if column == "path" else "right")
    for row in measured:
        result.add_row(
            str(row.turn),
            str(row.prompt_tokens),
            row.path,
            str(row.reused_tokens),
            f"{row.off_seconds * 1000:.0f} ms",
            f"{row.on_seconds * 1000:.0f} ms",
            f"{row.ratio:.2f}",
        )
    return result


def document(measured: Sequence[Row], engine: EngineKind, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "engine": engine.value,
        "simulated": engine is EngineKind.SIM,
        "settings": dict(settings),
        "turns": [
            {
                "turn": row.turn,
                "prompt_tokens": row.prompt_tokens,
                "left_by_turn_before": row.left_tokens,
                "path": row.path,
                "reused_tokens": row.reused_tokens,
                "ttft_ms": {"off": round(row.off_seconds * 1000, 1), "on": round(row.on_seconds * 1000, 1)},
            }
            for row in measured
        ],
    }


def picture(measured: Sequence[Row], heading: str, settings: Mapping[str, Any], path: Path) -> None:
    """Both times over the length of the prompt, as a PNG."""
    # It takes longer to import than all the rest of kvloop, and most commands draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    tokens = [row.prompt_tokens for row in measured]
    off, on = [row.off_seconds * 1000 for row in measured], [row.on_seconds * 1000 for row in measured]
    axes.plot(tokens, off, marker="o", color=_OFF_COLOUR, label="reuse off", linewidth=2)
    axes.plot(
        tokens, on, marker="o", color=_ON_COLOUR, label="reuse on (in brackets: how many times shorter)", linewidth=2
    )
    for row, x, above, below in zip(measured, tokens, off, on, strict=True):
        # Outside of both lines, whichever is on top, so that no label covers the other.
        label = f"{below:.0f}" if row.turn == 1 else f"{below:.0f}\n({row.ratio:.1f}x)"
        for text, y, offset, side, colour in (
            (f"{above:.0f}", max(above, below), 7, "bottom", _OFF_COLOUR),
            (label, min(above, below), -7, "top", _ON_COLOUR),
        ):
            axes.annotate(
                text,
                (x, y),
                xytext=(0, offset),
                textcoords="offset points",
                ha="center",
                va=side,
                fontsize=8,
                color=colour,
            )
    axes.set_title(heading, fontsize=12, fontweight="bold")
    axes.set_xlabel("prompt tokens of the turn")
    axes.set_ylabel("time to first token, ms")
    axes.set_ylim(0, max(*off, *on) * _HEADROOM)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    figure.supxlabel("; ".join(f"{name}: {value}" for name, value in settings.items()), fontsize=6, wrap=True)
    figure.savefig(path)
