"""What ``kvloop top`` shows of what routers say."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from kvloop.watch.snapshot import Snapshot, document, merged, quantile, samples, view
from kvloop.watch.top_screen import screen

METRICS = """\
# TYPE kvloop_router_turns_total counter
kvloop_router_turns_total{path="cold",reason="miss"} 3.0
kvloop_router_turns_total{path="cold",reason="diverged"} 1.0
kvloop_router_turns_total{path="warm",reason=""} 40.0
kvloop_router_turns_created{path="warm",reason=""} 1.7e+09
# TYPE kvloop_router_reused_tokens_total counter
kvloop_router_reused_tokens_total 30000.0
# TYPE kvloop_router_recomputed_tokens_total counter
kvloop_router_recomputed_tokens_total{path="cold"} 8000.0
kvloop_router_recomputed_tokens_total{path="warm"} 2000.0
# TYPE kvloop_router_time_to_first_token_seconds histogram
kvloop_router_time_to_first_token_seconds_bucket{le="0.1",path="warm"} 20.0
kvloop_router_time_to_first_token_seconds_bucket{le="0.25",path="warm"} 40.0
kvloop_router_time_to_first_token_seconds_bucket{le="+Inf",path="warm"} 40.0
kvloop_router_time_to_first_token_seconds_count{path="warm"} 40.0
kvloop_router_time_to_first_token_seconds_sum{path="warm"} 4.0
# TYPE kvloop_router_running_turns gauge
kvloop_router_running_turns 2.0
"""


def engine(name: str, role: str, **fields: Any) -> dict[str, Any]:
    decodes = role == "decode"
    return {
        "name": name,
        "role": role,
        "healthy": True,
        "ready": True,
        "draining": False,
        "load": 1,
        "runningTurns": 2,
        "liveHandles": 12 if decodes else 0,
        "retainedBlocks": 480 if decodes else 0,
        "retainedBlocksLimit": 500 if decodes else None,
        **fields,
    }


def pair(verdict: str, detail: str = "", decode: str = "demo-decode-0") -> dict[str, Any]:
    return {"prefill": "demo-prefill-0", "decode": decode, "verdict": verdict, "detail": detail}


NOW = Snapshot(
    at=130.0,
    routers=1,
    running_turns=2,
    draining=0,
    engines=(
        engine("demo-decode-0", "decode"),
        engine("demo-decode-1", "decode", draining=True, retainedBlocks=0, liveHandles=0),
        engine("demo-prefill-0", "prefill", healthy=False),
    ),
    pairs=(pair("verified"), pair("failed", "nothing was read", "demo-decode-1")),
    templates=({"model": "tiny", "appendOnly": True, "cases": [{"case": "answer", "verdict": "append_only"}]},),
    samples=samples(METRICS),
)

SHOWN = """\
kvloop: 1 router, 2 turns running, 44 ended since the start

ENGINE          ROLE     STATE      LOAD  TURNS  HANDLES  RETAINED BLOCKS
demo-decode-0   decode   serving       1      2       12  [############] 480 of 500
demo-decode-1   decode   draining      1      2        0  [            ] 0 of 500
demo-prefill-0  prefill  unhealthy     1      2        -  -

PATH  TURNS  TTFT MEDIAN  TTFT P95  BETWEEN PIECES
cold      4            -         -               -
warm     40     100.0 ms  235.0 ms               -

Not warm because  miss 3, diverged 1
Prompt tokens     reused 30,000 (75%), computed 10,000
Pairs             1 of 2 verified
                  demo-prefill-0 - demo-decode-1 failed: nothing was read
Chat template     tiny: append-only (answer: append only)
"""


def drawn(before: Snapshot | None, now: Snapshot) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(screen(view(before, now)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def test_the_screen() -> None:
    assert drawn(None, NOW) == SHOWN


def test_in_an_interval_only_what_happened_in_it_counts() -> None:
    later = replace(NOW, at=140.0, samples={series: value * 1.5 for series, value in NOW.samples.items()})

    shown = view(NOW, later)

    assert {row.path: row.turns for row in shown.paths} == {"cold": 2, "warm": 20}
    assert shown.reused_tokens == 15000
    assert "22 ended in the last 10 s (2.2/s)" in drawn(NOW, later)
    assert document(shown)["intervalSeconds"] == 10
    assert drawn(NOW, replace(NOW, at=140.0)).count("cold") == 0


def test_a_router_that_was_started_anew_counts_from_its_start() -> None:
    anew = replace(NOW, at=140.0, samples={series: value / 4 for series, value in NOW.samples.items()})

    assert {row.path: row.turns for row in view(NOW, anew).paths} == {"cold": 1, "warm": 10}


def test_several_routers_are_added_up_and_the_worst_verdict_counts() -> None:
    other = replace(NOW, pairs=(pair("wrong"),), engines=(engine("demo-decode-0", "decode", healthy=False),))

    both = merged([NOW, other])

    assert (both.routers, both.running_turns) == (2, 4)
    (decode,) = [each for each in both.engines if each["name"] == "demo-decode-0"]
    assert (decode["load"], decode["retainedBlocks"], decode["healthy"]) == (2, 960, False)
    assert [each["verdict"] for each in both.pairs] == ["wrong", "failed"]
    assert sum(row.turns for row in view(None, both).paths) == 88


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([], 0.5, None),
        ([(1.0, 0.0), (float("inf"), 0.0)], 0.5, None),
        ([(1.0, 10.0), (float("inf"), 10.0)], 0.5, 0.5),
        ([(1.0, 0.0), (3.0, 4.0), (float("inf"), 4.0)], 0.5, 2.0),
        ([(1.0, 1.0), (float("inf"), 10.0)], 0.95, 1.0),
    ],
)
def test_a_quantile_is_interpolated_as_prometheus_does(
    buckets: list[tuple[float, float]], share: float, expected: float | None
) -> None:
    assert quantile(buckets, share) == expected


@settings(max_examples=25)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=6), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_that_holds_it(counts: list[int], share: float) -> None:
    total, buckets = 0, []
    for bound, count in enumerate(counts, 1):
        total += count
        buckets.append((float(bound), float(total)))
    buckets.append((float("inf"), float(total)))

    found = quantile(buckets, share)

    if not total:
        assert found is None
    else:
        assert found is not None
        below = max((up_to for bound, up_to in buckets if bound < found), default=0.0)
        assert below <= share * total + 1e-9
