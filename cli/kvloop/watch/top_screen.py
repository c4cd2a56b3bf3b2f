"""What ``kvloop top`` draws. Pure: a view in, something that rich prints out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvloop.watch.explained import milliseconds, template_lines
from kvloop.watch.snapshot import View, failing

_BAR = 12
_FULL = 0.9
_STYLES = {"verified": "green", "unknown": "yellow"}


def screen(shown: View) -> RenderableType:
    """The whole screen."""
    return Group(_head(shown), Text(), _engines(shown), Text(), _paths(shown), Text(), *_below(shown))


def _head(shown: View) -> Text:
    now = shown.now
    since = "since the start" if shown.seconds is None else f"in the last {shown.seconds:.0f} s"
    turns = sum(row.turns for row in shown.paths)
    pace = "" if not shown.seconds else f" ({turns / shown.seconds:.1f}/s)"
    draining = f", {now.draining} draining" if now.draining else ""
    routers = f"{now.routers} router{'s' if now.routers != 1 else ''}{draining}"
    return Text(f"kvloop: {routers}, {now.running_turns} turns running, {turns:,} ended {since}{pace}", style="bold")


def _engines(shown: View) -> Table:
    table = _table("ENGINE", "ROLE", "STATE", "LOAD", "TURNS", "HANDLES", "RETAINED BLOCKS", right=(3, 4, 5))
    for engine in shown.now.engines:
        state = _state(engine)
        decodes = engine["role"] == "decode"
        table.add_row(
            engine["name"],
            engine["role"],
            Text(state, style="green" if state == "serving" else "red" if state == "unhealthy" else "yellow"),
            str(engine["load"]),
            str(engine["runningTurns"]),
            str(engine["liveHandles"]) if decodes else "-",
            _retained(engine) if decodes else "-",
        )
    return table


def _state(engine: Mapping[str, Any]) -> str:
    if not engine["healthy"]:
        return "unhealthy"
    if engine["draining"]:
        return "draining"
    return "serving" if engine["ready"] else "not ready"


def _retained(engine: Mapping[str, Any]) -> Text:
    blocks, limit = engine["retainedBlocks"], engine["retainedBlocksLimit"]
    if limit is None:
        return Text(f"{blocks:,}")
    share = min(1.0, blocks / limit) if limit else 1.0
    bar = "#" * round(share * _BAR)
    return Text(f"[{bar:<{_BAR}}] {blocks:,} of {limit:,}", style="red" if share >= _FULL else "")


def _paths(shown: View) -> Table:
    table = _table("PATH", "TURNS", "TTFT MEDIAN", "TTFT P95", "BETWEEN PIECES", right=(1, 2, 3, 4))
    for row in shown.paths:
        times = (row.ttft_median, row.ttft_p95, row.gap_median)
        table.add_row(row.path, f"{row.turns:,}", *map(milliseconds, times))
    return table


def _below(shown: View) -> list[Text]:
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in shown.reasons) or "-"
    prompt = shown.reused_tokens + shown.computed_tokens
    share = f" ({shown.reused_tokens / prompt:.0%})" if prompt else ""
    lines = [
        Text(f"Not warm because  {reasons}"),
        Text(f"Prompt tokens     reused {shown.reused_tokens:,}{share}, computed {shown.computed_tokens:,}"),
    ]
    pairs = shown.now.pairs
    bad = failing(pairs)
    lines.append(Text(f"Pairs             {len(pairs) - len(bad)} of {len(pairs)} verified"))
    for pair in bad:
        detail = f": {pair['detail']}" if pair["detail"] else ""
        text = f"                  {pair['prefill']} - {pair['decode']} {pair['verdict']}{detail}"
        lines.append(Text(text, style=_STYLES.get(pair["verdict"], "red")))
    for found in shown.now.templates:
        (line,) = template_lines(found)
        lines.append(Text(f"Chat template     {found['model']}: {line}", style="" if found["appendOnly"] else "yellow"))
    return lines


def _table(*columns: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", no_wrap=True)
    return table
