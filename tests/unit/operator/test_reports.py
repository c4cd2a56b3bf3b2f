"""What routers say, and what all of them say together."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_operator.reports import (
    EngineReport,
    InvalidReport,
    PairReport,
    Reports,
    RouterReport,
    Verdict,
    drain_reports,
    pair_reports,
    parse_report,
)
from kvloop_operator.rollout import DrainReport
from tests.unit.operator.scenes import NOW, pod

ENGINE = {
    "name": "demo-decode-0",
    "role": "decode",
    "podUID": "d0",
    "runningTurns": 2,
    "liveHandles": 3,
    "lastDeadlineSeconds": 12.5,
    "draining": True,
    "healthy": True,
}
PAIR = {
    "prefill": "demo-prefill-0",
    "prefillPodUID": "p0",
    "decode": "demo-decode-0",
    "decodePodUID": "d0",
    "kvRevision": "abc",
    "verdict": "verified",
    "toDecodeBytes": 100,
    "toPrefillBytes": 200,
    "toDecodeSeconds": 0.5,
    "toPrefillSeconds": 0.25,
    "streams": None,
    "attempts": 1,
    "detail": "",
}


def parsed(*, engine: dict[str, Any] | None = None, pair: dict[str, Any] | None = None) -> RouterReport:
    engines, pairs = {"engines": [{**ENGINE, **(engine or {})}]}, {"pairs": [{**PAIR, **(pair or {})}]}
    return parse_report("router-0", engines, pairs, NOW)


def router(name: str, *engines: EngineReport, pairs: tuple[PairReport, ...] = ()) -> RouterReport:
    return RouterReport(name, engines, pairs)


def engine(uid: str, turns: int = 0, handles: int = 0, deadline: float | None = None, *, draining: bool = True) -> Any:
    return EngineReport(
        pod_uid=uid, running_turns=turns, live_handles=handles, last_deadline=deadline, draining=draining
    )


def pair(verdict: Verdict, detail: str = "") -> PairReport:
    return PairReport(
        prefill="p", decode="d", prefill_uid="p0", decode_uid="d0", kv_revision="abc", verdict=verdict, detail=detail
    )


def draining(uid: str, label: str | None = "100") -> dict[str, Any]:
    found = pod("demo-decode-0", "decode", draining=label)
    found["metadata"]["uid"] = uid
    return found


def test_an_engine_is_read_with_its_deadline_as_a_moment() -> None:
    assert parsed().engines == (engine("d0", 2, 3, NOW + 12.5),)


def test_without_handles_there_is_no_deadline() -> None:
    assert parsed(engine={"liveHandles": 0}).engines[0].last_deadline is None


def test_a_pair_is_read() -> None:
    (found,) = parsed().pairs
    assert found.key == ("p0", "d0")
    assert (found.verdict, found.to_decode_bytes, found.to_prefill_seconds) == (Verdict.VERIFIED, 100, 0.25)


def test_routers_of_another_version_say_less() -> None:
    older = {key: value for key, value in ENGINE.items() if key != "draining"}
    report = parse_report("r", {"engines": [older]}, {"pairs": []}, NOW)
    assert not report.engines[0].draining
    shorter = {key: value for key, value in PAIR.items() if not key.endswith("Seconds")}
    (found,) = parse_report("r", {"engines": []}, {"pairs": [shorter]}, NOW).pairs
    assert (found.to_decode_seconds, found.to_prefill_seconds) == (0.0, 0.0)


@pytest.mark.parametrize("answer", [None, [], "x", {}, {"engines": None}, {"engines": [1]}, {"engines": {}}])
def test_an_answer_of_another_shape_is_refused(answer: Any) -> None:
    with pytest.raises(InvalidReport, match="engines: not a list of objects"):
        parse_report("r", answer, {"pairs": []}, NOW)


@pytest.mark.parametrize(
    ("engine", "pair", "field"),
    [
        ({"podUID": None}, {}, "podUID"),
        ({"runningTurns": -1}, {}, "runningTurns"),
        ({"runningTurns": True}, {}, "runningTurns"),
        ({"runningTurns": "2"}, {}, "runningTurns"),
        ({"liveHandles": 1.5}, {}, "liveHandles"),
        ({"lastDeadlineSeconds": float("nan")}, {}, "lastDeadlineSeconds"),
        ({"lastDeadlineSeconds": -1}, {}, "lastDeadlineSeconds"),
        ({"lastDeadlineSeconds": "soon"}, {}, "lastDeadlineSeconds"),
        ({}, {"verdict": "fine"}, "verdict"),
        ({}, {"verdict": None}, "verdict"),
        ({}, {"prefillPodUID": 7}, "prefillPodUID"),
        ({}, {"toDecodeBytes": None}, "toDecodeBytes"),
        ({}, {"toDecodeSeconds": float("inf")}, "toDecodeSeconds"),
        ({}, {"detail": 1}, "detail"),
    ],
)
def test_a_value_that_is_none_is_refused_by_name(engine: dict[str, Any], pair: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidReport, match=f"^{field}: "):
        parsed(engine=engine, pair=pair)


def test_a_drain_is_the_sum_of_the_routers_turns_and_what_handles_they_share() -> None:
    reports = Reports(
        routers=2,
        answered=(router("a", engine("d0", 1, 2, NOW + 5), engine("d1", 9)), router("b", engine("d0", 3, 4, NOW + 9))),
    )
    assert drain_reports(reports, [draining("d0")]) == {
        "d0": DrainReport(running_turns=4, live_handles=4, last_deadline=NOW + 9, acknowledged=True)
    }


def test_no_drain_is_known_until_every_router_has_answered() -> None:
    reports = Reports(routers=2, answered=(router("a", engine("d0")),), failures={"b": "b: no answer"})
    assert drain_reports(reports, [draining("d0")]) == {}


def test_a_pod_that_no_router_knows_has_nothing_left() -> None:
    reports = Reports(routers=1, answered=(router("a"),))
    assert drain_reports(reports, [draining("d0")]) == {"d0": DrainReport(0, 0, None, acknowledged=True)}


def test_without_routers_nobody_starts_a_turn() -> None:
    assert drain_reports(Reports(), [draining("d0")]) == {"d0": DrainReport(0, 0, None, acknowledged=True)}


def test_one_router_that_has_not_seen_the_label_may_still_start_a_turn() -> None:
    reports = Reports(routers=2, answered=(router("a", engine("d0")), router("b", engine("d0", draining=False))))
    assert not drain_reports(reports, [draining("d0")])["d0"].acknowledged


def test_a_router_that_does_not_know_the_pod_has_nothing_to_acknowledge() -> None:
    reports = Reports(routers=2, answered=(router("a", engine("d0")), router("b")))
    assert drain_reports(reports, [draining("d0")])["d0"].acknowledged


def test_only_pods_that_drain_are_reported() -> None:
    reports = Reports(routers=1, answered=(router("a", engine("d0"), engine("d1")),))
    assert set(drain_reports(reports, [draining("d0"), draining("d1", label=None)])) == {"d0"}


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        ((Verdict.VERIFIED, Verdict.VERIFIED), Verdict.VERIFIED),
        ((Verdict.VERIFIED, Verdict.UNKNOWN), Verdict.UNKNOWN),
        ((Verdict.UNKNOWN, Verdict.VERIFIED), Verdict.UNKNOWN),
        ((Verdict.FAILED, Verdict.UNKNOWN, Verdict.VERIFIED), Verdict.FAILED),
        ((Verdict.VERIFIED, Verdict.FAILED), Verdict.FAILED),
        ((Verdict.FAILED, Verdict.WRONG, Verdict.VERIFIED), Verdict.WRONG),
    ],
)
def test_the_worst_verdict_on_a_pair_counts(verdicts: tuple[Verdict, ...], worst: Verdict) -> None:
    reports = Reports(answered=tuple(router("r", pairs=(pair(each),)) for each in verdicts))
    assert pair_reports(reports)["p0", "d0"].verdict is worst


def test_of_two_equal_verdicts_the_first_router_s_words_are_kept() -> None:
    reports = Reports(
        answered=(
            router("a", pairs=(pair(Verdict.FAILED, "first"),)),
            router("b", pairs=(pair(Verdict.FAILED, "second"),)),
        )
    )
    assert pair_reports(reports)["p0", "d0"].detail == "first"
