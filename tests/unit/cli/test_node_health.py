"""Probe results -> started, ready, failed; and when a container starts again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from kvloop.node.health import Health, ProbeKind, hasten
from kvloop.node.model import Probe, Probes, TcpSocket
from kvloop.node.restarts import BackOff, is_restarted

CHECK = TcpSocket(port=1)
S, R, L = ProbeKind.STARTUP, ProbeKind.READINESS, ProbeKind.LIVENESS
ALL = Probes(
    startup=Probe(check=CHECK, failure_threshold=3),
    readiness=Probe(check=CHECK, failure_threshold=2, success_threshold=2),
    liveness=Probe(check=CHECK, failure_threshold=2),
)


def played(probes: Probes, results: Iterable[tuple[ProbeKind, bool]]) -> Health:
    health = Health(probes=probes)
    for kind, success in results:
        health = health.after(kind, success)
    return health


@pytest.mark.parametrize(
    ("probes", "results", "wanted"),
    [
        pytest.param(Probes(), [], (True, True, None), id="no probes: ready at once"),
        pytest.param(ALL, [], (False, False, None), id="nothing known yet"),
        pytest.param(ALL, [(S, True)], (True, False, None), id="started, not ready before the first result"),
        pytest.param(ALL, [(S, True), (R, True)], (True, False, None), id="one success of two"),
        pytest.param(ALL, [(S, True), (R, True), (R, True)], (True, True, None), id="ready"),
        pytest.param(ALL, [(S, True), (R, True), (R, False), (R, True)], (True, False, None), id="not in a row"),
        pytest.param(ALL, [(S, True), *[(R, True)] * 2, (R, False)], (True, True, None), id="one failure of two"),
        pytest.param(ALL, [(S, True), *[(R, True)] * 2, *[(R, False)] * 2], (True, False, None), id="ready no more"),
        pytest.param(ALL, [(R, True), (R, True), (S, True)], (True, False, None), id="readiness waits for startup"),
        pytest.param(ALL, [(L, False), (L, False)], (False, False, None), id="liveness waits for startup"),
        pytest.param(ALL, [(S, False)] * 2, (False, False, None), id="startup may fail twice"),
        pytest.param(ALL, [(S, False)] * 3, (False, False, S), id="startup failed"),
        pytest.param(ALL, [(S, True), (S, False), (S, False), (S, False)], (True, False, None), id="startup is over"),
        pytest.param(ALL, [(S, True), (L, False), (L, False)], (True, False, L), id="liveness failed"),
        pytest.param(
            ALL, [(S, True), *[(R, True)] * 2, (L, False), (L, False)], (True, False, L), id="failed is not ready"
        ),
    ],
)
def test_verdicts(
    probes: Probes, results: list[tuple[ProbeKind, bool]], wanted: tuple[bool, bool, ProbeKind | None]
) -> None:
    health = played(probes, results)

    assert (health.started, health.ready, health.failed) == wanted


_results = st.lists(st.tuples(st.sampled_from(ProbeKind), st.booleans()), max_size=40)
_probe = st.none() | st.builds(
    Probe,
    check=st.just(CHECK),
    failure_threshold=st.integers(1, 4),
    success_threshold=st.integers(1, 3),
    period=st.integers(1, 30),
)


@given(st.builds(Probes, startup=_probe, readiness=_probe, liveness=_probe), _results)
def test_a_failure_is_final_and_never_comes_without_enough_bad_results(
    probes: Probes, results: list[tuple[ProbeKind, bool]]
) -> None:
    health = Health(probes=probes)
    failed = None
    for number, (kind, success) in enumerate(results):
        health = health.after(kind, success)
        if failed is not None:
            assert health.failed is failed
        failed = health.failed
        if failed is not None:
            probe = health.probe(failed)
            assert probe is not None
            bad = [result for result in results[: number + 1] if result == (failed, False)]
            assert len(bad) >= probe.failure_threshold
            assert not health.ready


@given(st.builds(Probes, startup=_probe, readiness=_probe, liveness=_probe), st.sampled_from([0.2, 0.5, 1, 3]))
def test_hastened_probes_leave_a_container_at_least_as_much_time(probes: Probes, limit: float) -> None:
    faster = hasten(probes, period_limit=limit)

    assert faster.liveness == probes.liveness
    for before, after in ((probes.startup, faster.startup), (probes.readiness, faster.readiness)):
        assert (before is None) is (after is None)
        if before is not None and after is not None:
            assert after.period <= limit or after == before
            assert after.period * after.failure_threshold >= before.period * before.failure_threshold - 1e-9


def test_the_back_off_is_the_kubelets() -> None:
    back_off = BackOff()

    assert [back_off.delay(ends) for ends in range(1, 9)] == [0, 10, 20, 40, 80, 160, 300, 300]
    assert back_off.delay(100_000) == 300


def test_a_container_that_ran_long_enough_starts_over() -> None:
    back_off = BackOff(base=1, limit=10)

    assert back_off.ends_in_a_row(5, ran=19.9) == 6
    assert back_off.ends_in_a_row(5, ran=20) == 1


@pytest.mark.parametrize(
    ("policy", "code", "wanted"),
    [
        ("Always", 0, True),
        ("Always", 1, True),
        ("OnFailure", 0, False),
        ("OnFailure", 137, True),
        ("Never", 0, False),
        ("Never", 1, False),
    ],
)
def test_restart_policy(policy: str, code: int, wanted: bool) -> None:
    assert is_restarted(policy, code) is wanted
