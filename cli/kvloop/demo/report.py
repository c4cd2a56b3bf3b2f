"""Shows what was measured: a table, a JSON document, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kvloop.demo.result import Row
from kvloop.node.stand_in import EngineKind

_OFF_COLOUR, _ON_COLOUR = "#b5502f", "#2f6fb5"


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
    for label, colour, times in (
        ("reuse off", _OFF_COLOUR, [row.off_seconds * 1000 for row in measured]),
        ("reuse on", _ON_COLOUR, [row.on_seconds * 1000 for row in measured]),
    ):
        axes.plot(tokens, times, marker="o", color=colour, label=label, linewidth=2)
        for x, y, row in zip(tokens, times, measured, strict=True):
            axes.annotate(
                f"{y:.0f}" if label == "reuse off" or row.turn == 1 else f"{y:.0f}\n({row.ratio:.1f}x)",
                (x, y),
                textcoords="offset points",
                xytext=(0, 8 if label == "reuse off" else -24),
                ha="center",
                fontsize=8,
                color=colour,
            )
    axes.set_title(heading, fontsize=12, fontweight="bold")
    axes.set_xlabel("prompt tokens of the turn")
    axes.set_ylabel("time to first token, ms")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.2)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    figure.supxlabel("; ".join(f"{name}: {value}" for name, value in settings.items()), fontsize=6, wrap=True)
    figure.savefig(path)
